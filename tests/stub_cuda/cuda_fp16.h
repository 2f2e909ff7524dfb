// float16 for kernels that run on the CPU, as cuda_bf16.h beside it. By way of double, whose sums and products of two
// such numbers are exact.
#pragma once
#include "gpu.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return x.bits >> 15 ? -magnitude : magnitude;
}
inline __half double_to_half(double x) {
  const auto sign = static_cast<uint16_t>(std::signbit(x) << 15);
  if (std::isnan(x)) return {0x7fff};
  x = std::fabs(x);
  if (x < 0x1p-14) return {static_cast<uint16_t>(sign | static_cast<int>(std::nearbyint(std::ldexp(x, 24))))};
  int exponent;
  const double mantissa = std::nearbyint(std::ldexp(std::frexp(min(x, 1e6), &exponent), 11));  // 1024 to 2048
  const int bits = (exponent + 13) * 1024 + static_cast<int>(mantissa);
  return {static_cast<uint16_t>(sign | min(bits, 31 << 10))};
}
inline __half __float2half_rn(float x) { return double_to_half(x); }
inline __half2 __floats2half2_rn(float a, float b) { return {double_to_half(a), double_to_half(b)}; }
inline __half2 __hmul2_rn(__half2 a, __half2 b) {
  return {double_to_half(static_cast<double>(__half2float(a.x)) * __half2float(b.x)),
          double_to_half(static_cast<double>(__half2float(a.y)) * __half2float(b.y))};
}
inline __half2 __hadd2_rn(__half2 a, __half2 b) {
  return {double_to_half(static_cast<double>(__half2float(a.x)) + __half2float(b.x)),
          double_to_half(static_cast<double>(__half2float(a.y)) + __half2float(b.y))};
}
