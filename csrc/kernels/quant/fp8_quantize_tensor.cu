// FP8 quantization with one scale for all elements, by the formula of fp8_quantize.cu: a kernel for the maximum of each
// block's elements, then one that takes the maximum of those and converts. Both are grids of as many blocks as fill the
// GPU, and a block reads the same elements in both. Reads x twice, since nothing can be written before all is read.
#include <algorithm>

#include "fp8.cuh"
#include "fp8.h"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

using namespace quant;

namespace {

constexpr int kThreads = 512, kBlocksPerSm = 4;

// Calls body(row, column) for each of this thread's vectors.
template <int N, typename Body>
__device__ void for_my_vectors(const Fp8Output& out, const Body& body) {
  const int64_t per_row = out.cols / N, count = out.rows * per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = out.rows == 1 ? 0 : i / per_row;
    body(row, (i - row * per_row) * N);
  }
}

__device__ Group whole_block() { return {kThreads, static_cast<int>(threadIdx.x), 0}; }

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) amax_kernel(const Fp8QuantizeParams params, float* partials) {
  __shared__ float shared[kThreads / 32];
  const T* const x = static_cast<const T*>(params.x);
  pdl_launch_dependents();
  pdl_wait();
  float amax = 0.f;
  for_my_vectors<N>(params.out, [&](int64_t row, int64_t col) {
    amax = max_magnitude(Vec<T, N>::load(x + row * params.x_stride + col), amax);
  });
  amax = group_max_nan(amax, whole_block(), shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = amax;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    quantize_tensor_kernel(const Fp8QuantizeParams params, const float* partials, int count) {
  __shared__ float shared[kThreads / 32];
  const T* const x = static_cast<const T*>(params.x);
  pdl_launch_dependents();
  pdl_wait();
  float amax = 0.f;
  for (int i = threadIdx.x; i < count; i += kThreads) amax = max_nan(amax, partials[i]);
  const float scale = scale_of(group_max_nan(amax, whole_block(), shared), params.out);
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.out.scale = scale;
  const float inverse = inverse_of(scale);
  for_my_vectors<N>(params.out, [&](int64_t row, int64_t col) {
    const auto v = Vec<T, N>::load(x + row * params.x_stride + col);
    store_fp8(v, inverse, params.out.format, params.out.q, row * params.out.cols + col);
  });
}

}  // namespace

cudaError_t fp8_tensor_partials(const Fp8QuantizeParams& params, int64_t& count) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  constexpr int64_t kPerBlock = kThreads * 16;  // no more blocks than have some elements for every thread
  const int64_t elements = params.out.rows * params.out.cols;
  count = std::clamp<int64_t>(elements / kPerBlock, 1, kBlocksPerSm * device.sm_count);
  return cudaSuccess;
}

cudaError_t fp8_quantize_tensor(const Fp8QuantizeParams& given, float* partials, int64_t count, Dtype dtype,
                                cudaStream_t stream) {
  Fp8QuantizeParams params = given;
  Fp8Output& out = params.out;
  if (out.rows == 0 || out.cols == 0) return cudaSuccess;
  if (params.x_stride == out.cols) {
    out.cols *= out.rows;
    out.rows = 1;
  }
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = all_rows_aligned<T>({out.rows, out.cols, {{params.x, params.x_stride}, {out.q}}});
    const LaunchShape shape{count, dim3(kThreads)};
    const auto first = vector ? amax_kernel<T, N> : amax_kernel<T, 1>;
    const auto second = vector ? quantize_tensor_kernel<T, N> : quantize_tensor_kernel<T, 1>;
    if (const cudaError_t status = launch(first, shape, stream, params, partials); status != cudaSuccess) return status;
    return launch(second, shape, stream, params, static_cast<const float*>(partials), static_cast<int>(count));
  });
}

}  // namespace llmk::kernels
