// RMSNorm of a head, or of all heads of a token together, as in kernels/rope/rms_norm_rope.cu: with r = rounding to the
// dtype, n = x / sqrt(mean(x^2) + eps), m = r(n) with cast_before_weight, else n,
//   y = r(m (offset + weight))
// bitwise equal to it where the sum of squares is exact.
//
//   norm of  spread over                                    sum of squares
//   a head   neighbouring lanes of a warp, a power of two   add_squares() by each, then warp_sum()
//   a row    kRowThreads threads                            warp_squares() by each warp, then row_squares()
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

// Of every kernel, so that all get the same bits.
constexpr int kRowThreads = 128;

// The sum of what this warp has of a row, whose heads lie head_stride apart: each thread has every kRowThreads-th
// vector. For the first kRowThreads threads of a block.
template <typename T, int N>
__device__ float warp_squares(const T* row, int64_t head_stride, unsigned heads, unsigned head_dim) {
  const unsigned vectors = head_dim / N;
  float sum = 0.f;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < heads * vectors; i += kRowThreads) {
    const unsigned head = i / vectors;
    const auto x = Vec<T, N>::load(row + head * head_stride + (i - head * vectors) * N);
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < N; ++j) squares = __fmaf_rn(x[j], x[j], squares);
    sum = __fadd_rn(sum, squares);
  }
  return warp_sum(sum, 32);
}

// The sums of all warps, which lie `stride` apart, behind a barrier.
__device__ inline float row_squares(const float* of_warps, int stride) {
  static_assert(kRowThreads == 4 * 32);
  return __fadd_rn(__fadd_rn(of_warps[0], of_warps[stride]), __fadd_rn(of_warps[2 * stride], of_warps[3 * stride]));
}

__device__ inline float reciprocal_rms(float squares, int cols, const RmsNormOptions& options) {
  return rsqrtf(squares * (1.f / static_cast<float>(cols)) + static_cast<float>(options.eps));
}

template <typename T, int N>
__device__ Vec<T, N> normalize(const Vec<T, N>& x, float rstd, const Vec<T, N>& weight, const RmsNormOptions& options) {
  using V = Vec<T, N>;
  const float offset = static_cast<float>(options.weight_offset);
  const V n = V::of([&](int i) { return x[i] * rstd; });
  return V::of([&](int i) { return (options.cast_before_weight ? n[i] : x[i] * rstd) * (offset + weight[i]); });
}

}  // namespace llmk::kernels
