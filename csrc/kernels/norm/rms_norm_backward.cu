// Backward of RMSNorm. With n = x rstd, g = grad_y (offset + w) and a second gradient of x, grad_sum (add_rms_norm):
//
//   grad_x = round(rstd (g - n mean(g n)) + grad_sum)
//   grad_w = round(sum over rows of grad_y m)
//
// m is what the forward multiplied by the weight: round(n) with cast_before_weight, else n, as in eager autograd.
//
// rstd is recomputed: the row is read anyway, and the forward needs to save x only. float32, float16 or bfloat16;
// float32 arithmetic. Moves 3 elements per element (4 with grad_sum), plus one float32 row of partial grad_w per block.
//
// Rows that fit: a persistent grid. Each thread keeps the partial grad_w of its columns in registers over all rows that
// it sees. cp.async copies the next rows to a ring of stages in shared memory. Each thread copies what it will read
// itself, so the ring needs no barriers. Other rows: one kernel over rows for grad_x and rstd, one over column strips
// for grad_w. Partial sums are added in a fixed order; no atomics. Persistent-grid idea: quack's rmsnorm backward.
#include <algorithm>

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "plan.h"
#include "rms_norm.h"

namespace llmk::kernels {
namespace {

struct Scalars {
  float rstd;
  float mean_gn;  // mean of g n
};

// From sum(x^2) and sum(g x).
__device__ Scalars row_scalars(const float (&sums)[2], float inverse_cols, float eps) {
  const float rstd = rsqrtf(sums[0] * inverse_cols + eps);
  return {rstd, sums[1] * inverse_cols * rstd};
}

// What the forward multiplied by the weight.
template <typename T>
__device__ float weighted(float n, bool cast_before_weight) {
  return cast_before_weight ? to_float(from_float<T>(n)) : n;
}

// Where a row begins in each operand.
template <typename T>
struct Rows {
  const T *x, *grad_y, *grad_sum, *weight;
  T* grad_x;
  __device__ Rows(const RmsNormBackwardParams& params, int64_t row)
      : x(static_cast<const T*>(params.x) + row * params.x_stride),
        grad_y(static_cast<const T*>(params.grad_y) + row * params.grad_y_stride),
        grad_sum(static_cast<const T*>(params.grad_sum) + row * params.grad_sum_stride),
        weight(static_cast<const T*>(params.weight)),
        grad_x(static_cast<T*>(params.grad_x) + row * params.cols) {}
};

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

// Groups that share a warp go in step, over rows that lie side by side: they are a unit. So is a longer group, alone.
__host__ __device__ constexpr int unit_size(int group_threads) { return group_threads < 32 ? 32 / group_threads : 1; }

// A block for every SM, whose units take rows as they go, with kVectors vectors per thread. There is little to do for a
// byte, so that every instruction in the loop counts: what a thread does not have (columns behind the end, rows behind
// the last) is copied as zeros, which add nothing to a sum, instead of being asked for. kRounds: round(n) is what the
// forward multiplied by the weight.
template <typename T, int kVectors, bool kRounds>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_backward_kernel(const RmsNormBackwardParams params, bool keep_inputs) {
  constexpr int N = kVecWidth<T>, kDepth = kStages<kVectors>;
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(keep_inputs);
  extern __shared__ int4 ring[];  // [stage][operand][vector][thread of the block]
  __shared__ float shared[2][2 * kMaxThreads / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int stage_size = (params.grad_sum ? 3 : 2) * kVectors * threads;
  const auto slot = [&](int stage, int operand, int v) { return ring + stage + (operand * kVectors + v) * threads; };
  const auto has = [&](int v) { return group.rank + v * group.threads < static_cast<int>(params.cols / N); };
  const auto offset = [&](int v) { return (group.rank + v * group.threads) * N; };

  const int unit_rows = unit_size(group.threads), row_of_unit = group.index % unit_rows;
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

  pdl_wait();
#pragma unroll
  for (int stage = 0; stage < kDepth - 1; ++stage) copy_next(thread + stage * stage_size);

  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  const float weight_offset = next.weight ? static_cast<float>(params.options.weight_offset) : 0.f;
  V weight[kVectors];
  float grad_weight[kVectors][N];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = next.weight && has(v) ? V::load(next.weight + offset(v)) : V::of([](int) { return 1.f; });
#pragma unroll
    for (int i = 0; i < N; ++i) grad_weight[v][i] = 0.f;
  }
  const auto scale = [&](int v, int i) { return weight_offset + weight[v][i]; };

  int stage = thread, free_stage = thread + (kDepth - 1) * stage_size, parity = 0;
  // As many turns for every unit of a block: racecheck takes warps that met less often at barriers for earlier ones.
  for (int64_t row = first; row < params.rows + ahead; row += step) {
    copy_next(free_stage);
    cp_async_wait<kDepth - 1>();
    const auto load = [&](int operand, int v) { return V::load(reinterpret_cast<const T*>(slot(stage, operand, v))); };
    V x[kVectors], grad_y[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[v] = load(0, v), grad_y[v] = load(1, v);
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sums[0] += x[v][i] * x[v][i];
        sums[1] += grad_y[v][i] * scale(v, i) * x[v][i];
      }
    }
    group_sum(sums, group, shared[parity]);
    Scalars scalars = row_scalars(sums, inverse_cols, eps);
    if (row >= rows) scalars = {};  // with an eps of 0, those of zeros would be infinite
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kVectors == 4) x[v] = load(0, v), grad_y[v] = load(1, v);  // registers are scarce
      float n[N], grad[N];
#pragma unroll
      for (int i = 0; i < N; ++i) n[i] = x[v][i] * scalars.rstd;
      const V rounded = V::of([&](int i) { return n[i]; });
#pragma unroll
      for (int i = 0; i < N; ++i) {
        grad_weight[v][i] += grad_y[v][i] * (kRounds ? rounded[i] : n[i]);
        grad[i] = scalars.rstd * (grad_y[v][i] * scale(v, i) - n[i] * scalars.mean_gn);
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
    stage = stage + stage_size < kDepth * stage_size ? stage + stage_size : thread;
  }

  pdl_launch_dependents();
  if (!params.grad_weight) return;
  // One row of partial sums per block: its groups are added up in shared memory, in a fixed order.
  auto* const group_sums = reinterpret_cast<float*>(ring);  // [group][column]; less than one stage of the ring
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!has(v)) continue;
    float4* const mine = reinterpret_cast<float4*>(group_sums + group.index * params.cols + offset(v));
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float* const g = &grad_weight[v][i];
      mine[i / 4] = make_float4(g[0], g[1], g[2], g[3]);
    }
  }
  __syncthreads();
  float* const partial = static_cast<float*>(params.partials) + blockIdx.x * params.cols;
  for (int c = thread; c < params.cols; c += threads) {
    float sum = group_sums[c];
    for (int g = 1; g < blockDim.y; ++g) sum += group_sums[g * params.cols + c];
    partial[c] = sum;
  }
}

// grad_x and rstd of a row of any length and alignment, read twice.
template <typename T, int N>
__global__ void __launch_bounds__(1024) rms_norm_backward_long_kernel(const RmsNormBackwardParams params, float* rstd) {
  using V = Vec<T, N>;
  __shared__ float shared[2 * 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const float weight_offset = static_cast<float>(params.options.weight_offset);
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  pdl_launch_dependents();
  pdl_wait();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  const Rows<T> rows(params, row);
  const int64_t end = row < params.rows ? params.cols : 0;
  const int64_t begin = static_cast<int64_t>(group.rank) * N, step = static_cast<int64_t>(group.threads) * N;
  const auto g = [&](const V& grad_y, const V& w, int i) {
    return rows.weight ? grad_y[i] * (weight_offset + w[i]) : grad_y[i];
  };
  float sums[2] = {0.f, 0.f};
  for (int64_t c = begin; c < end; c += step) {
    const V x = V::load(rows.x + c), grad_y = V::load(rows.grad_y + c);
    const V w = rows.weight ? V::load(rows.weight + c) : V{};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[0] += x[i] * x[i];
      sums[1] += g(grad_y, w, i) * x[i];
    }
  }
  group_sum(sums, group, shared);
  const Scalars scalars = row_scalars(sums, inverse_cols, eps);
  if (rstd && group.rank == 0 && row < params.rows) rstd[row] = scalars.rstd;
  for (int64_t c = begin; c < end; c += step) {
    const V x = V::load(rows.x + c), grad_y = V::load(rows.grad_y + c);
    const V w = rows.weight ? V::load(rows.weight + c) : V{};
    const V extra = rows.grad_sum ? V::load(rows.grad_sum + c) : V{};
    const V result = V::of([&](int i) {
      const float grad = scalars.rstd * (g(grad_y, w, i) - x[i] * scalars.rstd * scalars.mean_gn);
      return rows.grad_sum ? grad + extra[i] : grad;
    });
    result.store(rows.grad_x + c);
  }
}

// Partial grad_w after the kernel above: block (s, p) sums strip s of 256 columns over the p-th range of rows.
template <typename T>
__global__ void __launch_bounds__(256)
    grad_weight_partial_kernel(const RmsNormBackwardParams params, const float* rstd, int64_t strips) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t col = blockIdx.x % strips * blockDim.x + threadIdx.x, part = blockIdx.x / strips;
  if (col >= params.cols) return;
  const int64_t begin = params.rows * part / params.partial_rows, end = params.rows * (part + 1) / params.partial_rows;
  float sum = 0.f;
#pragma unroll 4
  for (int64_t row = begin; row < end; ++row) {
    const Rows<T> rows(params, row);
    const float n = to_float(rows.x[col]) * rstd[row];
    sum += to_float(rows.grad_y[col]) * weighted<T>(n, params.options.cast_before_weight);
  }
  static_cast<float*>(params.partials)[part * params.cols + col] = sum;
}

// grad_w = sum of the partial sums: a block takes 32 columns, its warps split the rows of partial sums; fixed order.
template <typename T>
__global__ void __launch_bounds__(1024) grad_weight_sum_kernel(const RmsNormBackwardParams params) {
  __shared__ float sums[32][33];
  pdl_launch_dependents();
  pdl_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  const auto* partials = static_cast<const float*>(params.partials);
  float sum = 0.f;
  if (col < params.cols) {
#pragma unroll 4
    for (int64_t row = warp; row < params.partial_rows; row += 32) sum += partials[row * params.cols + col];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  float total[1] = {sums[lane][warp]};  // transposed: warp w now holds column w of the strip
  warp_sum(total, 32);
  const int64_t out = static_cast<int64_t>(blockIdx.x) * 32 + warp;
  if (lane == 0 && out < params.cols) static_cast<T*>(params.grad_weight)[out] = from_float<T>(total[0]);
}

template <typename T>
bool is_vector(const RmsNormBackwardParams& p) {
  return p.cols % kVecWidth<T> == 0 && rows_aligned(p.x, p.x_stride, p.rows, sizeof(T)) &&
         rows_aligned(p.grad_y, p.grad_y_stride, p.rows, sizeof(T)) &&
         rows_aligned(p.grad_sum, p.grad_sum_stride, p.rows, sizeof(T)) && is_aligned(p.weight, 16) &&
         is_aligned(p.grad_x, 16);
}

// The persistent kernel's plan for a row, and its grid; no vectors when the row is not for it.
struct PersistentPlan {
  RowPlan row;
  size_t ring_bytes;
  int64_t blocks;
  bool keep_inputs;
};

template <typename T>
cudaError_t plan_persistent(const RmsNormBackwardParams& params, PersistentPlan& plan) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  RowPlan& row = plan.row;
  row = {kVecWidth<T>, 0, 0, 1};
  const int64_t count = params.cols / row.width;
  if (!is_vector<T>(params) || count > 4 * kMaxThreads) return cudaSuccess;
  const int vectors = count > 2 * kMaxThreads ? 4 : count > 128 ? 2 : 1;
  row.threads_per_row = group_threads(count, vectors, kMaxThreads);
  const int unit_rows = unit_size(row.threads_per_row);
  const int64_t units = (params.rows + unit_rows - 1) / unit_rows;
  const int operands = params.grad_sum ? 3 : 2, stages = vectors == 4 ? kStages<4> : kStages<1>;
  const size_t unit_bytes = sizeof(int4) * stages * operands * vectors * row.threads_per_row * unit_rows;
  const int64_t units_per_block = std::min<int64_t>({kMaxThreads / (row.threads_per_row * unit_rows),
                                                     (units + device.sm_count - 1) / device.sm_count,
                                                     // the reduction needs some, too
                                                     static_cast<int64_t>((device.shared_bytes - 1024) / unit_bytes)});
  if (units_per_block == 0) return cudaSuccess;
  row.rows_per_block = static_cast<int>(units_per_block) * unit_rows;
  row.vectors = vectors;
  plan.ring_bytes = unit_bytes * units_per_block;
  plan.blocks = std::min<int64_t>(units, device.sm_count);
  plan.keep_inputs = keeps_inputs(device, params.rows * params.cols * sizeof(T) * (operands + 1));
  return cudaSuccess;
}

constexpr int kStrip = 256;  // columns of a block of grad_weight_partial_kernel

template <typename T>
cudaError_t launch_persistent(const PersistentPlan& plan, const RmsNormBackwardParams& params, cudaStream_t stream) {
  const LaunchShape shape{plan.blocks, dim3(plan.row.threads_per_row, plan.row.rows_per_block), plan.ring_bytes,
                          /*may_overlap=*/false};
  return dispatch_int<1, 2, 4>(plan.row.vectors, [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    const auto kernel = params.options.cast_before_weight ? rms_norm_backward_kernel<T, kVectors, sizeof(T) == 2>
                                                          : rms_norm_backward_kernel<T, kVectors, false>;
    return launch(kernel, shape, stream, params, plan.keep_inputs);
  });
}

template <typename T>
cudaError_t launch_long(const RmsNormBackwardParams& params, cudaStream_t stream) {
  const int width = is_vector<T>(params) ? kVecWidth<T> : 1;
  const int threads = group_threads(params.cols / width, 4, 1024), groups = std::max(1, 256 / threads);
  float* const rstd =
      params.grad_weight ? static_cast<float*>(params.partials) + params.partial_rows * params.cols : nullptr;
  const LaunchShape shape{(params.rows + groups - 1) / groups, dim3(threads, groups)};
  const auto kernel = width == 1 ? rms_norm_backward_long_kernel<T, 1> : rms_norm_backward_long_kernel<T, kVecWidth<T>>;
  const cudaError_t status = launch(kernel, shape, stream, params, rstd);
  if (status != cudaSuccess || !params.grad_weight) return status;
  const int64_t strips = (params.cols + kStrip - 1) / kStrip;
  return launch(grad_weight_partial_kernel<T>, {strips * params.partial_rows, dim3(kStrip)}, stream, params, rstd,
                strips);
}

}  // namespace

cudaError_t rms_norm_backward_workspace(const RmsNormBackwardParams& params, Dtype dtype,
                                        RmsNormBackwardWorkspace& workspace) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    PersistentPlan plan;
    if (const cudaError_t status = plan_persistent<T>(params, plan); status != cudaSuccess) return status;
    if (plan.row.vectors > 0) {
      workspace.partial_rows = plan.blocks;
      workspace.floats = workspace.partial_rows * params.cols;
    } else {
      // Enough partial sums to fill the GPU, and none over more than 1024 rows, for accuracy.
      workspace.partial_rows = std::min<int64_t>(params.rows, std::max<int64_t>(64, params.rows / 1024));
      workspace.floats = workspace.partial_rows * params.cols + params.rows;
    }
    return cudaSuccess;
  });
}

cudaError_t rms_norm_backward(const RmsNormBackwardParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    PersistentPlan plan;
    cudaError_t status = plan_persistent<T>(params, plan);
    if (status != cudaSuccess) return status;
    status = plan.row.vectors > 0 ? launch_persistent<T>(plan, params, stream) : launch_long<T>(params, stream);
    if (status != cudaSuccess || !params.grad_weight) return status;
    return launch(grad_weight_sum_kernel<T>, {(params.cols + 31) / 32, dim3(1024)}, stream, params);
  });
}

}  // namespace llmk::kernels
