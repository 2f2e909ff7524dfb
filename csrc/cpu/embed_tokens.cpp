// The beginning of a forward on the CPU: the formulas and the rounding of kernels/embedding/embed_tokens.cu.
#include "cpu/embed_tokens.h"

#include <algorithm>
#include <limits>

#include "cpu/convert.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kBlock = 512;

template <typename T>
inline void embed_row(const T* from, T* to, int64_t cols, double scale, bool accumulate) {
  using A = Wide<T>;
  LoopType<T> in_buffer[kBlock], sum_buffer[kBlock], out_buffer[kBlock];
  const A factor = static_cast<A>(scale);
  for_blocks<kBlock>(cols, [&](int64_t begin, int64_t count) {
    LoopType<T>* const out = output_buffer(to + begin, out_buffer);
    if (from == nullptr) {
      for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(std::numeric_limits<A>::quiet_NaN());
    } else {
      const LoopType<T>* const in = load(from + begin, count, in_buffer);
      if (accumulate) {
        const LoopType<T>* const sum = load(to + begin, count, sum_buffer);
        for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(widen(sum[i]) + rounded<T>(factor * widen(in[i])));
      } else {
        for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(factor * widen(in[i]));
      }
    }
    store(out, count, to + begin);
  });
}

}  // namespace

void embed_rows(const EmbedTokensParams& p, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t id =
          p.ids_int64 ? static_cast<const int64_t*>(p.ids)[row] : static_cast<const int32_t*>(p.ids)[row];
      const T* const embedding = static_cast<const T*>(p.embedding);
      embed_row(id >= 0 && id < p.vocab ? embedding + id * p.embedding_stride : nullptr,
                static_cast<T*>(p.hidden) + row * p.hidden_stride, p.cols, p.scale, p.accumulate);
    }
  });
}

void count_tokens(const EmbedTokensParams& p) {
  for (int64_t i = 0; i < p.counts * p.batch; ++i) p.counters[i] += p.advance;
  if (p.positions == nullptr) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t position = int64_t{p.counters[b]} - (p.tokens - 1) + t;
      p.positions[b * p.tokens + t] = static_cast<int32_t>(std::clamp<int64_t>(position, 0, int64_t{p.max_position}));
    }
  }
}

}  // namespace llmk::cpu
