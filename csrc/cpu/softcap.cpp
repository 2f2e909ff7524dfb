// Scale and softcap of logits on the CPU, in float32 (float64 for float64). Rounds to the dtype after each step, as
// eager PyTorch does: after the scale, the division, tanh and the product.
#include "cpu/softcap.h"

#include <algorithm>
#include <cmath>

#include "cpu/convert.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kBlock = 512;

template <typename T>
inline void scale_and_cap(const SoftcapParams& p, const T* x, T* y, int64_t size) {
  using A = Wide<T>;
  LoopType<T> x_buffer[kBlock], y_buffer[kBlock];
  A z[kBlock];
  const A scale = static_cast<A>(p.scale), cap = static_cast<A>(p.softcap);
  for_blocks<kBlock>(size, [&](int64_t begin, int64_t count) {
    const LoopType<T>* in = load(x + begin, count, x_buffer);
    LoopType<T>* out = output_buffer(y + begin, y_buffer);
    for (int64_t i = 0; i < count; ++i) z[i] = rounded<T>(scale * widen(in[i]));
    if (cap > 0) {
      for (int64_t i = 0; i < count; ++i) z[i] = rounded<T>(z[i] / cap);
      for (int64_t i = 0; i < count; ++i) z[i] = cap * rounded<T>(std::tanh(z[i]));
    }
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(z[i]);
    store(out, count, y + begin);
  });
}

}  // namespace

void scale_softcap(const SoftcapParams& p, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t at = begin; at < end;) {
      const int64_t row = at / p.cols, col = at % p.cols, count = std::min(p.cols - col, end - at);
      scale_and_cap(p, static_cast<const T*>(p.x) + row * p.x_stride + col, static_cast<T*>(p.y) + at, count);
      at += count;
    }
  });
}

}  // namespace llmk::cpu
