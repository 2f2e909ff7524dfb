#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/glu.h"

namespace llmk::kernels {

cudaError_t glu(const GluParams& params, Activation activation, Dtype dtype, cudaStream_t stream);
cudaError_t glu_backward(const GluBackwardParams& params, Activation activation, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
