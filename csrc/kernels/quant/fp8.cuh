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

// Of several vectors.
template <typename T, int N, int kCount>
__device__ float max_magnitude(const Vec<T, N> (&x)[kCount]) {
  if constexpr (Vec<T, N>::kPaired) {
    Vec<T, N> most;
#pragma unroll
    for (int i = 0; i < N; i += 2) most.pair(i) = __habs2(x[0].pair(i));
#pragma unroll
    for (int v = 1; v < kCount; ++v) {
#pragma unroll
      for (int i = 0; i < N; i += 2) most.pair(i) = __hmax2_nan(most.pair(i), __habs2(x[v].pair(i)));
    }
    return max_magnitude(most, 0.f);
  } else {
    float most = 0.f;
#pragma unroll
    for (int v = 0; v < kCount; ++v) most = max_magnitude(x[v], most);
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

// N elements of FP8.
template <int N>
struct alignas(N) Fp8Words {
  uint32_t data[N / 4];
};

// x * inverse, rounded to nearest even; NaN stays NaN.
template <__nv_fp8_interpretation_t kKind, typename T, int N>
__device__ Fp8Words<N> to_fp8_as(const Vec<T, N>& x, float inverse) {
  const auto pair = [&](int i) -> uint32_t {
    const float2 both = make_float2(__fmul_rn(x[i], inverse), __fmul_rn(x[i + 1], inverse));
    return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, kKind);
  };
  Fp8Words<N> q;
#pragma unroll
  for (int i = 0; i < N; i += 4) q.data[i / 4] = pair(i) | pair(i + 2) << 16;
  return q;
}
template <typename T, int N>
__device__ Fp8Words<N> to_fp8(const Vec<T, N>& x, float inverse, Fp8Format format) {
  return format == Fp8Format::kE4M3 ? to_fp8_as<__NV_E4M3>(x, inverse) : to_fp8_as<__NV_E5M2>(x, inverse);
}

// The same of one element, or of two, the first one in the low byte.
template <__nv_fp8_interpretation_t kKind, typename T, int N>
__device__ auto few_to_fp8(const Vec<T, N>& x, float inverse) {
  if constexpr (N == 1) {
    return __nv_cvt_float_to_fp8(__fmul_rn(x[0], inverse), __NV_SATFINITE, kKind);
  } else {
    static_assert(N == 2);
    const float2 both = make_float2(__fmul_rn(x[0], inverse), __fmul_rn(x[1], inverse));
    return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, kKind);
  }
}

template <__nv_fp8_interpretation_t kKind, typename T, int N>
__device__ void store_as(const Vec<T, N>& x, float inverse, uint8_t* q) {
  if constexpr (N == 1) {
    *q = few_to_fp8<kKind>(x, inverse);
  } else {
    using Raw = typename Word<N>::type;
    const Fp8Words<N> words = to_fp8_as<kKind>(x, inverse);
    *reinterpret_cast<Raw*>(q) = *reinterpret_cast<const Raw*>(&words);
  }
}

// Writes x * inverse in FP8, to an address that is a multiple of N.
template <typename T, int N>
__device__ void store_fp8(const Vec<T, N>& x, float inverse, Fp8Format format, void* q, int64_t offset) {
  uint8_t* const target = static_cast<uint8_t*>(q) + offset;
  if (format == Fp8Format::kE4M3) {
    store_as<__NV_E4M3>(x, inverse, target);
  } else {
    store_as<__NV_E5M2>(x, inverse, target);
  }
}

// Writes the elements that `lanes` lanes of a warp have, N bytes each and `count` in all, from any address on:
//
//   lane      |0 1 2 3|4 5 6 7|8 9 . .|           N = 4, three lanes that have 10
//   memory    |. 0 1 2|3 4 5 6|7 8 9 .|           words of N bytes; here `head` is 3
//
// A lane stores the word that begins in what it has, the end of which it gets from the next one. The first N lanes
// store the bytes in front of the first word, the next N those behind the last one. All lanes of the warp call it, and
// `lanes` is a power of two of at least 2 N.
template <int N>
__device__ void store_shifted(const Fp8Words<N>& own, uint8_t* q, int count, int lane, int lanes) {
  constexpr int kWords = N / 4;
  const int head = min(static_cast<int>(-reinterpret_cast<uintptr_t>(q) % N), count);
  const int end = head + (count - head) / N * N;  // of the words
  const int edge = lane < N ? lane : end + lane - N;
  uint32_t words[2 * kWords], of_edge = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = own.data[i];
    words[kWords + i] = __shfl_down_sync(0xffffffffu, own.data[i], 1, lanes);
    const uint32_t word = __shfl_sync(0xffffffffu, own.data[i], edge / N, lanes);
    if (edge % N / 4 == i) of_edge = word;
  }
  if (const int begin = lane * N + head; begin < end) {
    const auto from_head = [&](int i) { return head < 4 ? words[i] : words[min(i + 1, 2 * kWords - 1)]; };
    Fp8Words<N> whole;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      whole.data[i] = __funnelshift_r(from_head(i), from_head(i + 1), head % 4 * 8);
    }
    *reinterpret_cast<typename Word<N>::type*>(q + begin) = reinterpret_cast<const typename Word<N>::type&>(whole);
  }
  if (lane < N ? edge < head : edge < count && lane < 2 * N) q[edge] = static_cast<uint8_t>(of_edge >> edge % 4 * 8);
}

__device__ inline float scale_of(float amax, const Fp8Output& out) {
  return fp8::scale_of(amax, out.format, out.power_of_two);
}

__device__ inline float* scale_at(const Fp8Output& out, int64_t row, int64_t group) {
  return out.scale + row * out.scale_row_stride + group * out.scale_group_stride;
}

}  // namespace llmk::kernels::quant
