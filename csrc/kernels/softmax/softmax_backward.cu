// Backward of softmax and of its logarithm, from their result y:
//
//   grad_x = round(scale y (grad_y - sum(grad_y y)))   or   round(scale (grad_y - e^y sum(grad_y)))
//
// grad_y and y [rows, cols] with rows any distance apart, grad_x contiguous; float32, float16 or bfloat16; float32
// arithmetic. Moves 3 elements per element. Rows as in softmax.cu. A masked column has y = 0, and so no gradient.
#include "kernels/dispatch.cuh"
#include "kernels/row_cover.cuh"
#include "kernels/row_part.cuh"
#include "softmax.h"

namespace llmk::kernels {
namespace {

// What is summed over a row. Those of a vector are added up by themselves, since long sums lose more.
template <int N, typename V>
__device__ float add_terms(float sum, const V& grad_y, const V& y, bool log) {
  float terms = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) terms += log ? grad_y[i] : grad_y[i] * y[i];
  return sum + terms;
}

// The terms of a vector, each rounded: what is not the row's is left out before they are added up.
template <int N, typename V>
__device__ void terms_of(const V& grad_y, const V& y, bool log, float (&terms)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) terms[i] = log ? grad_y[i] : __fmul_rn(grad_y[i], y[i]);
}

template <typename V>
__device__ V grad_x_of(const V& grad_y, const V& y, float sum, float scale, bool log) {
  if (log) return V::of([&](int i) { return scale * (grad_y[i] - exp_approximate(y[i]) * sum); });
  return V::of([&](int i) { return scale * (y[i] * (grad_y[i] - sum)); });
}

// A row in registers: kVectors vectors of each operand per thread.
template <typename T, int kVectors>
__global__ void __launch_bounds__(256) softmax_backward_kernel(const SoftmaxBackwardParams params) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  __shared__ float shared[8];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  const T* const grad_y = static_cast<const T*>(params.grad_y) + row * params.grad_y_stride;
  const T* const y = static_cast<const T*>(params.y) + row * params.y_stride;
  T* const grad_x = static_cast<T*>(params.grad_x) + row * params.cols;
  const int cols = row < params.rows ? static_cast<int>(params.cols) : 0;
  const float scale = static_cast<float>(params.scale);
  const auto column = [&](int v) { return (group.rank + v * group.threads) * N; };
  pdl_launch_dependents();
  pdl_wait();
  V g[kVectors], values[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) < cols) g[v] = V::load(grad_y + column(v)), values[v] = V::load(y + column(v));
  }
  float sum[1] = {0.f};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) < cols) sum[0] = add_terms<N>(sum[0], g[v], values[v], params.log);
  }
  group_sum(sum, group, shared);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) < cols) grad_x_of(g[v], values[v], sum[0], scale, params.log).store(grad_x + column(v));
  }
}

// The same of a row of any alignment, by the vectors that cover it. kAlike: see row_cover.cuh.
template <typename T, int kVectors, bool kAlike>
__global__ void __launch_bounds__(kCoverThreads, kVectors > 3 ? 1 : 2)
    softmax_backward_cover_kernel(const SoftmaxBackwardParams params, const Extent<T> extent, const Extent<T> y_extent,
                                  bool keep_inputs) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  __shared__ WarpSums<N> shared[kCoverThreads / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  if (row >= params.rows) return;  // only a warp that has a row of its own
  const T* const grad_y = static_cast<const T*>(params.grad_y) + row * params.grad_y_stride;
  const T* const y = static_cast<const T*>(params.y) + row * params.y_stride;
  const Cover<T, kVectors> cover(grad_y, static_cast<int>(params.cols), group);
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  V g[kVectors], values[kVectors];
  cover.load(grad_y, extent, g, policy);
  load_beside<kAlike>(cover, y, y_extent, values, policy);
  float of_elements[1][N] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!cover.warp_has(v)) continue;
    float terms[N];
    terms_of(g[v], values[v], params.log, terms);
    cover.clear(terms, v, 0.f);
#pragma unroll
    for (int i = 0; i < N; ++i) of_elements[0][i] += terms[i];
  }
  float sum[1];
  sum_covering(of_elements, cover.shift, sum, group, shared);
  T* const grad_x = static_cast<T*>(params.grad_x) + row * params.cols;
  const float scale = static_cast<float>(params.scale);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!cover.warp_has(v)) continue;
    store_covering<kAlike>(cover, grad_x_of(g[v], values[v], sum[0], scale, params.log), grad_x, v);
  }
}

// A row in the shared memory of a cluster, or read twice.
template <typename T, int N, RowPlace kPlace>
__global__ void __launch_bounds__(kPlace == RowPlace::kGlobal ? 1024 : kCachedThreads)
    softmax_backward_long_kernel(const SoftmaxBackwardParams params, const RowSplit split, const Extent<T> extent,
                                 const Extent<T> y_extent, bool keep_inputs) {
  constexpr bool kCovered = kPlace == RowPlace::kCovered;
  extern __shared__ int4 cache[];
  __shared__ float warps[32], blocks[kMaxCluster];
  const RowPosition at(split, params.rows, params.cols);
  const auto* const grad_y = static_cast<const T*>(params.grad_y) + at.row * params.grad_y_stride;
  const auto* const y = static_cast<const T*>(params.y) + at.row * params.y_stride;
  const RowPart<T, N, kPlace> part(grad_y, at, split, cache, extent);
  const RowPart<T, N, kPlace> y_part(y, at, split, cache, y_extent, 1);
  at.cluster.arrive();
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t policy = l2_policy(keep_inputs);
  part.prefetch(policy, part, y_part);
  float sum[1] = {0.f};
  if constexpr (kCovered) {
    __shared__ WarpSums<N> of_warps[kCachedThreads / 32];
    float of_elements[1][N] = {};
    part.for_each_arriving([&](int c) {
      const auto g = part.load(c), values = y_part.load(c);
      float terms[N];
      terms_of(g, values, params.log, terms);
      part.clear(terms, c, 0.f);
#pragma unroll
      for (int i = 0; i < N; ++i) of_elements[0][i] += terms[i];
    });
    sum_covering(of_elements, part.shift(), sum, at.group, of_warps);
  } else {
    part.for_each_arriving([&](auto c) { sum[0] = add_terms<N>(sum[0], part.load(c), y_part.load(c), params.log); });
    group_sum(sum, at.group, warps);
  }
  const float total = cluster_reduce(sum[0], at.cluster, blocks, [](float x, int lanes) { return warp_sum(x, lanes); });
  const float scale = static_cast<float>(params.scale);
  part.store_each(static_cast<T*>(params.grad_x) + at.row * params.cols,
                  [&](auto c) { return grad_x_of(part.load(c), y_part.load(c), total, scale, params.log); });
}

RowOperands row_operands(const SoftmaxBackwardParams& p) {
  return {p.rows, p.cols, {{p.grad_y, p.grad_y_stride}, {p.y, p.y_stride}, {p.grad_x}}};
}

constexpr int kShortVectors = 4, kShortThreads = 256;

}  // namespace

cudaError_t softmax_backward(const SoftmaxBackwardParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = all_rows_aligned<T>(row_operands(params));
    const int64_t count = params.cols / N;
    if (vector && count <= kShortVectors * kShortThreads) {
      const int vectors = count <= 32 ? 1 : kShortVectors;
      const int threads = group_threads(count, vectors, kShortThreads), groups = kShortThreads / threads;
      const LaunchShape shape{(params.rows + groups - 1) / groups, dim3(threads, groups)};
      return launch(vectors == 1 ? softmax_backward_kernel<T, 1> : softmax_backward_kernel<T, kShortVectors>, shape,
                    stream, params);
    }
    const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * 3);
    const Extent<T> extent(params.grad_y, params.rows, params.grad_y_stride, params.cols);
    const Extent<T> y_extent(params.y, params.rows, params.y_stride, params.cols);
    const bool alike = rows_alike<T>(
        params.rows,
        {{params.grad_y, params.grad_y_stride}, {params.y, params.y_stride}, {params.grad_x, params.cols}});
    const CoverPlan cover = plan_cover(params.cols, sizeof(T));
    if (!vector && cover.vectors > 0) {
      return dispatch_int<1, 2, 3, 4, kCoverVectors>(cover.vectors, [&](auto number) {
        constexpr int kVectors = decltype(number)::value;
        return launch(alike ? softmax_backward_cover_kernel<T, kVectors, true>
                            : softmax_backward_cover_kernel<T, kVectors, false>,
                      cover.shape(params.rows), stream, params, extent, y_extent, keep);
      });
    }
    RowSplit split = split_row(params.cols, sizeof(T), 2, vector, device, kAloneBytes);
    split.alike = alike;
    return dispatch_split<T>(split, [&](auto width, auto place) {
      return launch(softmax_backward_long_kernel<T, decltype(width)::value, decltype(place)::value>,
                    split.shape(params.rows), stream, params, split, extent, y_extent, keep);
    });
  });
}

}  // namespace llmk::kernels
