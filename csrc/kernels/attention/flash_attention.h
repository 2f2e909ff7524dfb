#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/flash_attention.h"
#include "route.h"

namespace llmk::kernels {

// choose_attention_route() for the current device.
AttentionRoute route_attention(const AttentionProblem& problem);

// By the kernel of the route.
cudaError_t flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream);

// The same without a place in a graph that is recorded: for who records it with a larger part (recorder.h).
cudaError_t launch_flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
