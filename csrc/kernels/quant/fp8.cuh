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
#pragma unroll
  for (int i = 0; i < N; ++i) most = max_nan(most, fabsf(x[i]));
  return most;
}

__device__ inline float warp_max_nan(float value, int threads) {
  return warp_reduce(value, threads, [](float a, float b) { return max_nan(a, b); });
}

// See group_reduce() on `shared`.
__device__ inline float group_max_nan(float value, const Group& group, float* shared) {
  return group_reduce(value, 0.f, group, shared, warp_max_nan);
}

template <int N>
struct alignas(N) Bytes {
  uint8_t data[N];
};

template <__nv_fp8_interpretation_t kKind, typename T, int N>
__device__ void store_as(const Vec<T, N>& x, float inverse, uint8_t* q) {
  Bytes<N> bytes;
  if constexpr (N == 1) {
    bytes.data[0] = __nv_cvt_float_to_fp8(__fmul_rn(x[0], inverse), __NV_SATFINITE, kKind);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = make_float2(__fmul_rn(x[i], inverse), __fmul_rn(x[i + 1], inverse));
      const __nv_fp8x2_storage_t both = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kKind);
      bytes.data[i] = static_cast<uint8_t>(both & 0xff);
      bytes.data[i + 1] = static_cast<uint8_t>(both >> 8);
    }
  }
  *reinterpret_cast<Bytes<N>*>(q) = bytes;
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
