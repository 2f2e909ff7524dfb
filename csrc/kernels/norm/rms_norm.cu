// RMSNorm (Zhang & Sennrich 2019), alone or after a residual add:
//
//   s = round(x + residual)                                       (add_rms_norm; s = x without a residual)
//   n = s / sqrt(mean(s^2) + eps)                                 fp32
//   y = round(round(n) (offset + w))   or   round(n (offset + w)) the two rounding orders in use
//
// x [rows, cols] with rows any distance apart, y contiguous; float32, float16 or bfloat16; float32 accumulation.
// Moves 2 elements per element (4 with a residual): memory is the limit. A group of threads loads a row by 16-byte
// accesses and keeps it in registers from the reduction to the store. Rows that are too long for that, or not aligned
// to 16 bytes, are read twice; the second read mostly hits the cache.
#include "rms_norm.h"

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "plan.h"

namespace llmk::kernels {
namespace {

// How a vector of x is scaled; `w` is read only where there is a weight.
struct Scale {
  bool has_weight, cast_before_weight;
  float weight_offset;

  __device__ explicit Scale(const RmsNormParams& params)
      : has_weight(params.weight != nullptr),
        cast_before_weight(params.options.cast_before_weight),
        weight_offset(static_cast<float>(params.options.weight_offset)) {}

  template <typename T, int N>
  __device__ Vec<T, N> operator()(const Vec<T, N>& s, const Vec<T, N>& w, float rstd) const {
    using V = Vec<T, N>;
    if (has_weight && !cast_before_weight) {
      return V::of([&](int i) { return s[i] * rstd * (weight_offset + w[i]); });
    }
    const V n = V::of([&](int i) { return s[i] * rstd; });
    if (!has_weight) return n;
    if (weight_offset == 0.f) return mul(n, w);
    return V::of([&](int i) { return n[i] * (weight_offset + w[i]); });
  }
};

template <typename T, int N>
__device__ float sum_of_squares(const Vec<T, N>& s, float total) {
#pragma unroll
  for (int i = 0; i < N; ++i) total += s[i] * s[i];
  return total;
}

// Where a row begins in each operand.
template <typename T>
struct Row {
  const T *x, *residual, *weight;
  T *y, *sum;

  __device__ Row(const RmsNormParams& params, int64_t row)
      : x(static_cast<const T*>(params.x) + row * params.x_stride),
        residual(static_cast<const T*>(params.residual) + row * params.residual_stride),
        weight(static_cast<const T*>(params.weight)),
        y(static_cast<T*>(params.y) + row * params.cols),
        sum(static_cast<T*>(params.sum) + row * params.cols) {}
};

// The threads that share a row, and which row.
__device__ Group row_group() {
  return {static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
}
__device__ int64_t row_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

// A row in registers: kVectors vectors of N elements per thread. Blocks of several rows have one vector per thread.
// Template parameters: kResidual, since its registers would cost the plain norm occupancy; kKeepInputs, since an L2
// policy on a load has a cost:
//
//   value              | case     | result
//   -------------------|----------|-------------------------------
//   the default policy | rms_norm | 2 % slower than a load without
template <typename T, int N, int kVectors, bool kResidual, bool kKeepInputs>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const RmsNormParams params, float inverse_cols) {
  using V = Vec<T, N>;
  __shared__ float shared[kMaxRowsPerBlock * kMaxVirtualWarps];
  constexpr bool kOneRow = kVectors > 1;
  const Group group = row_group();
  const int64_t index = kOneRow ? blockIdx.x : row_index();
  const Row<T> row(params, index);
  const int count = kOneRow || index < params.rows ? static_cast<int>(params.cols / N) : 0;
  const auto mine = [&](int v) { return group.rank + v * group.threads < count; };
  const auto offset = [&](int v) { return (group.rank + v * group.threads) * N; };
  const float eps = static_cast<float>(params.options.eps);
  [[maybe_unused]] const uint64_t policy = kKeepInputs ? l2_policy(true) : 0;
  const auto load = [&](const T* source) {
    if constexpr (kKeepInputs) return V::load(source, policy);
    return V::load(source);
  };
  pdl_launch_dependents();
  pdl_wait();
  V s[kVectors], r[kVectors], w[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) s[v] = load(row.x + offset(v));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (kResidual && mine(v)) r[v] = load(row.residual + offset(v));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (params.weight && mine(v)) w[v] = load(row.weight + offset(v));  // in flight during the reduction
  }
  float squares[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    squares[v] = 0.f;
    if (!mine(v)) continue;
    if constexpr (kResidual) s[v] = add(s[v], r[v]);
    squares[v] = sum_of_squares(s[v], 0.f);
  }
  const float rstd = rsqrtf(row_sum(squares, group, shared) * inverse_cols + eps);
  const Scale scale(params);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!mine(v)) continue;
    if constexpr (kResidual) {
      s[v].store(row.sum + offset(v));
      scale(s[v], w[v], rstd).store(row.y + offset(v));
    } else {
      scale(s[v], w[v], rstd).assign_to(row.y + offset(v));
    }
  }
}

// A row of any length and alignment, read twice.
template <typename T, int N>
__global__ void __launch_bounds__(1024) rms_norm_long_kernel(const RmsNormParams params) {
  using V = Vec<T, N>;
  __shared__ float shared[32];
  const Group group = row_group();
  const int64_t index = row_index();
  const Row<T> row(params, index);
  const int64_t end = index < params.rows ? params.cols : 0;
  const int64_t begin = static_cast<int64_t>(group.rank) * N, step = static_cast<int64_t>(group.threads) * N;
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  pdl_launch_dependents();
  pdl_wait();
  float squares[1] = {0.f};
  for (int64_t c = begin; c < end; c += step) {
    V s = V::load(row.x + c);
    if (params.residual) (s = add(s, V::load(row.residual + c))).store(row.sum + c);
    squares[0] = sum_of_squares(s, squares[0]);
  }
  group_sum(squares, group, shared);
  const float rstd = rsqrtf(squares[0] * inverse_cols + eps);
  const Scale scale(params);
  const T* source = params.residual ? row.sum : row.x;  // each thread reads back what it wrote itself
  for (int64_t c = begin; c < end; c += step) {
    const V w = params.weight ? V::load(row.weight + c) : V{};
    scale(V::load(source + c), w, rstd).store(row.y + c);
  }
}

template <typename T>
bool is_vector(const RmsNormParams& p) {
  return p.cols % kVecWidth<T> == 0 && rows_aligned(p.x, p.x_stride, p.rows, sizeof(T)) &&
         rows_aligned(p.residual, p.residual_stride, p.rows, sizeof(T)) && is_aligned(p.weight, 16) &&
         is_aligned(p.y, 16) && is_aligned(p.sum, 16);
}

}  // namespace

cudaError_t rms_norm(const RmsNormParams& params, Dtype dtype, cudaStream_t stream, bool may_overlap) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const bool few_rows = params.rows <= kFewRowsPerSm * device.sm_count;
    const RowPlan plan =
        plan_rms_norm(params.cols, sizeof(T), is_vector<T>(params), params.residual != nullptr, few_rows);
    LaunchShape shape{(params.rows + plan.rows_per_block - 1) / plan.rows_per_block,
                      dim3(plan.threads_per_row, plan.rows_per_block)};
    shape.may_overlap = may_overlap;
    if (plan.vectors == 0) {
      return launch(plan.width == 1 ? rms_norm_long_kernel<T, 1> : rms_norm_long_kernel<T, N>, shape, stream, params);
    }
    const int64_t bytes = params.rows * params.cols * sizeof(T) * (params.residual ? 4 : 2);
    return dispatch_int<1, 2>(plan.vectors, [&](auto vectors) {
      return dispatch_int<0, 1>(params.residual != nullptr, [&](auto residual) {
        return dispatch_int<0, 1>(keeps_inputs(device, bytes), [&](auto keep) {
          constexpr int kVectors = decltype(vectors)::value;
          constexpr bool kResidual = decltype(residual)::value, kKeepInputs = decltype(keep)::value;
          return launch(rms_norm_kernel<T, N, kVectors, kResidual, kKeepInputs>, shape, stream, params,
                        1.f / static_cast<float>(params.cols));
        });
      });
    });
  });
}

}  // namespace llmk::kernels
