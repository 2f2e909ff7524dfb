// What the kernels of this folder share: the largest magnitude of a group, its scale, the conversion to FP8.
#pragma once
#include <cuda_fp8.h>

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "fp8_arithmetic.h"
#include "params/fp8.h"

namespace llmk::kernels::quant {

// The larger of `most` and the magnitudes of x; NaN if there is one.
template <typename T, int N>
__device__ float max_magnitude(const Vec<T, N>& x, float most) {
  if constexpr (Vec<T, N>::kPaired) {
    auto pair = __habs2(x.pair(0));
#pragma unroll
    for (int i = 2; i < N; i += 2) pair = __hmax2_nan(pair, __habs2(x.pair(i)));
    return max_nan(most, max_nan(to_float(pair.x), to_float(pair.y)));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) most = max_nan(most, fabsf(x[i]));
    return most;
  }
}

// 1 / scale, rounded once, for a scale of scale_of().
__device__ inline float inverse_of(float scale) {
  const float inverse = reciprocal_approximate(scale);
  const float corrected = __fmaf_rn(__fmaf_rn(-scale, inverse, 1.f), inverse, inverse);
  return scale < INFINITY ? corrected : inverse;  // 0 or NaN
}

__device__ inline float warp_max_nan(float value, int threads) {
  return warp_reduce(value, threads, [](float a, float b) { return max_nan(a, b); });
}

// See group_reduce() on `shared`.
__device__ inline float group_max_nan(float value, const Group& group, float* shared) {
  return group_reduce(value, 0.f, group, shared, warp_max_nan);
}

template <__nv_fp8_interpretation_t kKind, typename T, int N>
__device__ void store_as(const Vec<T, N>& x, float inverse, uint8_t* q) {
  if constexpr (N == 1) {
    *q = __nv_cvt_float_to_fp8(__fmul_rn(x[0], inverse), __NV_SATFINITE, kKind);
  } else {
    const auto pair = [&](int i) -> uint32_t {
      const float2 both = make_float2(__fmul_rn(x[i], inverse), __fmul_rn(x[i + 1], inverse));
      return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, kKind);
    };
    uint32_t words[N / 4];
#pragma unroll
    for (int i = 0; i < N; i += 4) words[i / 4] = pair(i) | pair(i + 2) << 16;
    using Raw = typename Word<N>::type;
    *reinterpret_cast<Raw*>(q) = *reinterpret_cast<const Raw*>(words);
  }
}

// Writes x * inverse, rounded to nearest even; NaN stays NaN.
template <typename T, int N>
__device__ void store_fp8(const Vec<T, N>& x, float inverse, Fp8Format format, void* q, int64_t offset) {
  uint8_t* const target = static_cast<uint8_t*>(q) + offset;
  if (format == Fp8Format::kE4M3) {
    store_as<__NV_E4M3>(x, inverse, target);
  } else {
    store_as<__NV_E5M2>(x, inverse, target);
  }
}

__device__ inline float scale_of(float amax, const Fp8Output& out) {
  return fp8::scale_of(amax, out.format, out.power_of_two);
}

__device__ inline float* scale_at(const Fp8Output& out, int64_t row, int64_t group) {
  return out.scale + row * out.scale_row_stride + group * out.scale_group_stride;
}

}  // namespace llmk::kernels::quant
