// Reductions of a row on the CPU, in an order that depends on its length only.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

namespace llmk::cpu {

// The sum of term(i) over i < count, in independent lanes, since one accumulator would wait for its own last addition.
// Callers add up blocks, so that long rows lose no accuracy.
template <typename A, typename Term>
inline A sum_of(int64_t count, Term&& term) {
  constexpr int kLanes = 16;
  A lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  for (; i < count; ++i) lanes[0] += term(i);
  return lanes[0];
}

// The largest x[i], i < count; NaN counts as missing.
template <typename A>
inline A max_of(int64_t count, const A* x) {
  constexpr int kLanes = 16;
  A lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<A>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  }
  for (; i < count; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  return *std::max_element(lanes, lanes + kLanes);
}

}  // namespace llmk::cpu
