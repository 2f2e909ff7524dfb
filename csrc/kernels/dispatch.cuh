// From run-time values to template arguments.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "dtype.h"

namespace llmk::kernels {

// Calls body(TypeTag<T>{}) with the CUDA type of `dtype`.
template <typename Body>
cudaError_t dispatch_dtype(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::kFloat32: return body(TypeTag<float>{});
    case Dtype::kFloat16: return body(TypeTag<__half>{});
    case Dtype::kBFloat16: return body(TypeTag<__nv_bfloat16>{});
    default: return cudaErrorInvalidValue;
  }
}

// Calls body(std::integral_constant<int, value>{}) for the one of kValues that equals `value`.
template <int... kValues, typename Body>
cudaError_t dispatch_int(int value, Body&& body) {
  cudaError_t status = cudaErrorInvalidValue;
  (void)((value == kValues ? (status = body(std::integral_constant<int, kValues>{}), true) : false) || ...);
  return status;
}

}  // namespace llmk::kernels
