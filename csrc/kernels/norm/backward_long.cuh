// The norms' backward (backward.cuh) for rows that are too long for registers: one kernel over rows for grad_x, m and
// rstd, one over column strips for grad_w and grad_b.
#pragma once
#include <algorithm>

#include "backward_row.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "kernels/launch.h"
#include "kernels/row_part.cuh"
#include "plan.h"

namespace llmk::kernels::norm {

// grad_x of a row of any length and alignment, read twice, or three times if centered. `statistics`: where to leave
// rstd [rows] and, if centered, the mean [rows]; or null.
template <typename T, int N, bool kCentered>
__global__ void __launch_bounds__(1024) norm_backward_long_kernel(const NormBackwardParams params, float* statistics) {
  using V = Vec<T, N>;
  constexpr int kSums = kCentered ? 3 : 2;
  __shared__ float shared[kCentered ? 2 : 1][kSums * 32];
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
  const auto for_elements = [&](const auto& body) {
    for (int64_t c = begin; c < end; c += step) {
      const V x = V::load(rows.x + c), grad_y = V::load(rows.grad_y + c);
      const V w = rows.weight ? V::load(rows.weight + c) : V{};
#pragma unroll
      for (int i = 0; i < N; ++i) body(x[i], g(grad_y, w, i));
    }
  };
  float mean = 0.f, mean_g = 0.f;
  if constexpr (kCentered) {
    float sums[2] = {0.f, 0.f};
    for_elements([&](float x, float g) { sums[0] += x, sums[1] += g; });
    group_sum(sums, group, shared[1]);
    mean = sums[0] * inverse_cols, mean_g = sums[1] * inverse_cols;
  }
  float sums[kSums] = {};
  for_elements([&](float x, float g) {
    const float d = centered<kCentered>(x, mean);
    sums[0] += d * d;
    sums[1] += g * d;
    if constexpr (kCentered) sums[2] += d;
  });
  group_sum(sums, group, shared[0]);
  const Scalars scalars = row_scalars<kCentered>(sums, mean, mean_g, inverse_cols, eps);
  if (statistics && group.rank == 0 && row < params.rows) {
    statistics[row] = scalars.rstd;
    if constexpr (kCentered) statistics[params.rows + row] = scalars.mean;
  }
  for (int64_t c = begin; c < end; c += step) {
    const V x = V::load(rows.x + c), grad_y = V::load(rows.grad_y + c);
    const V w = rows.weight ? V::load(rows.weight + c) : V{};
    const V extra = rows.grad_sum ? V::load(rows.grad_sum + c) : V{};
    const V result = V::of([&](int i) {
      const float n = centered<kCentered>(x[i], scalars.mean) * scalars.rstd;
      const float grad = scalars.rstd * without_means<kCentered>(g(grad_y, w, i), n, scalars);
      return rows.grad_sum ? grad + extra[i] : grad;
    });
    result.store(rows.grad_x + c);
  }
}

// The same of rows that are not aligned and fit the shared memory of a block (row_part.cuh).
template <typename T, bool kCentered>
__global__ void __launch_bounds__(kCachedThreads)
    norm_backward_shifted_kernel(const NormBackwardParams params, float* statistics, const RowSplit split,
                                 bool keep_inputs) {
  constexpr int N = kVecWidth<T>, kSums = kCentered ? 3 : 2;
  using V = Vec<T, N>;
  using Part = RowPart<T, N, RowPlace::kShifted>;
  extern __shared__ int4 cache[];
  __shared__ float shared[kCentered ? 2 : 1][kSums * 32];
  const RowPosition at(split, params.rows, params.cols);
  const Rows<T> rows(params, at.row);
  const Part x(rows.x, at, split, cache), grad_y(rows.grad_y, at, split, cache, 1);
  const int cols = static_cast<int>(params.cols);
  const float weight_offset = static_cast<float>(params.options.weight_offset);
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  pdl_launch_dependents();
  pdl_wait();
  Part::prefetch(l2_policy(keep_inputs), x, grad_y);
  const bool aligned_weight = misalignment(rows.weight) == 0;
  struct Gradients {
    float g[N];  // 0 behind the end of the row
  };
  const auto gradients = [&](int c, bool aligned) {
    const V of_y = grad_y.load(c);
    Gradients result;
    if (rows.weight) {
      const V w = aligned ? load_aligned(rows.weight, c, 0, cols) : load_shifted(rows.weight, c, 0, cols);
#pragma unroll
      for (int i = 0; i < N; ++i) result.g[i] = __fmul_rn(of_y[i], weight_offset + w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) result.g[i] = of_y[i];
    }
    return result;
  };
  float mean = 0.f, mean_g = 0.f;
  if constexpr (kCentered) {
    float sums[2] = {0.f, 0.f};
    x.for_each_arriving([&](int c) {
      const V values = x.load(c);
      const Gradients of = gradients(c, aligned_weight);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[0] += values[i], sums[1] += of.g[i];
    });
    group_sum(sums, at.group, shared[1]);
    mean = sums[0] * inverse_cols, mean_g = sums[1] * inverse_cols;
  }
  float sums[kSums] = {};
  const auto add_up = [&](int c) {
    const V values = x.load(c);
    const Gradients of = gradients(c, aligned_weight);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (kCentered && c + i >= cols) break;  // the difference of no number from the mean is not 0
      const float d = centered<kCentered>(values[i], mean);
      sums[0] += d * d;
      sums[1] += of.g[i] * d;
      if constexpr (kCentered) sums[2] += d;
    }
  };
  if constexpr (kCentered) {
    x.for_each(add_up);
  } else {
    x.for_each_arriving(add_up);
  }
  group_sum(sums, at.group, shared[0]);
  const Scalars scalars = row_scalars<kCentered>(sums, mean, mean_g, inverse_cols, eps);
  if (statistics && at.group.rank == 0 && at.row < params.rows) {
    statistics[at.row] = scalars.rstd;
    if constexpr (kCentered) statistics[params.rows + at.row] = scalars.mean;
  }
  x.store_each(rows.grad_x, [&](int c) {
    const V values = x.load(c);
    const Gradients of = gradients(c, false);
    const V extra = rows.grad_sum ? load_shifted(rows.grad_sum, c, 0, cols) : V{};
    return V::of([&](int i) {
      const float n = __fmul_rn(centered<kCentered>(values[i], scalars.mean), scalars.rstd);
      const float grad = __fmul_rn(scalars.rstd, without_means<kCentered>(of.g[i], n, scalars));
      return rows.grad_sum ? __fadd_rn(grad, extra[i]) : grad;
    });
  });
}

// Partial grad_w and grad_b after the kernels above: block (s, p) sums strip s of 256 columns over the p-th range of
// rows.
template <typename T, bool kCentered>
__global__ void __launch_bounds__(256)
    partial_sums_kernel(const NormBackwardParams params, const float* statistics, int64_t strips) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t col = blockIdx.x % strips * blockDim.x + threadIdx.x, part = blockIdx.x / strips;
  if (col >= params.cols) return;
  const int64_t begin = params.rows * part / params.partial_rows, end = params.rows * (part + 1) / params.partial_rows;
  float grad_weight = 0.f, grad_bias = 0.f;
#pragma unroll 4
  for (int64_t row = begin; row < end; ++row) {
    const Rows<T> rows(params, row);
    const float mean = kCentered ? statistics[params.rows + row] : 0.f;
    const float n = centered<kCentered>(to_float(rows.x[col]), mean) * statistics[row];
    const float grad_y = to_float(rows.grad_y[col]);
    grad_weight += grad_y * weighted<T>(n, params.options.cast_before_weight);
    grad_bias += grad_y;
  }
  auto* partial = static_cast<float*>(params.partials) + part * params.cols + col;
  if (params.grad_weight) *partial = grad_weight, partial += params.partial_rows * params.cols;
  if (params.grad_bias) *partial = grad_bias;
}

constexpr int kStrip = 256;  // columns of a block of partial_sums_kernel

template <typename T, bool kCentered>
cudaError_t launch_long(const NormBackwardParams& params, cudaStream_t stream) {
  const bool vector = all_rows_aligned<T>(row_operands(params));
  const int width = vector ? kVecWidth<T> : 1;
  const int threads = group_threads(params.cols / width, 4, 1024), groups = std::max(1, 256 / threads);
  const int sums = wanted_sums(params);
  float* const statistics =
      sums > 0 ? static_cast<float*>(params.partials) + sums * params.partial_rows * params.cols : nullptr;
  const LaunchShape shape{(params.rows + groups - 1) / groups, dim3(threads, groups)};
  const auto kernel =
      vector ? norm_backward_long_kernel<T, kVecWidth<T>, kCentered> : norm_backward_long_kernel<T, 1, kCentered>;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const RowSplit split = split_row(params.cols, sizeof(T), 2, vector, device, kAloneBytes, kCachedThreads, 1);
  const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * 3);
  const cudaError_t status = split.place == RowPlace::kShifted
                                 ? launch(norm_backward_shifted_kernel<T, kCentered>, split.shape(params.rows), stream,
                                          params, statistics, split, keep)
                                 : launch(kernel, shape, stream, params, statistics);
  if (status != cudaSuccess || sums == 0) return status;
  const int64_t strips = (params.cols + kStrip - 1) / kStrip;
  return launch(partial_sums_kernel<T, kCentered>, {strips * params.partial_rows, dim3(kStrip)}, stream, params,
                statistics, strips);
}

}  // namespace llmk::kernels::norm
