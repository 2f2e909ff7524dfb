// RMSNorm of a head, as in kernels/rope/rms_norm_rope.cu: with r = rounding to the dtype, n = x / sqrt(mean(x^2) +
// eps), m = r(n) with cast_before_weight, else n,
//   y = r(m (offset + weight))
// bitwise equal to it where the sum of squares is exact. A head is spread over neighbouring lanes of a warp, a power of
// two of them: each adds up the squares that it has, warp_sum() those of all.
#pragma once
#include <cstdint>

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "params/norm.h"

namespace llmk::kernels {

// Without a choice for the compiler, so that all kernels get the same bits.
template <typename T, int N>
__device__ float add_squares(float sum, const Vec<T, N>& low, const Vec<T, N>& high) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum = __fadd_rn(sum, __fmaf_rn(low[i], low[i], __fmul_rn(high[i], high[i])));
  return sum;
}

__device__ inline float reciprocal_rms(float squares, int head_dim, const RmsNormOptions& options) {
  return rsqrtf(squares * (1.f / static_cast<float>(head_dim)) + static_cast<float>(options.eps));
}

template <typename T, int N>
__device__ Vec<T, N> normalize(const Vec<T, N>& x, float rstd, const Vec<T, N>& weight, const RmsNormOptions& options) {
  using V = Vec<T, N>;
  const float offset = static_cast<float>(options.weight_offset);
  const V n = V::of([&](int i) { return x[i] * rstd; });
  return V::of([&](int i) { return (options.cast_before_weight ? n[i] : x[i] * rstd) * (offset + weight[i]); });
}

}  // namespace llmk::kernels
