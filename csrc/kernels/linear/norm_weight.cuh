// What the kernels of linears share of an RMSNorm: its weight in float16, and 1 / rms.
//
// In float16 x times the weight might overflow. There the weight is divided by a power of two, norm_weight_scale(), so
// that all of it is less than 1, and the sums are multiplied by it again. The error of this is less than 2^-24 of the
// largest weight.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/vec.cuh"

namespace llmk::kernels {

// The bits of the largest magnitude in a weight of float16: of its vectors of 8 first, first + step, ... up to `count`.
__device__ inline uint32_t largest_of_weight(const void* weight, int count, int first, int step) {
  uint32_t largest = 0;
  for (int i = first; i < count; i += step) {
    const auto w = Vec<__half, 8>::load(static_cast<const __half*>(weight) + int64_t{i} * 8);
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = max(largest, __half_as_ushort(w.data[e]) & 0x7fffu);
  }
  return largest;
}

// The power of two that the weight is divided by: the smallest one greater than all of it. `largest`: the bits of its
// largest magnitude, which bfloat16 does without.
template <typename T>
__device__ float norm_weight_scale(uint32_t largest) {
  if constexpr (!std::is_same_v<T, __half>) return 1.f;
  const int exponent = max(static_cast<int>(largest >> 10), 1) - 14;
  return __int_as_float((127 + exponent) << 23);
}

// 1 / rms of a row, from the sum of its squares.
__device__ inline float rstd_of(float squares, float inverse_cols, float eps) {
  return rsqrtf(squares * inverse_cols + eps);
}

}  // namespace llmk::kernels
