// The norms' backward (backward.cuh) for rows that fit a block: a persistent grid. Each thread keeps the partial grad_w
// and grad_b of its columns in registers over all rows that it sees. cp.async copies the next rows to a ring of stages
// in shared memory. Each thread copies what it will read itself, so the ring needs no barriers. Persistent-grid idea:
// quack's rmsnorm backward.
#pragma once
#include <algorithm>

#include "backward_row.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/sector.cuh"
#include "kernels/dispatch.cuh"
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

// Vectors of a thread, at most: four of LayerNorm, with its second sum over rows, would not fit the registers.
template <typename T, bool kCentered>
constexpr int kMostVectors = kCentered && sizeof(T) == 2 ? 2 : 4;

// Groups that share a warp go in step, over rows that lie side by side: they are a unit. So is a longer group, alone.
__host__ __device__ constexpr int unit_size(int group_threads) { return group_threads < 32 ? 32 / group_threads : 1; }

// A block for every SM, whose units take rows as they go, with kVectors vectors per thread. There is little to do for a
// byte, so that every instruction in the loop counts: what a thread does not have (columns behind the end, rows behind
// the last) is copied as zeros, which add nothing to a sum, instead of being asked for. kRounds: round(n) is what the
// forward multiplied by the weight.
template <typename T, int kVectors, bool kCentered, bool kRounds>
__global__ void __launch_bounds__(kMaxThreads) norm_backward_kernel(const NormBackwardParams params, bool keep_inputs) {
  constexpr int N = kVecWidth<T>, kDepth = kStages<kVectors>;
  constexpr int kSums = kRowSums<T, kCentered>;
  constexpr bool kReloads = kVectors > 2 || kCentered;  // after a reduction, since registers are scarce
  constexpr bool kOnce = kSumsOnce<T, kCentered>;
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(keep_inputs);
  extern __shared__ int4 ring[];  // [stage][operand][vector][thread of the block], maybe behind one that is left free
  __shared__ float shared[2][kSums * kMaxThreads / 32];
  const LooseGroup group{{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)}};
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int cols = static_cast<int>(params.cols);
  const int unit_rows = unit_size(group.threads), row_of_unit = group.index % unit_rows;
  // All rows of a block begin in the same half of a sector if the number of SMs is even, and units have a row.
  // (With four vectors of a thread, one more register costs 2 to 5 %.)
  const T* const first_row = Rows<T>(params, static_cast<int64_t>(blockIdx.x) * unit_rows).x;
  const int first_slot = thread + (kVectors < 4 ? vectors_to_sector(ring, first_row) : 0);
  const int stage_size = (params.grad_sum ? 3 : 2) * kVectors * threads;
  const auto slot = [&](int stage, int operand, int v) { return ring + stage + (operand * kVectors + v) * threads; };
  const auto offset = [&](int v) { return (group.rank + v * group.threads) * N; };
  const auto has = [&](int v) { return offset(v) < cols; };

  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  // Rows between the block's first unit and this one.
  const int64_t ahead = static_cast<int64_t>(group.index / unit_rows) * gridDim.x * unit_rows;
  const int64_t first = ahead + static_cast<int64_t>(blockIdx.x) * unit_rows;
  const int64_t rows = params.rows - row_of_unit;  // a group has a row if the first of its unit is less than this
  Rows<T> next(params, first + row_of_unit);       // to be copied
  T* grad_x = next.grad_x;
  int64_t next_row = first;
  const auto copy_next = [&](int stage) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
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

  // For number_near(), an element of each lane, a row ahead.
  [[maybe_unused]] const int lanes = min(group.threads, 32);
  [[maybe_unused]] const T* first_elements = next.x + group.rank % 32;
  [[maybe_unused]] Vec<T, 1> element{};
  const auto load_element = [&](int64_t row) {
    if (row < rows) element = Vec<T, 1>::load(first_elements);
    first_elements += step * params.x_stride;
  };

  pdl_wait();
  if constexpr (kOnce) load_element(first);
#pragma unroll
  for (int stage = 0; stage < kDepth - 1; ++stage) copy_next(first_slot + stage * stage_size);

  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  const float weight_offset = next.weight ? static_cast<float>(params.options.weight_offset) : 0.f;
  V weight[kVectors];
  float grad_weight[kVectors][N];
  [[maybe_unused]] float grad_bias[kVectors][N];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = next.weight && has(v) ? V::load(next.weight + offset(v)) : V::of([](int) { return 1.f; });
#pragma unroll
    for (int i = 0; i < N; ++i) grad_weight[v][i] = grad_bias[v][i] = 0.f;
  }
  const auto scale = [&](int v, int i) { return weight_offset + weight[v][i]; };

  int stage = first_slot, free_stage = first_slot + (kDepth - 1) * stage_size, parity = 0;
  // As many turns for every unit of a block: racecheck takes warps that met less often at barriers for earlier ones.
  for (int64_t row = first; row < params.rows + ahead; row += step) {
    float mean = 0.f, mean_g = 0.f;
    if constexpr (kOnce) {
      mean = number_near<T>(element, lanes);
      load_element(row + step);
    }
    copy_next(free_stage);
    cp_async_wait<kDepth - 1>();
    const auto load = [&](int operand, int v) { return V::load(reinterpret_cast<const T*>(slot(stage, operand, v))); };
    V x[kVectors], grad_y[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[v] = load(0, v), grad_y[v] = load(1, v);
    if constexpr (kCentered && !kOnce) {
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[0] += x[v][i];
          sums[1] += grad_y[v][i] * scale(v, i);
        }
      }
      group_sum(sums, group, shared[1]);
      mean = sums[0] * inverse_cols, mean_g = sums[1] * inverse_cols;
    }
    float sums[kSums] = {};
    const auto add_up = [&](int v, int i) {
      const float d = centered<kCentered>(x[v][i], mean), g = grad_y[v][i] * scale(v, i);
      sums[0] += d * d;
      sums[1] += g * d;
      if constexpr (kCentered) sums[2] += d;
      if constexpr (kOnce) sums[3] += g;
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kCentered && !has(v)) continue;  // the difference of no number from the mean is not 0
      if constexpr (kCentered && !kOnce && kReloads) x[v] = load(0, v), grad_y[v] = load(1, v);
#pragma unroll
      for (int i = 0; i < N; ++i) add_up(v, i);
    }
    group_sum(sums, group, shared[kCentered && !kOnce ? 0 : parity]);
    if constexpr (kOnce) mean_g = sums[3] * inverse_cols;
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
        const V extra = load(2, v);
#pragma unroll
        for (int i = 0; i < N; ++i) grad[i] += extra[i];
      }
      if (has(v) && row < rows) V::of([&](int i) { return grad[i]; }).store(grad_x + offset(v));
    }
    grad_x += step * params.cols;
    parity ^= 1;
    free_stage = stage;
    stage = stage + stage_size < kDepth * stage_size ? stage + stage_size : first_slot;
  }

  pdl_launch_dependents();
  // One row of each partial sum per block: its groups, if there are several, are added up in shared memory, in a fixed
  // order.
  auto* const group_sums = reinterpret_cast<float*>(ring);  // [group][column]; at most one stage of the ring
  auto* partial = static_cast<float*>(params.partials) + blockIdx.x * params.cols;
  const int groups = blockDim.y;
  const bool shares = groups > 1;
  const auto add_groups = [&](const float(&of_thread)[kVectors][N]) {
    float* const target = shares ? group_sums + group.index * cols : partial;
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
    if (shares) {
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

// The persistent kernel's plan for a row of vectors, and its grid; no vectors when the row is too long for it.
struct PersistentPlan {
  RowPlan row;
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
  const int64_t count = params.cols / row.width;
  const int wanted = count > 2 * kMaxThreads || (count > 32 && count <= 64) ? 4 : count > 128 ? 2 : 1;
  const int vectors = std::min(wanted, kMostVectors<T, kCentered>);
  if (count > vectors * kMaxThreads) return cudaSuccess;
  row.threads_per_row = group_threads(count, vectors, kMaxThreads);
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
  plan.ring_bytes = std::max<size_t>(sizeof(int4) + unit_bytes * units_per_block, device.shared_bytes / 2 + 1024);
  plan.blocks = std::min<int64_t>(units, device.sm_count);
  plan.keep_inputs = keeps_inputs(device, params.rows * params.cols * sizeof(T) * (operands + 1));
  return cudaSuccess;
}

template <typename T, bool kCentered>
cudaError_t launch_persistent(const PersistentPlan& plan, const NormBackwardParams& params, cudaStream_t stream) {
  const LaunchShape shape{plan.blocks, dim3(plan.row.threads_per_row, plan.row.rows_per_block), plan.ring_bytes};
  return dispatch_int<1, 2, 4>(plan.row.vectors, [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if constexpr (kVectors > kMostVectors<T, kCentered>) {
      return cudaErrorInvalidValue;  // no such plan
    } else {
      constexpr bool kMayRound = sizeof(T) == 2 && !kCentered;
      const auto kernel = params.options.cast_before_weight ? norm_backward_kernel<T, kVectors, kCentered, kMayRound>
                                                            : norm_backward_kernel<T, kVectors, kCentered, false>;
      return launch(kernel, shape, stream, params, plan.keep_inputs);
    }
  });
}

}  // namespace llmk::kernels::norm
