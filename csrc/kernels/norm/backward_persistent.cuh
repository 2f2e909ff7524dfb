// The norms' backward (backward.cuh) for rows that fit a block: a persistent grid. Each thread keeps the partial grad_w
// and grad_b of its columns in registers over all rows that it sees. cp.async copies the next rows to a ring of stages
// in shared memory. Each thread copies what it will read itself, so the ring needs no barriers; where rows are not
// aligned, the lanes of a warp share their copies, and a warp still needs nothing of another one but sums.
// Persistent-grid idea: quack's rmsnorm backward.
#pragma once
#include <algorithm>

#include "backward_row.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/shifted.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/row_part.cuh"
#include "plan.h"

namespace llmk::kernels::norm {

// Threads of a block, at most, and stages of the ring, each with one row per group: as many as fit with four vectors of
// each operand per thread. Rows of bfloat16, an H200:
//
//   value       | case              | result
//   ------------|-------------------|--------------------------------------------
//   672 threads | two vectors       | 1.6 times slower: 80 registers are too few
//   4 stages    | up to two vectors | up to 10 % slower
constexpr int kMaxThreads = 512;
template <int kVectors>
constexpr int kStages = kVectors == 4 ? 2 : 3;

// Vectors of a thread, at most: four of LayerNorm, with its second sum over rows, would not fit the registers. Three
// spill a few, for rows that are not aligned: longer ones would be read element by element.
template <typename T, bool kCentered, bool kShifted>
constexpr int kMostVectors = kCentered && sizeof(T) == 2 ? (kShifted ? 3 : 2) : 4;

// Groups that share a warp go in step, over rows that lie side by side: they are a unit. So is a longer group, alone.
__host__ __device__ constexpr int unit_size(int group_threads) { return group_threads < 32 ? 32 / group_threads : 1; }

// Rows of any alignment (shifted.cuh). A vector of an operand is cut out of two aligned ones, this lane's copy and the
// next lane's, and a vector of grad_x, stored at its own aligned place, out of this lane's result and the next lane's.
// So the last two lanes of a warp have what the first two of the next warp have, too, for the lanes before them only:
//
//   lane        |  0 |  1 | .. | 29 | 30 | 31 |
//   copies      |  x |  x | .. |  x |  x |  x |   aligned vectors
//   computes    |  x |  x | .. |  x |  x |    |   its own vector of the row
//   adds, stores|  x |  x | .. |  x |    |    |
//
// That costs 2 lanes of 32. To get the vector from the next warp would take another barrier per row; to store single
// elements at the ends of every warp, not of the row only, would take more instructions than all of the store. What is
// read more than once is cut once: the result goes back to the thread's own place in the ring. An H200, bfloat16, us,
// forward and backward:
//
//   case                 | element by element | by vectors | aligned neighbour
//   ---------------------|--------------------|------------|------------------
//   rms_norm 8192x1001   | 99                 | 53         | 28
//   rms_norm 8192x4097   | 323                | 150        | 86
//   layer_norm 8192x1001 | 137                | 77         | 37
//   layer_norm 8192x4097 | 457                | 244        | 103
constexpr int kOwnLanes = 30;
__host__ __device__ constexpr int64_t shifted_warps(int64_t count, int vectors) {
  return (count + kOwnLanes * vectors - 1) / (kOwnLanes * vectors);
}

// Vectors of a thread for a row of `count` that is not aligned: two, or three where more rows fit a block so.
inline int shifted_vectors(int64_t count) {
  if (count <= 128) return 1;
  for (const int rows : {2, 1}) {
    for (const int vectors : {2, 3}) {
      if (shifted_warps(count, vectors) * rows <= kMaxThreads / 32) return vectors;
    }
  }
  return 4;
}

// The next lane's vector; the last lane gets its own.
template <typename T, int N>
__device__ Vec<T, N> from_next_lane(const Vec<T, N>& value) {
  const auto next = [](uint32_t word) { return __shfl_down_sync(0xffffffffu, word, 1); };
  const Words w = words_of(value);
  return of_words<T>(make_uint4(next(w.x), next(w.y), next(w.z), next(w.w)));
}

// A block for every SM, whose units take rows as they go, with kVectors vectors per thread. There is little to do for a
// byte, so that every instruction in the loop counts: what a thread does not have (columns behind the end, rows behind
// the last) is copied as zeros, which add nothing to a sum, instead of being asked for. kRounds: round(n) is what the
// forward multiplied by the weight. kShifted: rows of any alignment, by groups of whole warps; behind each of the first
// `rows_inside` rows lie others.
template <typename T, int kVectors, bool kCentered, bool kRounds, bool kShifted>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_kernel(const NormBackwardParams params, bool keep_inputs, int64_t rows_inside) {
  constexpr int N = kVecWidth<T>, kDepth = kStages<kVectors>, kSums = kCentered ? 3 : 2;
  constexpr bool kReloads = kVectors > 2 || kCentered;  // after a reduction, since registers are scarce
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(keep_inputs);
  extern __shared__ int4 ring[];  // [stage][operand][vector][thread of the block]
  __shared__ float shared[2][kSums * kMaxThreads / 32];
  const LooseGroup group{{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)}};
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int cols = static_cast<int>(params.cols), lane = group.rank % 32;
  const int stage_size = (params.grad_sum ? 3 : 2) * kVectors * threads;
  const auto slot = [&](int stage, int operand, int v) { return ring + stage + (operand * kVectors + v) * threads; };
  const int first_vector = kShifted ? group.rank / 32 * kOwnLanes + lane : group.rank;
  const int vector_step = kShifted ? group.threads / 32 * kOwnLanes : group.threads;
  const auto offset = [&](int v) { return (first_vector + v * vector_step) * N; };
  const auto has = [&](int v) {
    if constexpr (kShifted) return lane < kOwnLanes && offset(v) < cols;
    return first_vector + v * vector_step < static_cast<int>(params.cols / N);
  };

  const int unit_rows = unit_size(group.threads), row_of_unit = group.index % unit_rows;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  // Rows between the block's first unit and this one.
  const int64_t ahead = static_cast<int64_t>(group.index / unit_rows) * gridDim.x * unit_rows;
  const int64_t first = ahead + static_cast<int64_t>(blockIdx.x) * unit_rows;
  const int64_t rows = params.rows - row_of_unit;  // a group has a row if the first of its unit is less than this
  Rows<T> next(params, first + row_of_unit);       // to be copied
  T* grad_x = next.grad_x;
  int64_t next_row = first;
  // Copies the aligned vector in which the thread's own one begins. Those in which the row begins and ends are copied
  // whole, unless the operand begins or ends there, too: nothing outside of that is touched. (cp.async can copy a part
  // of a vector as well, but memcheck takes that for an access of all of it.)
  [[maybe_unused]] const auto copy_shifted = [&](int4* target, const T* row, const void* operand, int v) {
    const auto address = reinterpret_cast<uintptr_t>(row + offset(v));
    const auto* const source = reinterpret_cast<const T*>(address & ~uintptr_t{15});
    const int shift = misalignment(row), left = next_row < rows ? cols - offset(v) + shift : 0;
    const bool at_begin = v == 0 && source < operand, at_end = left < N && next_row >= rows_inside;
    if (left > 0 && (at_begin || at_end)) {
#pragma unroll 1
      for (int i = at_begin ? shift : 0; i < min(left, N); ++i) reinterpret_cast<T*>(target)[i] = source[i];
    } else {
      cp_async_16(target, source, left > 0 ? 16 : 0, policy);
    }
  };
  const auto copy_next = [&](int stage) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kShifted) {
        copy_shifted(slot(stage, 0, v), next.x, params.x, v);
        copy_shifted(slot(stage, 1, v), next.grad_y, params.grad_y, v);
        if (params.grad_sum) copy_shifted(slot(stage, 2, v), next.grad_sum, params.grad_sum, v);
        continue;
      }
      const int bytes = has(v) && next_row < rows ? 16 : 0;
      cp_async_16(slot(stage, 0, v), next.x + offset(v), bytes, policy);
      cp_async_16(slot(stage, 1, v), next.grad_y + offset(v), bytes, policy);
      if (params.grad_sum) cp_async_16(slot(stage, 2, v), next.grad_sum + offset(v), bytes, policy);
    }
    cp_async_commit();
    next_row += step;
    next.x += step * params.x_stride;
    next.grad_y += step * params.grad_y_stride;
    next.grad_sum += step * params.grad_sum_stride;
  };

  pdl_wait();
#pragma unroll kShifted ? 1 : kDepth
  for (int stage = 0; stage < kDepth - 1; ++stage) copy_next(thread + stage * stage_size);

  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  const float weight_offset = next.weight ? static_cast<float>(params.options.weight_offset) : 0.f;
  V weight[kVectors];
  float grad_weight[kVectors][N];
  [[maybe_unused]] float grad_bias[kVectors][N];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kShifted) {
      weight[v] = next.weight ? load_shifted(next.weight, offset(v), 0, cols) : V::of([](int) { return 1.f; });
    } else {
      weight[v] = next.weight && has(v) ? V::load(next.weight + offset(v)) : V::of([](int) { return 1.f; });
    }
#pragma unroll
    for (int i = 0; i < N; ++i) grad_weight[v][i] = grad_bias[v][i] = 0.f;
  }
  const auto scale = [&](int v, int i) { return weight_offset + weight[v][i]; };

  int stage = thread, free_stage = thread + (kDepth - 1) * stage_size, parity = 0;
  // As many turns for every unit of a block: racecheck takes warps that met less often at barriers for earlier ones.
  for (int64_t row = first; row < params.rows + ahead; row += step) {
    if constexpr (kShifted) __syncwarp();  // the lanes have read what they will overwrite for each other
    copy_next(free_stage);
    cp_async_wait<kDepth - 1>();
    const auto load = [&](int operand, int v) { return V::load(reinterpret_cast<const T*>(slot(stage, operand, v))); };
    // Cut out of this lane's copy and the next one's. `next_of_operand`: where its row is that is to be copied next.
    [[maybe_unused]] const auto load_cut = [&](int operand, int v, const T* next_of_operand, int64_t stride) {
      const auto* const low = reinterpret_cast<const T*>(slot(stage, operand, v));
      const V high = V::load(low + (lane < 31 ? N : 0));
      return cut(V::load(low), high, misalignment(next_of_operand - kDepth * step * stride));
    };
    V x[kVectors], grad_y[kVectors];
    if constexpr (kShifted) {
      constexpr int kBatch = kVectors < 2 ? 1 : 2;
      __syncwarp();  // what the lanes have copied has arrived
#pragma unroll
      for (int begin = 0; begin < kVectors; begin += kBatch) {
#pragma unroll
        for (int v = begin; v < kVectors && v < begin + kBatch; ++v) {
          x[v] = load_cut(0, v, next.x, params.x_stride), grad_y[v] = load_cut(1, v, next.grad_y, params.grad_y_stride);
          if (offset(v) + N > cols) {  // the copy did not end with the row
            x[v] = first_of(x[v], cols - offset(v)), grad_y[v] = first_of(grad_y[v], cols - offset(v));
          }
        }
        if constexpr (!kReloads) continue;
        __syncwarp();  // both lanes have read it
#pragma unroll
        for (int v = begin; v < kVectors && v < begin + kBatch; ++v) {
          *reinterpret_cast<Words*>(slot(stage, 0, v)) = words_of(x[v]);
          *reinterpret_cast<Words*>(slot(stage, 1, v)) = words_of(grad_y[v]);
        }
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) x[v] = load(0, v), grad_y[v] = load(1, v);
    }
    float mean = 0.f, mean_g = 0.f;
    if constexpr (kCentered) {
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[0] += x[v][i];
          sums[1] += grad_y[v][i] * scale(v, i);
        }
      }
      if (kShifted && lane >= kOwnLanes) sums[0] = sums[1] = 0.f;
      group_sum(sums, group, shared[1]);
      mean = sums[0] * inverse_cols, mean_g = sums[1] * inverse_cols;
    }
    float sums[kSums] = {};
    const auto add_up = [&](int v, int i) {
      const float d = centered<kCentered>(x[v][i], mean);
      sums[0] += d * d;
      sums[1] += grad_y[v][i] * scale(v, i) * d;
      if constexpr (kCentered) sums[2] += d;
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kCentered && !has(v)) continue;  // the difference of no number from the mean is not 0
      if constexpr (kCentered && kReloads) x[v] = load(0, v), grad_y[v] = load(1, v);
      if (kCentered && kShifted && offset(v) + N > cols) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (offset(v) + i < cols) add_up(v, i);
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) add_up(v, i);
    }
    if (!kCentered && kShifted && lane >= kOwnLanes) sums[0] = sums[1] = 0.f;
    group_sum(sums, group, shared[kCentered ? 0 : parity]);
    Scalars scalars = row_scalars<kCentered>(sums, mean, mean_g, inverse_cols, eps);
    if (row >= rows) scalars = {};  // with an eps of 0, those of zeros would be infinite
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kReloads) x[v] = load(0, v), grad_y[v] = load(1, v);
      float n[N], grad[N];
#pragma unroll
      for (int i = 0; i < N; ++i) n[i] = centered<kCentered>(x[v][i], scalars.mean) * scalars.rstd;
      const V rounded = V::of([&](int i) { return n[i]; });
#pragma unroll
      for (int i = 0; i < N; ++i) {
        grad_weight[v][i] += grad_y[v][i] * (kRounds ? rounded[i] : n[i]);
        if constexpr (kCentered) grad_bias[v][i] += grad_y[v][i];
        grad[i] = scalars.rstd * without_means<kCentered>(grad_y[v][i] * scale(v, i), n[i], scalars);
      }
      if (params.grad_sum) {
        V extra;
        if constexpr (kShifted) {
          extra = load_cut(2, v, next.grad_sum, params.grad_sum_stride);
        } else {
          extra = load(2, v);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) grad[i] += extra[i];
      }
      if constexpr (kShifted) {
        const V mine = V::of([&](int i) { return grad[i]; }), of_next = from_next_lane(mine);
        if (has(v) && row < rows) {
          const int head = -misalignment(grad_x) & (N - 1);  // columns in front of the row's first aligned vector
          if (v == 0 && first_vector == 0) store_aligned(mine, grad_x, 0, 0, head);
          store_aligned(cut(mine, of_next, head), grad_x, offset(v) + head, 0, cols);
        }
      } else {
        if (has(v) && row < rows) V::of([&](int i) { return grad[i]; }).store(grad_x + offset(v));
      }
    }
    grad_x += step * params.cols;
    parity ^= 1;
    free_stage = stage;
    stage = stage + stage_size < kDepth * stage_size ? stage + stage_size : thread;
  }

  pdl_launch_dependents();
  // One row of each partial sum per block: its groups, if there are several, are added up in shared memory, in a fixed
  // order. Rows that are not aligned go there in any case.
  auto* const group_sums = reinterpret_cast<float*>(ring);  // [group][column]; at most one stage of the ring
  auto* partial = static_cast<float*>(params.partials) + blockIdx.x * params.cols;
  const int groups = blockDim.y, pitch = kShifted ? (cols + N - 1) / N * N : cols;
  const bool shares = kShifted || groups > 1;
  const auto add_groups = [&](const float(&of_thread)[kVectors][N]) {
    float* const target = shares ? group_sums + group.index * pitch : partial;
    if (shares) __syncthreads();  // what lies there has been read
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!has(v)) continue;
      float4* const mine = reinterpret_cast<float4*>(target + offset(v));
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float* const g = &of_thread[v][i];
        mine[i / 4] = make_float4(g[0], g[1], g[2], g[3]);
      }
    }
    if (shares) __syncthreads();
    if constexpr (kShifted) {
      for (int c = thread; c < cols; c += threads) {
        float sum = group_sums[c];
        for (int g = 1; g < groups; ++g) sum += group_sums[g * pitch + c];
        partial[c] = sum;
      }
    } else if (shares) {
      for (int c = 4 * thread; c < cols; c += 4 * threads) {
        const auto of_group = [&](int g) { return *reinterpret_cast<const float4*>(group_sums + g * cols + c); };
        float4 sum = of_group(0);
#pragma unroll 4
        for (int g = 1; g < groups; ++g) {
          const float4 more = of_group(g);
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        *reinterpret_cast<float4*>(partial + c) = sum;
      }
    }
    partial += params.partial_rows * params.cols;
  };
  cp_async_wait<0>();
  if (params.grad_weight) add_groups(grad_weight);
  if constexpr (kCentered) {
    if (params.grad_bias) add_groups(grad_bias);
  }
}

// The persistent kernel's plan for a row, and its grid; no vectors when the row is not for it.
struct PersistentPlan {
  RowPlan row;
  bool shifted;  // the row need not be aligned
  size_t ring_bytes;
  int64_t blocks;
  bool keep_inputs;
};

template <typename T, bool kCentered>
cudaError_t plan_persistent(const NormBackwardParams& params, PersistentPlan& plan) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  RowPlan& row = plan.row;
  row = {kVecWidth<T>, 0, 0, 1};
  plan.shifted = !is_vector<T>(params);
  const int64_t count = (params.cols + row.width - 1) / row.width;
  int vectors;
  if (plan.shifted) {
    vectors = std::min(shifted_vectors(count), kMostVectors<T, kCentered, true>);
    const int64_t threads = shifted_warps(count, vectors) * 32;
    if (count < kLeastShifted || threads > kMaxThreads) return cudaSuccess;
    row.threads_per_row = static_cast<int>(threads);
  } else {
    const int wanted = count > 2 * kMaxThreads || (count > 32 && count <= 64) ? 4 : count > 128 ? 2 : 1;
    vectors = std::min(wanted, kMostVectors<T, kCentered, false>);
    if (count > vectors * kMaxThreads) return cudaSuccess;
    row.threads_per_row = group_threads(count, vectors, kMaxThreads);
  }
  const int unit_rows = unit_size(row.threads_per_row);
  const int64_t units = (params.rows + unit_rows - 1) / unit_rows;
  const int operands = params.grad_sum ? 3 : 2, stages = vectors == 4 ? kStages<4> : kStages<1>;
  const int unit_threads = row.threads_per_row * unit_rows;
  const size_t unit_bytes = sizeof(int4) * stages * operands * vectors * unit_threads;
  const int64_t units_per_block =
      std::min<int64_t>({kMaxThreads / unit_threads, (units + device.sm_count - 1) / device.sm_count,
                         // the reduction needs some, too
                         static_cast<int64_t>((device.shared_bytes - 1024) / unit_bytes)});
  if (units_per_block == 0) return cudaSuccess;
  row.rows_per_block = static_cast<int>(units_per_block) * unit_rows;
  row.vectors = vectors;
  // More than half of an SM's, so that two blocks cannot pile up on one that is free early.
  plan.ring_bytes = std::max<size_t>(unit_bytes * units_per_block, device.shared_bytes / 2 + 1024);
  plan.blocks = std::min<int64_t>(units, device.sm_count);
  plan.keep_inputs = keeps_inputs(device, params.rows * params.cols * sizeof(T) * (operands + 1));
  return cudaSuccess;
}

template <typename T, bool kCentered>
cudaError_t launch_persistent(const PersistentPlan& plan, const NormBackwardParams& params, cudaStream_t stream) {
  const LaunchShape shape{plan.blocks, dim3(plan.row.threads_per_row, plan.row.rows_per_block), plan.ring_bytes};
  const int64_t apart =
      std::min({params.x_stride, params.grad_y_stride, params.grad_sum ? params.grad_sum_stride : params.x_stride});
  const int64_t rows_inside = apart < params.cols ? 0 : params.rows - 1;
  return dispatch_int<1, 2, 3, 4>(plan.row.vectors, [&](auto vectors) {
    return dispatch_int<0, 1>(plan.shifted, [&](auto shifted) {
      constexpr int kVectors = decltype(vectors)::value;
      constexpr bool kShifted = decltype(shifted)::value != 0;
      if constexpr (kVectors > kMostVectors<T, kCentered, kShifted> || (kVectors == 3 && !kShifted)) {
        return cudaErrorInvalidValue;  // no such plan
      } else {
        constexpr bool kMayRound = sizeof(T) == 2 && !kCentered;
        const auto kernel = params.options.cast_before_weight
                                ? norm_backward_kernel<T, kVectors, kCentered, kMayRound, kShifted>
                                : norm_backward_kernel<T, kVectors, kCentered, false, kShifted>;
        return launch(kernel, shape, stream, params, plan.keep_inputs, rows_inside);
      }
    });
  });
}

}  // namespace llmk::kernels::norm
