// Which keys a query of a prompt sees, and which queries see a key (params/flash_attention.h).
#pragma once
#include "params/flash_attention.h"

namespace llmk::kernels::flash {

struct Visible {
  const FlashAttentionParams& params;
  int64_t b;
  int q_tokens, k_tokens, left, right;  // `left`, `right`: negative is all
  int shift;                            // from the index of a query to its position

  __device__ Visible(const FlashAttentionParams& params, int64_t b)
      : params(params),
        b(b),
        q_tokens(static_cast<int>(params.q_tokens)),
        k_tokens(params.k_seqlens ? max(0, min(params.k_seqlens[b], static_cast<int>(params.k_tokens)))
                                  : static_cast<int>(params.k_tokens)),
        left(static_cast<int>(params.window_left)),
        right(static_cast<int>(params.window_right)),
        shift(k_tokens - q_tokens) {}

  // The first key that a query sees, and the one behind the last. Neither falls from one query to the next. Queries
  // behind the last one may be asked for.
  __device__ int begin(int query) const {
    const int given = params.k_begin ? clamp(given_begin(query)) : 0;
    return left < 0 ? given : max(given, query + shift - left);
  }
  __device__ int end(int query) const {
    const int given = params.k_end ? clamp(given_end(query)) : k_tokens;
    return right < 0 ? given : min(given, query + shift + right + 1);
  }

  // The first query that sees a key, if any does, and the one behind the last: those from the first whose end is behind
  // the key to the first whose begin is. Neither falls from one key to the next. The results are in [low, high], where
  // they are known to be; a key behind the last one gives anything in there.
  __device__ int first_query(int key) const { return first_query(key, 0, q_tokens); }
  __device__ int first_query(int key, int low, int high) const {
    if (right >= 0) low = min(high, max(low, key - shift - right));
    if (!params.k_end) return low;
    if (!params.k_end_query) return key < given_end(0) ? low : high;
    return first_above(low, high, key, [&](int query) { return given_end(query); });
  }
  __device__ int end_query(int key) const { return end_query(key, 0, q_tokens); }
  __device__ int end_query(int key, int low, int high) const {
    if (left >= 0) high = max(low, min(high, key - shift + left + 1));
    if (!params.k_begin) return high;
    if (!params.k_begin_query) return key < given_begin(0) ? low : high;
    return first_above(low, high, key, [&](int query) { return given_begin(query); });
  }

 private:
  __device__ int clamp(int key) const { return max(0, min(key, k_tokens)); }
  __device__ int given_begin(int query) const {
    const int64_t at = min(query, q_tokens - 1) * params.k_begin_query;
    return params.k_begin[b * params.k_begin_batch + at];
  }
  __device__ int given_end(int query) const {
    const int64_t at = min(query, q_tokens - 1) * params.k_end_query;
    return params.k_end[b * params.k_end_batch + at];
  }

  // The first query in [low, high) whose value is above `key`, else `high`; values do not fall.
  template <typename Value>
  __device__ static int first_above(int low, int high, int key, const Value& value_of) {
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (value_of(middle) > key) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

}  // namespace llmk::kernels::flash
