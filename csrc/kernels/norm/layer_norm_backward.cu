// The backward of LayerNorm: see backward.cuh.
#include "backward.cuh"
#include "layer_norm.h"

namespace llmk::kernels {

cudaError_t layer_norm_backward_workspace(const NormBackwardParams& params, Dtype dtype,
                                          NormBackwardWorkspace& workspace) {
  return norm::backward_workspace</*kCentered=*/true>(params, dtype, workspace);
}

cudaError_t layer_norm_backward(const NormBackwardParams& params, Dtype dtype, cudaStream_t stream) {
  return norm::backward</*kCentered=*/true>(params, dtype, stream);
}

}  // namespace llmk::kernels
