#include "overlap.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace llmk {
namespace {

using torch::stable::Tensor;

constexpr int kMaxSteps = 1 << 14;  // of a search

// The distance of two addresses along one dimension: `step` bytes times a number from `low` to `high`.
struct Distance {
  int64_t step, low, high;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// Whether `sum` plus one value of each distance from `first` on can be 0. The largest steps come first. The later
// distances usually add up to less than one step, so that there are one or two numbers per dimension to try.
bool reaches_zero(const std::vector<Distance>& distances, size_t first, int64_t sum, int& steps) {
  if (first == distances.size()) return sum == 0;
  if (--steps < 0) return true;
  int64_t low = sum, high = sum;
  for (size_t i = first + 1; i < distances.size(); ++i) {
    low += distances[i].step * distances[i].low;
    high += distances[i].step * distances[i].high;
  }
  const auto [step, least, most] = distances[first];
  const int64_t end = std::min(most, floor_div(-low, step));
  for (int64_t n = std::max(least, -floor_div(high, step)); n <= end; ++n) {
    if (reaches_zero(distances, first + 1, sum + step * n, steps)) return true;
  }
  return false;
}

// The dimensions with more than one address; steps in bytes.
std::vector<Distance> dimensions(const Tensor& tensor, bool backwards) {
  std::vector<Distance> result;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 1 || strides[i] == 0) continue;
    const int64_t last = sizes[i] - 1;
    result.push_back(
        {strides[i] * static_cast<int64_t>(tensor.element_size()), backwards ? -last : 0, backwards ? 0 : last});
  }
  return result;
}

void sort_by_step(std::vector<Distance>& distances) {
  std::sort(distances.begin(), distances.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
}

}  // namespace

int64_t extent_bytes(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) elements += (sizes[i] - 1) * strides[i];
  return elements * static_cast<int64_t>(tensor.element_size());
}

bool overlaps_itself(const Tensor& tensor) {
  if (tensor.numel() <= 1) return false;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] == 0) return true;
  }
  std::vector<Distance> distances = dimensions(tensor, false);
  sort_by_step(distances);
  // For two different elements, `i` is the first dimension in which they differ.
  int steps = kMaxSteps;
  for (Distance& distance : distances) distance.low = -distance.high;
  for (size_t i = 0; i < distances.size(); ++i) {
    distances[i].low = 1;
    if (reaches_zero(distances, i, 0, steps)) return true;
  }
  return false;
}

bool overlap(const Tensor& a, const Tensor& b) {
  const int64_t apart = static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  std::vector<Distance> distances = dimensions(a, false);
  for (const Distance& distance : dimensions(b, true)) {
    const auto same = std::find_if(distances.begin(), distances.end(),
                                   [&](const Distance& other) { return other.step == distance.step; });
    if (same == distances.end()) {
      distances.push_back(distance);
    } else {
      same->low += distance.low;
    }
  }
  // The byte of an element.
  distances.push_back({1, 1 - static_cast<int64_t>(b.element_size()), static_cast<int64_t>(a.element_size()) - 1});
  sort_by_step(distances);
  int steps = kMaxSteps;
  return reaches_zero(distances, 0, -apart, steps);
}

}  // namespace llmk
