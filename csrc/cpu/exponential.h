// e^x in loops that the compiler vectorises, with the same bits on every instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/convert.h"

namespace llmk::cpu {

inline double exponential(double x) { return std::exp(x); }

// e^x to 1.3 units in the last place, 0 below e^-86.99; any number for NaN.
// With n = round(x / ln 2) and r = x - n ln 2, at most ln(2) / 2: e^x = 2^n e^r.
inline float exponential(float x) {
  // Clamps x to [-87, 89]: as integers, positive floats are ordered, and negative ones are larger unsigned numbers.
  // (The compiler would make branches of comparisons of floats, and then compute both sides.)
  const int32_t not_above = std::min(bit_cast<int32_t>(x), bit_cast<int32_t>(89.f));
  x = bit_cast<float>(std::min(static_cast<uint32_t>(not_above), bit_cast<uint32_t>(-87.f)));
  // Adding 1.5 * 2^23 rounds to an integer; with 126 added, the low bits are the exponent of 2^(n - 1).
  constexpr float kShifter = 12582912.f + 126.f;
  const float shifted = x * 1.44269504f + kShifter;
  const float n = shifted - kShifter;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts: the first product is exact
  const float r2 = r * r;
  // 2 e^r by a minimax polynomial, added up as a tree.
  const float high = (0.0833365321f + 0.0167373549f * r) + 0.002764147f * r2;
  const float low = (2.f + 2.f * r) + r2 * ((0.999999881f + 0.333330423f * r) + r2 * high);
  return low * bit_cast<float>(bit_cast<uint32_t>(shifted) << 23);  // infinite above e^88.72
}

}  // namespace llmk::cpu
