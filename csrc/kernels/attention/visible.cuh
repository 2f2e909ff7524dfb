// Which keys a query of a prompt sees (params/flash_attention.h).
#pragma once
#include "params/flash_attention.h"

namespace llmk::kernels::flash {

struct Visible {
  int q_tokens, k_begin, k_tokens, left, right;  // `left`, `right`: negative is all
  int shift;                                     // from the index of a query to its position

  __device__ Visible(const FlashAttentionParams& params, int64_t b)
      : q_tokens(static_cast<int>(params.q_tokens)),
        k_begin(params.k_begin ? max(0, params.k_begin[b]) : 0),
        k_tokens(static_cast<int>(params.k_tokens)),
        left(static_cast<int>(params.window_left)),
        right(static_cast<int>(params.window_right)),
        shift(k_tokens - q_tokens) {}

  // The first key that a query sees, and the one behind the last. Neither falls from one query to the next.
  __device__ int begin(int query) const { return left < 0 ? k_begin : max(k_begin, query + shift - left); }
  __device__ int end(int query) const { return right < 0 ? k_tokens : min(k_tokens, query + shift + right + 1); }

  // The first query that sees a key, were there no padding, and the one behind the last.
  __device__ int first_query(int key) const { return right < 0 ? 0 : max(0, key - shift - right); }
  __device__ int end_query(int key) const { return left < 0 ? q_tokens : min(q_tokens, key - shift + left + 1); }
};

}  // namespace llmk::kernels::flash
