// FP8 quantization with one scale for all elements, by the formula of fp8_quantize.cu: a kernel for the maximum of each
// block's elements, then one that takes the maximum of those and converts. Both are grids of as many blocks as fill the
// GPU, and a block reads the same elements in both. Reads x twice, since nothing can be written before all is read.
// Where rows are not all aligned, a thread has vectors of q that are, and cuts those of x out of two (shifted.cuh).
#include <algorithm>

#include "fp8.cuh"
#include "fp8.h"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

using namespace quant;

namespace {

constexpr int kThreads = 512, kBlocksPerSm = 4;

// Calls body(x, q, column) with the rows and the column of each of this thread's vectors: of q if rows are not aligned,
// where the first and the last may be outside of the row in part.
template <typename T, bool kAligned, typename Body>
__device__ void for_my_vectors(const Fp8QuantizeParams& params, const Body& body) {
  constexpr int N = kVecWidth<T>;
  const Fp8Output& out = params.out;
  const int64_t per_row = kAligned ? out.cols / N : (out.cols + N - 1 + N - 1) / N, count = out.rows * per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = out.rows == 1 ? 0 : i / per_row;
    uint8_t* const q = static_cast<uint8_t*>(out.q) + row * out.cols;
    const int64_t column = (i - row * per_row) * N - (kAligned ? 0 : misalignment<uint8_t, N>(q));
    body(static_cast<const T*>(params.x) + row * params.x_stride, q, column);
  }
}

template <bool kAligned, typename T>
__device__ Vec<T, kVecWidth<T>> load(const T* x, int64_t column, const Fp8Output& out) {
  if constexpr (kAligned) return Vec<T, kVecWidth<T>>::load(x + column);
  return load_shifted(x, column, int64_t{0}, out.cols);
}

__device__ Group whole_block() { return {kThreads, static_cast<int>(threadIdx.x), 0}; }

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) amax_kernel(const Fp8QuantizeParams params, float* partials) {
  __shared__ float shared[kThreads / 32];
  pdl_launch_dependents();
  pdl_wait();
  float amax = 0.f;
  for_my_vectors<T, kAligned>(params, [&](const T* x, const uint8_t*, int64_t column) {
    amax = max_magnitude(load<kAligned>(x, column, params.out), amax);
  });
  amax = group_max_nan(amax, whole_block(), shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = amax;
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    quantize_tensor_kernel(const Fp8QuantizeParams params, const float* partials, int count) {
  __shared__ float shared[kThreads / 32];
  pdl_launch_dependents();
  pdl_wait();
  float amax = 0.f;
  for (int i = threadIdx.x; i < count; i += kThreads) amax = max_nan(amax, partials[i]);
  const float scale = scale_of(group_max_nan(amax, whole_block(), shared), params.out);
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.out.scale = scale;
  const float inverse = inverse_of(scale);
  for_my_vectors<T, kAligned>(params, [&](const T* x, uint8_t* q, int64_t column) {
    const auto value = to_fp8(load<kAligned>(x, column, params.out), inverse, params.out.format);
    if constexpr (kAligned) {
      value.assign_to(q + column);
    } else {
      store_aligned(value, q, column, int64_t{0}, params.out.cols);
    }
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
    const bool aligned = all_rows_aligned<T>({out.rows, out.cols, {{params.x, params.x_stride}, {out.q}}});
    const LaunchShape shape{count, dim3(kThreads)};
    const auto first = aligned ? amax_kernel<T, true> : amax_kernel<T, false>;
    const auto second = aligned ? quantize_tensor_kernel<T, true> : quantize_tensor_kernel<T, false>;
    if (const cudaError_t status = launch(first, shape, stream, params, partials); status != cudaSuccess) return status;
    return launch(second, shape, stream, params, static_cast<const float*>(partials), static_cast<int>(count));
  });
}

}  // namespace llmk::kernels
