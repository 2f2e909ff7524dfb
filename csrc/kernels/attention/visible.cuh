// Which keys a query of a prompt sees (params/flash_attention.h).
#pragma once
#include "params/flash_attention.h"

namespace llmk::kernels::flash {

struct Visible {
  int k_begin, k_tokens, left, right;  // `left`, `right`: at most k_tokens, which is all of them
  int shift;                           // from the index of a query to its position

  __device__ Visible(const FlashAttentionParams& params, int64_t b)
      : k_begin(params.k_begin ? max(0, params.k_begin[b]) : 0),
        k_tokens(static_cast<int>(params.k_tokens)),
        left(window(params.window_left)),
        right(window(params.window_right)),
        shift(static_cast<int>(params.k_tokens - params.q_tokens)) {}

  // The first key that a query sees, and the one behind the last. Neither falls from one query to the next.
  __device__ int begin(int query) const { return left == k_tokens ? k_begin : max(k_begin, query + shift - left); }
  __device__ int end(int query) const {
    return right == k_tokens ? k_tokens : min(k_tokens, query + shift + right + 1);
  }

 private:
  __device__ int window(int64_t keys) const { return keys < 0 || keys > k_tokens ? k_tokens : static_cast<int>(keys); }
};

}  // namespace llmk::kernels::flash
