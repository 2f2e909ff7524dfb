// RMSNorm of a row that is held in the type computed in: of a head of q or k before its rotation, or of all of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/convert.h"
#include "cpu/row_sums.h"
#include "cpu/rows.h"
#include "params/norm.h"

namespace llmk::cpu {

// source, as the type that is computed in.
template <typename T>
inline void widen_all(const T* source, int64_t count, LoopType<T>* buffer, Wide<T>* target) {
  const LoopType<T>* x = load(source, count, buffer);
  for (int64_t i = 0; i < count; ++i) target[i] = widen(x[i]);
}

// offset + weight; 1 without a weight.
template <typename T>
inline std::vector<Wide<T>> norm_scale(const void* weight, int64_t cols, double offset) {
  std::vector<Wide<T>> scale(cols, Wide<T>(1));
  if (weight == nullptr) return scale;
  std::vector<LoopType<T>> buffer(cols);
  widen_all(static_cast<const T*>(weight), cols, buffer.data(), scale.data());
  for (Wide<T>& value : scale) value += static_cast<Wide<T>>(offset);
  return scale;
}

// 1 / sqrt(mean(x^2) + eps). The sum is that of cpu/norm.cpp, bit for bit.
template <typename A>
inline A reciprocal_rms(const A* x, int64_t cols, double eps) {
  A squares = 0;
  for_blocks<kBlock>(cols, [&](int64_t begin, int64_t count) {
    squares += sum_of<A>(count, [=](int64_t i) { return x[begin + i] * x[begin + i]; });
  });
  return static_cast<A>(1.0 / std::sqrt(static_cast<double>(squares) / static_cast<double>(cols) + eps));
}

// x = r(m scale), where n = x / sqrt(mean(x^2) + eps), m = r(n) with cast_before_weight, else n; r rounds to T.
template <typename T>
inline void normalize(Wide<T>* x, const Wide<T>* scale, int64_t cols, const RmsNormOptions& options) {
  using A = Wide<T>;
  const A rstd = reciprocal_rms(x, cols, options.eps);
  const bool cast_before_weight = options.cast_before_weight;
  for (int64_t i = 0; i < cols; ++i) {
    const A n = x[i] * rstd;
    x[i] = rounded<T>((cast_before_weight ? rounded<T>(n) : n) * scale[i]);
  }
}

}  // namespace llmk::cpu
