#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "limits.h"
#include "params/attention.h"

namespace llmk::kernels {

// The slow kernel: any dtype and alignment, head_dim up to kMaxHeadDim; no fused form.
cudaError_t decode_attention_any(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
