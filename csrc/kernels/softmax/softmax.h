#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/softmax.h"

namespace llmk::kernels {

cudaError_t softmax(const SoftmaxParams& params, Dtype dtype, cudaStream_t stream);
cudaError_t softmax_backward(const SoftmaxBackwardParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
