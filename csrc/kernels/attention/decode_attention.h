#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "params/attention.h"

namespace llmk::kernels {

// Whether the tensor-core kernel supports this: 16-bit, head_dim 64, 96, 128 or 256, everything aligned to 16 bytes.
// decode_attention() runs anything else by a slow kernel, except for the fused form.
bool decode_attention_is_fast(const DecodeAttentionParams& params, Dtype dtype);

// DecodeAttentionParams::workspace and ::counters, on the current device.
constexpr int kDecodeAttentionCounters = 288;
cudaError_t decode_attention_workspace_bytes(const DecodeAttentionParams& params, size_t& bytes);
// Counters for a launch in this stream, or in its capture: no launch that may run at the same time uses them. While
// this thread records a graph, those of the graph.
cudaError_t decode_attention_counters(cudaStream_t stream, int*& counters);

cudaError_t decode_attention(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream);

// Rotates q in place and k into the cache, and copies v there. q and k are normalized before, where there is a weight.
cudaError_t rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
