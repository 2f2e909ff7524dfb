// What attention over prompts and its gradients share on the CPU: rows in the type computed in, and the keys of a
// query.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <utility>

#include "cpu/convert.h"
#include "params/flash_attention.h"

namespace llmk::cpu {

constexpr int64_t kRowsAtOnce = 4;  // added to a sum in one pass, so that it is read and written less often

template <typename T>
inline void widen_row(const T* source, int64_t dim, Wide<T>* __restrict target) {
  if constexpr (std::is_same_v<T, Half>) {
    widen_halves(source, dim, target);
  } else {
    for (int64_t d = 0; d < dim; ++d) target[d] = widen(source[d]);
  }
}

// sum[0, width) += the sum of weights[i] * rows[i * stride, ... + width) over i < count.
template <typename A>
inline void add_weighted_rows(A* __restrict sum, const A* __restrict weights, const A* __restrict rows, int64_t stride,
                              int64_t count, int64_t width) {
  int64_t i = 0;
  for (; i + kRowsAtOnce <= count; i += kRowsAtOnce) {
    const A *const r0 = rows + i * stride, *const r1 = r0 + stride, *const r2 = r1 + stride, *const r3 = r2 + stride;
    const A w0 = weights[i], w1 = weights[i + 1], w2 = weights[i + 2], w3 = weights[i + 3];
    for (int64_t c = 0; c < width; ++c) sum[c] += (w0 * r0[c] + w1 * r1[c]) + (w2 * r2[c] + w3 * r3[c]);
  }
  for (; i < count; ++i) {
    const A* const row = rows + i * stride;
    const A w = weights[i];
    for (int64_t c = 0; c < width; ++c) sum[c] += w * row[c];
  }
}

// The first key that a query sees, and the one behind the last, within [0, k_tokens]. Neither falls from one query to
// the next.
inline std::pair<int64_t, int64_t> visible_keys(const FlashAttentionParams& p, int64_t b, int64_t token) {
  const int64_t position = token + p.k_tokens - p.q_tokens;
  int64_t begin = 0, end = p.k_tokens;
  if (p.k_begin != nullptr) begin = std::max<int64_t>(p.k_begin[b * p.k_begin_batch + token * p.k_begin_query], 0);
  if (p.k_end != nullptr) end = std::min<int64_t>(end, p.k_end[b * p.k_end_batch + token * p.k_end_query]);
  if (p.window_left >= 0) begin = std::max(begin, position - p.window_left);
  if (p.window_right >= 0) end = std::min(end, position + p.window_right + 1);
  begin = std::min(begin, p.k_tokens);
  return {begin, std::max(begin, end)};
}

// The `count` scores of a query and the keys from `key` on, with what is added to them; -inf hides a key.
template <typename T, typename A>
inline void add_bias(const FlashAttentionParams& p, int64_t b, int64_t head, int64_t token, int64_t key, int64_t count,
                     A* scores) {
  const ScoreBias& bias = p.bias;
  if (bias.slopes) {
    const A slope = bias.slopes[b * bias.slopes_batch + head];
    const int64_t distance = token + p.k_tokens - p.q_tokens - key;  // to the first of the keys
    for (int64_t j = 0; j < count; ++j) scores[j] -= slope * static_cast<A>(std::abs(distance - j));
  }
  if (!bias.mask) return;
  constexpr A kNone = -std::numeric_limits<A>::infinity();
  const int64_t first = b * bias.batch + head * bias.head + token * bias.query + key * bias.key;
  const auto add = [&]<typename Element>(const Element* mask) {
    for (int64_t j = 0; j < count; ++j) {
      Wide<Element> added;
      widen_row(mask + first + j * bias.key, 1, &added);
      scores[j] = added < kHidden ? kNone : scores[j] + A(added);
    }
  };
  switch (bias.type) {
    case ScoreBias::Type::kInput: return add(static_cast<const T*>(bias.mask));
    case ScoreBias::Type::kFloat: return add(static_cast<const float*>(bias.mask));
    case ScoreBias::Type::kBool:
      for (int64_t j = 0; j < count; ++j) {
        if (!static_cast<const bool*>(bias.mask)[first + j * bias.key]) scores[j] = kNone;
      }
  }
}

}  // namespace llmk::cpu
