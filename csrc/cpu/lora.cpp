// Factors of float32 as sums of two of bfloat16, and sums of halves: the formulas of csrc/kernels/lora/lora.cu; and
// adapters beside a product, in float32 (float64 for float64), rounded once.
#include "cpu/lora.h"

#include <type_traits>
#include <vector>

#include "cpu/convert.h"

namespace llmk::cpu {
namespace {

inline BFloat16 to_bfloat16(float x) {
  return x == x ? narrow<BFloat16>(x) : BFloat16{0x7fc0};  // the low half of this NaN may be other than 0
}

template <typename T>
Wide<T> to_wide(T x) {
  if constexpr (std::is_same_v<T, Half>) {
    return half_to_float(x);
  } else {
    return widen(x);
  }
}

template <typename T>
T to_narrow(Wide<T> x) {
  if constexpr (std::is_same_v<T, Half>) {
    return float_to_half(x);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(x);
  } else {
    return x;
  }
}

// Factors of type F beside activations of type T.
template <typename T, typename F>
void add_adapters(const LoraAdapters& p, int64_t begin, int64_t end) {
  using A = Wide<T>;
  std::vector<A> x(static_cast<size_t>(p.k)), h;
  for (int64_t row = begin; row < end; ++row) {
    const T* const source = static_cast<const T*>(p.x) + row * p.x_stride;
    for (int64_t i = 0; i < p.k; ++i) x[i] = to_wide(source[i]);
    for (int index = 0; index < p.count; ++index) {
      const LoraAdapter& adapter = p.adapters[index];
      const A scaling = static_cast<A>(adapter.scaling);
      h.assign(static_cast<size_t>(adapter.rank), 0);
      const F* a = static_cast<const F*>(adapter.a);
      for (int64_t r = 0; r < adapter.rank; ++r, a += p.k) {
        A sum = 0;
        for (int64_t i = 0; i < p.k; ++i) sum += x[i] * static_cast<A>(to_wide(a[i]));
        h[r] = scaling * sum;
      }
      T* const y = static_cast<T*>(p.y) + row * p.y_stride + adapter.begin;
      const F* b = static_cast<const F*>(adapter.b);
      for (int64_t n = 0; n < adapter.n; ++n, b += adapter.rank) {
        A sum = 0;
        for (int64_t r = 0; r < adapter.rank; ++r) sum += h[r] * static_cast<A>(to_wide(b[r]));
        y[n] = to_narrow<T>(to_wide(y[n]) + sum);
      }
    }
  }
}

}  // namespace

void lora_adapters(const LoraAdapters& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.factors == dtype) {
      add_adapters<T, T>(params, begin, end);
    } else {
      add_adapters<T, float>(params, begin, end);
    }
  });
}

void lora_split(const LoraSplit& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* const source = params.source + row * params.source_stride;
    BFloat16* const first = static_cast<BFloat16*>(params.parts) + row * params.row_stride;
    BFloat16* const again = first + (3 - params.lower) * params.part_stride;
    BFloat16* const rest = first + params.lower * params.part_stride;
    for (int64_t col = 0; col < params.cols; ++col) {
      const float x = params.half ? params.factor * (source[col] + source[col + params.half]) : source[col];
      const BFloat16 upper = to_bfloat16(x);
      first[col] = again[col] = upper;
      rest[col] = to_bfloat16(x - widen(upper));
    }
  }
}

void lora_sum(const LoraSum& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* const source = params.source + row * params.source_stride;
    float* const sum = params.sum + row * params.cols;
    for (int64_t col = 0; col < params.cols; ++col) sum[col] = source[col] + source[col + params.half];
  }
}

}  // namespace llmk::cpu
