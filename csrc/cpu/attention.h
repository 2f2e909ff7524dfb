// Decode attention and its cache writes on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/attention.h"

namespace llmk::cpu {

// The queries at the flat indices (batch * tokens + token) * heads + head in [begin, end). No fused form.
void decode_attention(const DecodeAttentionParams& params, Dtype dtype, int64_t begin, int64_t end);

// The tokens at the flat indices batch * tokens + token in [begin, end).
void rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, int64_t begin, int64_t end);

}  // namespace llmk::cpu
