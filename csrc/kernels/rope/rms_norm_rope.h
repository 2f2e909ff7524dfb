#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/rms_norm_rope.h"

namespace llmk::kernels {

// Fewer than kMaxRopeTokens of rope.h, as for a rotation alone.
cudaError_t rms_norm_rope(const RmsNormRopeParams& params, Dtype dtype, cudaStream_t stream);

// The rows of partial sums that each wanted gradient of a weight needs, on the current device.
cudaError_t rms_norm_rope_backward_partial_rows(const RmsNormRopeParams& params, Dtype dtype, int64_t& rows);
cudaError_t rms_norm_rope_backward(const RmsNormRopeParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
