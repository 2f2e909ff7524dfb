#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "params/attention.h"

namespace llmk::kernels {

// Whether the tensor-core kernel takes it: 16-bit, head_dim 64, 96, 128 or 256, everything aligned to 16 bytes.
// decode_attention() takes anything else, too, slowly; but the fused form wants this and rotary tables.
bool decode_attention_is_fast(const DecodeAttentionParams& params, Dtype dtype);

// What DecodeAttentionParams wants of device memory, on the current device.
constexpr int kDecodeAttentionCounters = 288;
cudaError_t decode_attention_workspace_bytes(const DecodeAttentionParams& params, size_t& bytes);
// Counters of which no launch makes use that may run at the same time as one in this stream, or in its capture.
cudaError_t decode_attention_counters(cudaStream_t stream, int*& counters);
// A set of counters that is never given to anybody else, or -1 if there is none left; and that a capture, by its id and
// in one stream, uses that set, until it is forgotten.
int reserve_counters();
void use_counters(uint64_t capture, int set);
void forget_counters(uint64_t capture);

cudaError_t decode_attention(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream);

// Rotates q in place and k into the cache, and copies v there.
cudaError_t rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
