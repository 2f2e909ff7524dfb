// The beginning of a forward on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/embed_tokens.h"

namespace llmk::cpu {

// Rows [begin, end) of `hidden`.
void embed_rows(const EmbedTokensParams& params, Dtype dtype, int64_t begin, int64_t end);

// Counters and positions.
void count_tokens(const EmbedTokensParams& params);

}  // namespace llmk::cpu
