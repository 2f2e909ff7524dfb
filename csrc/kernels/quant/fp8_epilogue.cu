// The end of a product of FP8 matrices that cuBLASLt computes without scales by rows:
//
//   y = round(acc x_scale weight_scale + bias)       acc [rows, cols] float32; y float32, float16 or bfloat16
//
// One element per thread: a fallback, see csrc/torch/fp8.cpp.
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "fp8.h"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) epilogue_kernel(const Fp8EpilogueParams params, int64_t blocks_per_row) {
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t col = (blockIdx.x - row * blocks_per_row) * kThreads + threadIdx.x;
  pdl_launch_dependents();
  pdl_wait();
  if (col >= params.cols) return;
  const float scaled = params.acc[row * params.acc_stride + col] * params.x_scale[row] * params.weight_scale[col];
  const float bias = params.bias ? to_float(static_cast<const T*>(params.bias)[col]) : 0.f;
  static_cast<T*>(params.y)[row * params.y_stride + col] = from_float<T>(scaled + bias);
}

}  // namespace

cudaError_t fp8_epilogue(const Fp8EpilogueParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    const int64_t blocks_per_row = (params.cols + kThreads - 1) / kThreads;
    return launch(epilogue_kernel<typename decltype(tag)::type>, {blocks_per_row * params.rows, dim3(kThreads)}, stream,
                  params, blocks_per_row);
  });
}

}  // namespace llmk::kernels
