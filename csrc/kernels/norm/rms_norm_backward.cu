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
// Rows that fit: a persistent grid. Each thread keeps the partial grad_w of its columns in registers over all rows of
// its block. cp.async copies the next rows to a ring of stages in shared memory. Each thread copies what it will read
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

// Stages of the ring, each with one row per group: as many as fit when a thread has four vectors of each operand.
template <int kVectors>
constexpr int kStages = kVectors == 4 ? 2 : 3;
// Of the rings of all blocks of an SM:
//
//   value             | case | result
//   ------------------|------|-------------------------------
//   more than 116 KiB | all  | slower, since blocks drift apart
constexpr size_t kBytesInFlight = 116 << 10;

// Group g of a block processes the rows (blockIdx.x + i * gridDim.x) * groups + g, with kVectors vectors per thread.
// kRounds: round(n) is what the forward multiplied by the weight. Asked in the loop, it takes 10 % longer.
template <typename T, int kVectors, bool kRounds>
__global__ void __launch_bounds__(512) rms_norm_backward_kernel(const RmsNormBackwardParams params, bool keep_inputs) {
  constexpr int N = kVecWidth<T>, kDepth = kStages<kVectors>;
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(keep_inputs);
  extern __shared__ int4 ring[];  // [stage][operand][vector][thread of the block]
  __shared__ float shared[2][2 * 16];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int operands = params.grad_sum ? 3 : 2;
  const int count = static_cast<int>(params.cols / N);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  const auto stage_vector = [&](int stage, int operand, int v) -> int4* {
    return ring + ((stage * operands + operand) * kVectors + v) * threads + thread;
  };
  const auto offset = [&](int v) { return (group.rank + v * group.threads) * N; };
  const auto prefetch = [&](int64_t row, int stage) {
    if (row < params.rows) {
      const Rows<T> rows(params, row);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (group.rank + v * group.threads < count) {
          cp_async_16(stage_vector(stage, 0, v), rows.x + offset(v), policy);
          cp_async_16(stage_vector(stage, 1, v), rows.grad_y + offset(v), policy);
          if (params.grad_sum) cp_async_16(stage_vector(stage, 2, v), rows.grad_sum + offset(v), policy);
        }
      }
    }
    cp_async_commit();  // also when empty, so that cp_async_wait() counts stages
  };

  pdl_wait();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y;
#pragma unroll
  for (int stage = 0; stage < kDepth - 1; ++stage) prefetch(first + stage * step + group.index, stage);

  const auto* weight = static_cast<const T*>(params.weight);
  const float weight_offset = static_cast<float>(params.options.weight_offset);
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  float scale[kVectors][N], grad_weight[kVectors][N];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const bool has_weight = weight && group.rank + v * group.threads < count;
    const V w = has_weight ? V::load(weight + offset(v)) : V{};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scale[v][i] = has_weight ? weight_offset + w[i] : 1.f;
      grad_weight[v][i] = 0.f;
    }
  }

  int stage = 0, parity = 0;
  for (int64_t base = first; base < params.rows; base += step, parity ^= 1, stage = (stage + 1) % kDepth) {
    const int64_t row = base + group.index;
    prefetch(row + (kDepth - 1) * step, (stage + kDepth - 1) % kDepth);
    cp_async_wait<kDepth - 1>();
    const auto mine = [&](int v) { return row < params.rows && group.rank + v * group.threads < count; };
    const auto load_operand = [&](int operand, int v) {
      return V::load(reinterpret_cast<const T*>(stage_vector(stage, operand, v)));
    };
    V x[kVectors], grad_y[kVectors];
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!mine(v)) continue;
      x[v] = load_operand(0, v);
      grad_y[v] = load_operand(1, v);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sums[0] += x[v][i] * x[v][i];
        sums[1] += grad_y[v][i] * scale[v][i] * x[v][i];
      }
    }
    group_sum(sums, group, shared[parity]);
    const Scalars scalars = row_scalars(sums, inverse_cols, eps);
    T* const grad_x = static_cast<T*>(params.grad_x) + row * params.cols;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!mine(v)) continue;
      const V extra = params.grad_sum ? load_operand(2, v) : V{};
      float n[N];
#pragma unroll
      for (int i = 0; i < N; ++i) n[i] = x[v][i] * scalars.rstd;
      const V rounded = V::of([&](int i) { return n[i]; });
#pragma unroll
      for (int i = 0; i < N; ++i) grad_weight[v][i] += grad_y[v][i] * (kRounds ? rounded[i] : n[i]);
      const auto grad = [&](int i) { return scalars.rstd * (grad_y[v][i] * scale[v][i] - n[i] * scalars.mean_gn); };
      const V result = params.grad_sum ? V::of([&](int i) { return grad(i) + extra[i]; }) : V::of(grad);
      result.store(grad_x + offset(v));
    }
  }

  pdl_launch_dependents();
  if (!params.grad_weight) return;
  // One row of partial sums per block: its groups are added up in shared memory, in a fixed order.
  auto* const group_sums = reinterpret_cast<float*>(ring);  // [group][column]; less than one stage of the ring
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (group.rank + v * group.threads >= count) continue;
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
  constexpr int kMaxThreads = 512;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  RowPlan& row = plan.row;
  row = {kVecWidth<T>, 0, 0, 1};
  const int64_t count = params.cols / row.width;
  if (!is_vector<T>(params) || count > 4 * kMaxThreads) return cudaSuccess;
  const int vectors = count > 2 * kMaxThreads ? 4 : count > 128 ? 2 : 1;
  row.threads_per_row = group_threads(count, vectors, kMaxThreads);
  row.rows_per_block = std::max(1, 256 / row.threads_per_row);
  const int operands = params.grad_sum ? 3 : 2, stages = vectors == 4 ? kStages<4> : kStages<1>;
  plan.ring_bytes = sizeof(int4) * stages * operands * vectors * row.threads();
  if (plan.ring_bytes > device.shared_bytes - 1024) return cudaSuccess;  // the reduction needs some, too
  row.vectors = vectors;
  const int per_sm = std::clamp(static_cast<int>(kBytesInFlight / plan.ring_bytes), 1, 1024 / row.threads());
  plan.blocks = std::min<int64_t>((params.rows + row.rows_per_block - 1) / row.rows_per_block,
                                  static_cast<int64_t>(device.sm_count) * per_sm);
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
