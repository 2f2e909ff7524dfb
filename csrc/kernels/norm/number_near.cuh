// A number near all of a row, which a LayerNorm subtracts before the mean is known: the mean of the row's first 32
// elements. So one reduction gives the mean and the variance.
//
// The mean of k elements is at most sqrt(elements / k) standard deviations from that of the row. So, of 16 bits, what
// cancels costs the variance of the longest row no more digits than scale_of_row() does. (The mean of 32 equal numbers
// is exact.) In float32 it would show, and there is a second reduction, of the differences to the mean.
#pragma once
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace llmk::kernels::norm {

// `lanes`: of a group, up to a warp, each with the element of its number; a power of two.
template <typename T>
__device__ float number_near(const Vec<T, 1>& element_of_lane, int lanes = 32) {
  return warp_sum(element_of_lane[0] * (1.f / static_cast<float>(lanes)), lanes);
}

}  // namespace llmk::kernels::norm
