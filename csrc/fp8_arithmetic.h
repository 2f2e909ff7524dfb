// The arithmetic of FP8 quantization, bitwise the same on the CPU and on the GPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "dtype.h"
#include "sampling_arithmetic.h"

namespace llmk::fp8 {

constexpr int64_t kBlock = 128;  // elements of a row that share a scale, where the scales are per block

LLMK_ANYWHERE int64_t groups_per_row(int64_t cols, int64_t group) { return (cols + group - 1) / group; }

// The largest finite number.
LLMK_ANYWHERE constexpr float max_of(Fp8Format format) { return format == Fp8Format::kE4M3 ? 448.f : 57344.f; }

// amax / max_of(format), rounded once. On the GPU by the reciprocal, with the rest added in: correct for every amax
// whose quotient is a normal number, without the branches of a division.
LLMK_ANYWHERE float over_max(float amax, Fp8Format format) {
  const float max = max_of(format);
#ifdef __CUDA_ARCH__
  const float inverse = 1.f / max, quotient = __fmul_rn(amax, inverse);
  const float corrected = __fmaf_rn(__fmaf_rn(-quotient, max, amax), inverse, quotient);
  return quotient < INFINITY ? corrected : quotient;
#else
  return amax / max;
#endif
}

// The scale of elements of which the largest magnitude is `amax`: amax / max, at least the smallest normal number, so
// that zeros have one, too, and its reciprocal is finite. Rounded up to a power of two on request. An infinite or NaN
// `amax` is returned as it is.
LLMK_ANYWHERE float scale_of(float amax, Fp8Format format, bool power_of_two) {
  constexpr float kSmallest = 0x1p-126f;
  const float quotient = over_max(amax, format);
  const float scale = quotient < kSmallest ? kSmallest : quotient;  // NaN stays NaN
  if (!power_of_two || !(scale < INFINITY)) return scale;
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof(bits));
  bits = (bits + 0x007fffffu) & 0xff800000u;
  float rounded;
  std::memcpy(&rounded, &bits, sizeof(rounded));
  return rounded;
}

}  // namespace llmk::fp8
