#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"
#include "params/attention.h"
#include "route.h"

namespace llmk::kernels {

// choose_decode_route() for the current device. The plain kernel does not take the fused form.
DecodeRoute route_decode_attention(const DecodeAttentionParams& params, Dtype dtype);

// Counters for a launch in this stream, or in its capture: no launch that may run at the same time uses them. While
// this thread records a graph, those of the graph.
cudaError_t decode_attention_counters(cudaStream_t stream, int*& counters);

// By the kernel of the route.
cudaError_t decode_attention(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream);

// Rotates q in place and k into the cache, and copies v there. q and k are normalized before, where there is a weight.
cudaError_t rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
