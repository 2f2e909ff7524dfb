// The forward of LayerNorm: see forward.cuh.
#include "layer_norm.h"

#include "forward.cuh"

namespace llmk::kernels {

cudaError_t layer_norm(const NormParams& params, Dtype dtype, cudaStream_t stream, bool may_overlap) {
  return norm::forward</*kCentered=*/true>(params, dtype, stream, may_overlap);
}

}  // namespace llmk::kernels
