// Norm and rotation of new queries and keys, and the write to the KV cache, on the CPU. Rounds as cpu/rms_norm_rope.cpp
// and cpu/rope.cpp do. Pages have been checked.
#include "cpu/attention.h"

#include <algorithm>
#include <vector>

#include "cpu/convert.h"
#include "cpu/head_norm.h"

namespace llmk::cpu {
namespace {

// out = `head`, rotated.
template <typename T>
inline void rotate_head(const RopeKvWriteParams& p, const Wide<T>* head, T* out, const Wide<T>* cos, const Wide<T>* sin,
                        LoopType<T>* buffer) {
  const int64_t dim = p.rope.rotary_dim;
  const bool interleaved = p.interleaved;
  LoopType<T>* output = output_buffer(out, buffer);
  // Two loops, since in one loop GCC would fuse multiplications and additions in spite of -ffp-contract=off.
  const int64_t step = interleaved ? 2 : 1, distance = interleaved ? 1 : dim / 2;
  for (int64_t low = 0; low < dim / 2 * step; low += step) {
    output[low] = narrow<T>(rounded<T>(head[low] * cos[low]) - rounded<T>(head[low + distance] * sin[low]));
  }
  for (int64_t high = distance; high < dim / 2 * step + distance; high += step) {
    output[high] = narrow<T>(rounded<T>(head[high] * cos[high]) + rounded<T>(head[high - distance] * sin[high]));
  }
  for (int64_t d = dim; d < p.head_dim; ++d) output[d] = narrow<T>(head[d]);
  store(output, p.head_dim, out);
}

template <typename T>
inline void load_angles(const RopeTables& rope, const void* table, int64_t row_stride, int64_t position,
                        bool interleaved, LoopType<T>* buffer, Wide<T>* angles) {
  const int64_t dim = rope.rotary_dim, width = rope.half_width ? dim / 2 : dim;
  const LoopType<T>* row = load(static_cast<const T*>(table) + position * row_stride, width, buffer);
  for (int64_t d = 0; d < dim; ++d) angles[d] = widen(row[!rope.half_width ? d : interleaved ? d / 2 : d % width]);
}

template <typename T>
inline void write_tokens(const RopeKvWriteParams& p, int64_t flat_begin, int64_t flat_end) {
  using A = Wide<T>;
  const int64_t dim = p.head_dim;
  // A row is what is normalized together: a head, or all heads of q or of k.
  const int64_t q_row = p.norm.row_wise ? p.heads : 1, k_row = p.norm.row_wise ? p.kv_heads : 1;
  std::vector<LoopType<T>> buffer(std::max(q_row, k_row) * dim);
  std::vector<A> row(buffer.size()), cos(dim), sin(dim);
  const auto scale_of = [&](const void* weight, int64_t heads) {
    return weight != nullptr ? norm_scale<T>(weight, heads * dim, p.norm.options.weight_offset) : std::vector<A>();
  };
  const std::vector<A> q_scale = scale_of(p.norm.q_weight, q_row), k_scale = scale_of(p.norm.k_weight, k_row);
  // Normalizes and rotates the heads at `in`, `stride` apart. out(h): where head h goes; may be in place.
  const auto write_heads = [&](const T* in, int64_t stride, int64_t heads, int64_t heads_of_row,
                               const std::vector<A>& scale, const auto& out) {
    for (int64_t first = 0; first < heads; first += heads_of_row) {
      for (int64_t h = 0; h < heads_of_row; ++h) {
        widen_all(in + (first + h) * stride, dim, buffer.data(), row.data() + h * dim);
      }
      if (!scale.empty()) normalize<T>(row.data(), scale.data(), heads_of_row * dim, p.norm.options);
      for (int64_t h = 0; h < heads_of_row; ++h) {
        rotate_head(p, row.data() + h * dim, out(first + h), cos.data(), sin.data(), buffer.data());
      }
    }
  };
  for (int64_t flat = flat_begin; flat < flat_end; ++flat) {
    const int64_t b = flat / p.tokens, t = flat % p.tokens;
    const int64_t at = b * p.positions_batch + t * p.positions_token;
    const int64_t position = p.position_ids_int64 ? static_cast<const int64_t*>(p.position_ids)[at]
                                                  : static_cast<const int32_t*>(p.position_ids)[at];
    load_angles<T>(p.rope, p.rope.cos, p.rope.cos_row, position, p.interleaved, buffer.data(), cos.data());
    load_angles<T>(p.rope, p.rope.sin, p.rope.sin_row, position, p.interleaved, buffer.data(), sin.data());
    T* const q = static_cast<T*>(p.q) + b * p.q_batch + t * p.q_token;
    write_heads(q, p.q_head, p.heads, q_row, q_scale, [&](int64_t h) { return q + h * p.q_head; });
    const int64_t place = p.cache_seqlens[b] - p.tokens + t;
    if (place < 0 || place >= p.cache.capacity) continue;
    const T* const k = static_cast<const T*>(p.k) + b * p.k_batch + t * p.k_token;
    write_heads(k, p.k_head, p.kv_heads, k_row, k_scale,
                [&](int64_t h) { return static_cast<T*>(p.cache.k) + cache_offset(p.cache, b, place, h, false); });
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      std::copy_n(static_cast<const T*>(p.v) + b * p.v_batch + t * p.v_token + h * p.v_head, dim,
                  static_cast<T*>(p.cache.v) + cache_offset(p.cache, b, place, h, true));
    }
  }
}

}  // namespace

void rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { write_tokens<typename decltype(tag)::type>(params, begin, end); });
}

}  // namespace llmk::cpu
