// What the gradients of attention over prompts need to know of each query:
//
//   statistics [2, batch, heads, padded_q_tokens]      lse log2(e), then delta = grad_y . y - grad_lse
//
// A query that sees nothing, or does not exist, has an lse of +inf, which makes each of its probabilities 0.
#pragma once
#include <cstdint>

#include "params/flash_attention.h"

namespace llmk::kernels::flash {

// A multiple of every tile of queries.
__host__ __device__ inline int64_t padded_q_tokens(const FlashAttentionParams& params) {
  return (params.q_tokens + 127) / 128 * 128;
}

}  // namespace llmk::kernels::flash
