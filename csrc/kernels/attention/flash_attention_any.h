#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/flash_attention.h"

namespace llmk::kernels {

// Any dtype, strides and head_dim up to kMaxFlashHeadDim.
cudaError_t flash_attention_any(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
