#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/flash_attention.h"

namespace llmk::kernels {

// The gradients of q, k and v from the statistics of the queries (statistics.cuh). Any dtype, strides and head_dim up
// to 256.
cudaError_t flash_attention_backward_any(const FlashAttentionBackwardParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
