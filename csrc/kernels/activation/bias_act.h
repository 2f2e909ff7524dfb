#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/glu.h"

namespace llmk::kernels {

cudaError_t bias_act(const BiasActParams& params, Activation activation, Dtype dtype, cudaStream_t stream);

// The partial_rows that bias_act_backward needs on the current device.
cudaError_t bias_act_backward_partial_rows(const BiasActBackwardParams& params, Dtype dtype, int64_t& partial_rows);
cudaError_t bias_act_backward(const BiasActBackwardParams& params, Activation activation, Dtype dtype,
                              cudaStream_t stream);

}  // namespace llmk::kernels
