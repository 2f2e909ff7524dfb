// The online softmax of attention on the CPU: weights relative to the largest score so far.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/convert.h"
#include "cpu/exponential.h"

namespace llmk::cpu {

constexpr int kLanes = 8;  // independent accumulators of a reduction

template <typename A>
inline A sum_of_lanes(const A (&lanes)[kLanes]) {
  A half[kLanes / 2];
  for (int i = 0; i < kLanes / 2; ++i) half[i] = lanes[i] + lanes[i + kLanes / 2];
  return (half[0] + half[2]) + (half[1] + half[3]);
}

template <typename A>
inline A hyperbolic_tangent(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return std::tanh(x);
  } else {
    // By the exponential; near 0, where its digits cancel, by a series.
    const A z = x * x, e = exponential(A(-2) * std::abs(x));
    const A series = x + x * z * (A(-1. / 3) + z * (A(2. / 15) + z * (A(-17. / 315) + z * A(62. / 2835))));
    const A quotient = std::copysign((A(1) - e) / (A(1) + e), x);
    return z < A(0.0625) ? series : quotient;
  }
}

// Scores of products q . k.
template <typename A>
inline void scale_and_cap(A* __restrict scores, int64_t count, A scale, A cap) {
  for (int64_t j = 0; j < count; ++j) scores[j] *= scale;
  if (cap > 0) {
    for (int64_t j = 0; j < count; ++j) scores[j] = cap * hyperbolic_tangent(scores[j] / cap);
  }
}

template <typename A>
inline A largest(const A* values, int64_t count) {
  A lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<A>::infinity());
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = values[j + i] > lanes[i] ? values[j + i] : lanes[i];
  }
  for (; j < count; ++j) lanes[0] = values[j] > lanes[0] ? values[j] : lanes[0];
  return *std::max_element(lanes, lanes + kLanes);
}

// values = exp(values - maximum); returns their sum. NaN stays NaN. A score equal to the maximum has weight 1, even if
// both are infinite.
template <typename A>
inline A weights_of(A* __restrict values, int64_t count, A maximum) {
  for (int64_t j = 0; j < count; ++j) {
    const A distance = values[j] - maximum, weight = values[j] == maximum ? A(1) : exponential(distance);
    values[j] = values[j] == values[j] ? weight : values[j];
  }
  A lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] += values[j + i];
  }
  for (; j < count; ++j) lanes[0] += values[j];
  return sum_of_lanes(lanes);
}

}  // namespace llmk::cpu
