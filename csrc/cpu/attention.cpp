// Decode attention on the CPU: softmax(scale q k^T) v over the live keys of a sequence, one query at a time, in float32
// (float64 for float64) with a running maximum; and the rotation of new queries and keys with the write to the cache,
// rounded as cpu/rope.cpp does. Lengths and pages have been checked.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/convert.h"

namespace llmk::cpu {
namespace {

// Where a key or value is: the first element of head `head` of token `token`.
inline int64_t cache_offset(const KvCache& cache, int64_t b, int64_t token, int64_t head, bool is_value) {
  int64_t page = b, in_page = token;
  if (cache.block_table != nullptr) {
    page = cache.block_table[b * cache.table_stride + token / cache.page_size];
    in_page = token % cache.page_size;
  }
  return is_value ? page * cache.v_page + in_page * cache.v_token + head * cache.v_head
                  : page * cache.k_page + in_page * cache.k_token + head * cache.k_head;
}

template <typename T>
inline void attend(const DecodeAttentionParams& p, int64_t flat_begin, int64_t flat_end) {
  using A = Wide<T>;
  const int64_t dim = p.head_dim;
  std::vector<A> query(dim), sum(dim);
  std::vector<Stage<T>> buffer(dim);
  for (int64_t flat = flat_begin; flat < flat_end; ++flat) {
    const int64_t head = flat % p.heads, row = flat / p.heads, t = row % p.tokens, b = row / p.tokens;
    const int64_t kv_head = head / (p.heads / p.kv_heads), end = p.cache_seqlens[b] - p.tokens + t + 1;
    int64_t begin = p.cache_leftpad != nullptr ? std::max<int64_t>(p.cache_leftpad[b], 0) : 0;
    if (p.window_left >= 0) begin = std::max(begin, end - 1 - p.window_left);
    const Stage<T>* q =
        load(static_cast<const T*>(p.q) + b * p.q_batch + t * p.q_token + head * p.q_head, dim, buffer.data());
    for (int64_t d = 0; d < dim; ++d) query[d] = widen(q[d]);
    std::fill(sum.begin(), sum.end(), A(0));
    A maximum = -std::numeric_limits<A>::infinity(), total = 0;
    for (int64_t key = begin; key < end; ++key) {
      const Stage<T>* k =
          load(static_cast<const T*>(p.cache.k) + cache_offset(p.cache, b, key, kv_head, false), dim, buffer.data());
      A score = 0;
      for (int64_t d = 0; d < dim; ++d) score += query[d] * widen(k[d]);
      score *= static_cast<A>(p.softmax_scale);
      if (p.softcap > 0) score = static_cast<A>(p.softcap) * std::tanh(score / static_cast<A>(p.softcap));
      const Stage<T>* v =
          load(static_cast<const T*>(p.cache.v) + cache_offset(p.cache, b, key, kv_head, true), dim, buffer.data());
      if (score > maximum) {
        const A shrink = std::exp(maximum - score);
        maximum = score;
        total *= shrink;
        for (int64_t d = 0; d < dim; ++d) sum[d] *= shrink;
      }
      const A weight = score == maximum ? A(1) : std::exp(score - maximum);
      total += weight;
      for (int64_t d = 0; d < dim; ++d) sum[d] += weight * widen(v[d]);
    }
    T* const out = static_cast<T*>(p.out) + flat * dim;
    Stage<T>* staged = staging(out, buffer.data());
    const A factor = total == 0 ? A(0) : 1 / total;  // no key: zeros
    for (int64_t d = 0; d < dim; ++d) staged[d] = narrow<T>(sum[d] * factor);
    store(staged, dim, out);
  }
}

// out = the head at `in`, rotated; may be in place.
template <typename T>
inline void rotate_head(const T* in, T* out, const Wide<T>* cos, const Wide<T>* sin, int64_t dim, bool interleaved,
                        Stage<T>* buffer, Wide<T>* head) {
  const Stage<T>* x = load(in, dim, buffer);
  for (int64_t d = 0; d < dim; ++d) head[d] = widen(x[d]);
  Stage<T>* staged = staging(out, buffer);
  // Where the pairs are: two loops, since of one GCC makes fused instructions in spite of -ffp-contract=off.
  const int64_t step = interleaved ? 2 : 1, distance = interleaved ? 1 : dim / 2;
  for (int64_t low = 0; low < dim / 2 * step; low += step) {
    staged[low] = narrow<T>(rounded<T>(head[low] * cos[low]) - rounded<T>(head[low + distance] * sin[low]));
  }
  for (int64_t high = distance; high < dim / 2 * step + distance; high += step) {
    staged[high] = narrow<T>(rounded<T>(head[high] * cos[high]) + rounded<T>(head[high - distance] * sin[high]));
  }
  store(staged, dim, out);
}

template <typename T>
inline void load_angles(const RopeTables& rope, const void* table, int64_t row_stride, int64_t position, int64_t dim,
                        bool interleaved, Stage<T>* buffer, Wide<T>* angles) {
  const int64_t width = rope.half_width ? dim / 2 : dim;
  const Stage<T>* row = load(static_cast<const T*>(table) + position * row_stride, width, buffer);
  for (int64_t d = 0; d < dim; ++d) angles[d] = widen(row[!rope.half_width ? d : interleaved ? d / 2 : d % width]);
}

template <typename T>
inline void write_tokens(const RopeKvWriteParams& p, int64_t flat_begin, int64_t flat_end) {
  using A = Wide<T>;
  const int64_t dim = p.head_dim;
  std::vector<Stage<T>> buffer(dim);
  std::vector<A> head(dim), cos(dim), sin(dim);
  for (int64_t flat = flat_begin; flat < flat_end; ++flat) {
    const int64_t b = flat / p.tokens, t = flat % p.tokens;
    const int64_t at = b * p.positions_batch + t * p.positions_token;
    const int64_t position = p.position_ids_int64 ? static_cast<const int64_t*>(p.position_ids)[at]
                                                  : static_cast<const int32_t*>(p.position_ids)[at];
    load_angles<T>(p.rope, p.rope.cos, p.rope.cos_row, position, dim, p.interleaved, buffer.data(), cos.data());
    load_angles<T>(p.rope, p.rope.sin, p.rope.sin_row, position, dim, p.interleaved, buffer.data(), sin.data());
    T* const q = static_cast<T*>(p.q) + b * p.q_batch + t * p.q_token;
    for (int64_t h = 0; h < p.heads; ++h) {
      rotate_head(q + h * p.q_head, q + h * p.q_head, cos.data(), sin.data(), dim, p.interleaved, buffer.data(),
                  head.data());
    }
    const int64_t place = p.cache_seqlens[b] - p.tokens + t;
    if (place < 0 || place >= p.cache.capacity) continue;
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      rotate_head(static_cast<const T*>(p.k) + b * p.k_batch + t * p.k_token + h * p.k_head,
                  static_cast<T*>(p.cache.k) + cache_offset(p.cache, b, place, h, false), cos.data(), sin.data(), dim,
                  p.interleaved, buffer.data(), head.data());
      std::copy_n(static_cast<const T*>(p.v) + b * p.v_batch + t * p.v_token + h * p.v_head, dim,
                  static_cast<T*>(p.cache.v) + cache_offset(p.cache, b, place, h, true));
    }
  }
}

}  // namespace

void decode_attention(const DecodeAttentionParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { attend<typename decltype(tag)::type>(params, begin, end); });
}

void rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { write_tokens<typename decltype(tag)::type>(params, begin, end); });
}

}  // namespace llmk::cpu
