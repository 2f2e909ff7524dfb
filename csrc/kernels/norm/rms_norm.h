#pragma once
#include <cuda_runtime_api.h>

#include "backward.h"
#include "dtype.h"
#include "params/norm.h"

namespace llmk::kernels {

// y = rms_norm(x), or sum = x + residual and y = rms_norm(sum) when there is a residual, or target = addend + alpha
// rms_norm(x). `may_overlap`: see LaunchShape.
cudaError_t rms_norm(const NormParams& params, Dtype dtype, cudaStream_t stream, bool may_overlap = true);

cudaError_t rms_norm_backward_workspace(const NormBackwardParams& params, Dtype dtype,
                                        NormBackwardWorkspace& workspace);
cudaError_t rms_norm_backward(const NormBackwardParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
