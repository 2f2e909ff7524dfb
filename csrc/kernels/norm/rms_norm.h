#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/norm.h"

namespace llmk::kernels {

// y = rms_norm(x), or sum = x + residual and y = rms_norm(sum) when there is a residual. `may_overlap`: see
// LaunchShape.
cudaError_t rms_norm(const RmsNormParams& params, Dtype dtype, cudaStream_t stream, bool may_overlap = true);

// The rows of partial sums, and the floats of workspace in all, that rms_norm_backward needs on the current device.
struct RmsNormBackwardWorkspace {
  int64_t partial_rows;
  int64_t floats;
};
cudaError_t rms_norm_backward_workspace(const RmsNormBackwardParams& params, Dtype dtype,
                                        RmsNormBackwardWorkspace& workspace);
cudaError_t rms_norm_backward(const RmsNormBackwardParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
