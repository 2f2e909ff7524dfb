// What the kernels of this folder share: the largest magnitude of a group, its scale, the conversion to FP8.
#pragma once
#include <cuda_fp8.h>

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/shifted.cuh"
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

template <int N>
using Fp8Vec = Vec<uint8_t, N>;

template <__nv_fp8_interpretation_t kKind, typename T, int N>
__device__ Fp8Vec<N> to_fp8_as(const Vec<T, N>& x, float inverse) {
  const auto pair = [&](int i) -> uint32_t {
    const float2 both = make_float2(__fmul_rn(x[i], inverse), __fmul_rn(x[i + 1], inverse));
    return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, kKind);
  };
  uint32_t words[N / 4];
#pragma unroll
  for (int i = 0; i < N; i += 4) words[i / 4] = pair(i) | pair(i + 2) << 16;
  return of_words<uint8_t, N>(words);
}

// x * inverse, rounded to nearest even; NaN stays NaN.
template <typename T, int N>
__device__ Fp8Vec<N> to_fp8(const Vec<T, N>& x, float inverse, Fp8Format format) {
  return format == Fp8Format::kE4M3 ? to_fp8_as<__NV_E4M3>(x, inverse) : to_fp8_as<__NV_E5M2>(x, inverse);
}

// Stores it at any multiple of N bytes.
template <typename T, int N>
__device__ void store_fp8(const Vec<T, N>& x, float inverse, const Fp8Output& out, int64_t offset) {
  to_fp8(x, inverse, out.format).assign_to(static_cast<uint8_t*>(out.q) + offset);
}

// Stores `count` bytes at any address, of which each of `lanes` neighbouring lanes has N:
//
//   lane      |0 1 2 3|4 5 6 7|8 9 . .|           of N = 4, here three lanes that have 10
//   memory    |. 0 1 2|3 4 5 6|7 8 9 .|           words; here `head` is 3
//
// A lane stores the word that begins in its vector, cut out of that and the next lane's; the first N lanes store the
// bytes in front of the first word, the next N those behind the last one. All lanes of the warp call it, and `lanes` is
// 2 N or more.
template <int N>
__device__ void store_shifted(const Fp8Vec<N>& own, uint8_t* q, int count, int lane, int lanes) {
  constexpr int kWords = N / 4;
  const int to_word = static_cast<int>(-reinterpret_cast<uintptr_t>(q) % N), head = min(to_word, count);
  const int end = head + (count - head) / N * N;  // of the words
  const int edge = lane < N ? lane : end + lane - N;
  uint32_t next[kWords], of_edge[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    next[i] = __shfl_down_sync(0xffffffffu, words_of(own)[i], 1, lanes);
    of_edge[i] = __shfl_sync(0xffffffffu, words_of(own)[i], edge / N, lanes);
  }
  const int begin = lane * N + head;
  if (begin < end) cut(own, of_words<uint8_t, N>(next), head).assign_to(q + begin);
  if (lane < N ? edge < head : edge < count && lane < 2 * N) {
    q[edge] = static_cast<uint8_t>(__byte_perm(of_edge[0], of_edge[kWords - 1], edge % N));
  }
}

__device__ inline float scale_of(float amax, const Fp8Output& out) {
  return fp8::scale_of(amax, out.format, out.power_of_two);
}

__device__ inline float* scale_at(const Fp8Output& out, int64_t row, int64_t group) {
  return out.scale + row * out.scale_row_stride + group * out.scale_group_stride;
}

}  // namespace llmk::kernels::quant
