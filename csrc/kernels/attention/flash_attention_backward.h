#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"
#include "params/flash_attention.h"

namespace llmk::kernels {

// The gradients of q, k, v and, where there are any, of sinks, by the kernels of the route.
cudaError_t flash_attention_backward(const FlashAttentionBackwardParams& params, Dtype dtype, cudaStream_t stream);

// How many numbers of workspace it needs.
int64_t flash_attention_backward_workspace(const FlashAttentionBackwardParams& params, Dtype dtype);

}  // namespace llmk::kernels
