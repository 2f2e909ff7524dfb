// The forward of RMSNorm: see forward.cuh.
#include "rms_norm.h"

#include "forward.cuh"

namespace llmk::kernels {

cudaError_t rms_norm(const NormParams& params, Dtype dtype, cudaStream_t stream, bool may_overlap) {
  return norm::forward</*kCentered=*/false>(params, dtype, stream, may_overlap);
}

}  // namespace llmk::kernels
