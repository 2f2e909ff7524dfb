// The backward of RMSNorm: see backward.cuh.
#include "backward.cuh"
#include "rms_norm.h"

namespace llmk::kernels {

cudaError_t rms_norm_backward_workspace(const NormBackwardParams& params, Dtype dtype,
                                        NormBackwardWorkspace& workspace) {
  return norm::backward_workspace</*kCentered=*/false>(params, dtype, workspace);
}

cudaError_t rms_norm_backward(const NormBackwardParams& params, Dtype dtype, cudaStream_t stream) {
  return norm::backward</*kCentered=*/false>(params, dtype, stream);
}

}  // namespace llmk::kernels
