// What every CPU kernel needs: conversion of elements to and from the type computed in, without branches, so that the
// compiler vectorises the loops around it; the dtype dispatch; one compilation per instruction set.
//
// A kernel processes its elements in blocks:
//
//   const LoopType<T>* x = load(source, count, buffer);    // `source` itself; float16: a converted copy in the buffer
//   LoopType<T>* y = output_buffer(target, other_buffer);  // `target` itself; float16: the buffer
//   for (int64_t i = 0; i < count; ++i) y[i] = narrow<T>(f(widen(x[i])));
//   store(y, count, target);                               // nothing; float16: converts the buffer
//
// float16 goes through buffers because compilers do not use the conversion instruction in such a loop, and without it a
// conversion takes a dozen instructions. The arithmetic is the same on every instruction set (build with
// -ffp-contract=off), and so are the results.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmk::cpu {

// A kernel is compiled once per instruction set, with all that it calls inlined. The best version that the processor
// supports runs. (GCC's target_clones would do the same, but supports these instruction sets only from GCC 12 on.)
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };  // on x86: x86-64, x86-64-v3, x86-64-v4

#if defined(__x86_64__)
#define LLMK_AVX2 __attribute__((target("arch=x86-64-v3"), flatten))
#define LLMK_AVX512 __attribute__((target("arch=x86-64-v4"), flatten))

inline InstructionSet best_instruction_set() {
  // Every processor that has these also has the rest of the level, such as F16C.
  static const InstructionSet best = [] {
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return !avx2 ? InstructionSet::kBaseline : avx512 ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
  }();
  return best;
}
#else
#define LLMK_AVX2
#define LLMK_AVX512

inline InstructionSet best_instruction_set() { return InstructionSet::kBaseline; }
#endif

template <typename Body>
__attribute__((flatten)) void run_baseline(const Body& body) {
  body();
}
template <typename Body>
LLMK_AVX2 void run_avx2(const Body& body) {
  body();
}
template <typename Body>
LLMK_AVX512 void run_avx512(const Body& body) {
  body();
}

// Calls body(). It should pass what its loops read by value: the compiler cannot know that a capture does not change.
template <typename Body>
inline void dispatch_instruction_set(const Body& body) {
  switch (best_instruction_set()) {
    case InstructionSet::kBaseline: return run_baseline(body);
    case InstructionSet::kAvx2: return run_avx2(body);
    case InstructionSet::kAvx512: return run_avx512(body);
  }
}

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type that T is computed in, and the type that loops read and write: that of the buffers for float16.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <typename T>
using LoopType = std::conditional_t<std::is_same_v<T, Half>, float, T>;

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest even; for float16 store() does.
template <typename T>
inline LoopType<T> narrow(Wide<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    // A NaN stays NaN: its low half is 0, since it comes from another bfloat16 or from an invalid operation.
    const uint32_t bits = bit_cast<uint32_t>(x);
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  } else {
    return x;
  }
}

// x rounded to T.
template <typename T>
inline Wide<T> rounded(Wide<T> x) {
  if constexpr (std::is_same_v<T, Half>) {
    // Adding 1.5 * 2^(e + 13) to a number of exponent e shifts out the bits that float16 lacks: those below 2^(e - 10),
    // or 2^-24 for subnormals. The multiplications turn 65536 and more into infinity.
    const int32_t bits = bit_cast<int32_t>(x);
    const int32_t exponent = std::min(std::max(bits & 0x7f800000, 0x38800000), 0x47800000);  // from 2^-14 to 2^16
    const float shifter = bit_cast<float>(exponent + 0x06c00000);
    const float nearest = ((x + shifter) - shifter) * 0x1p112f * 0x1p-112f;
    return bit_cast<float>(bit_cast<int32_t>(nearest) | (bits & INT32_MIN));  // keeps the sign of zero
  } else {
    return widen(narrow<T>(x));
  }
}

inline float half_to_float(Half x) {
  // An addition rebiases the exponent, by twice as much for inf and NaN. The bits of a subnormal become the mantissa of
  // a number from 2^-14 on, and 2^-14 is subtracted. So no step has a float32 subnormal, which is slow and may be
  // flushed to zero.
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const uint32_t bias = magnitude >= 0x0f800000u ? 0x70000000u : 0x38000000u;
  const float normal = bit_cast<float>(magnitude + bias);
  const float subnormal = bit_cast<float>(magnitude + 0x38800000u) - 0x1p-14f;
  const float value = magnitude < 0x00800000u ? subnormal : normal;
  return bit_cast<float>(bit_cast<uint32_t>(value) | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}

inline Half float_to_half(float x) {
  // After rounding, the exponent of a normal result is rebiased; adding 0.5 aligns the bits of a subnormal one.
  const uint32_t bits = bit_cast<uint32_t>(rounded<Half>(x)), magnitude = bits & 0x7fffffffu;
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : (magnitude - 0x38000000u) >> 13;
  half = magnitude >= 0x7f800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return {static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u))};
}

// Converts elements by F16C instructions, eight at a time, as far as that goes; returns how many.
#if defined(__x86_64__)
inline bool has_f16c() { return best_instruction_set() != InstructionSet::kBaseline; }

__attribute__((target("avx,f16c"))) inline int64_t widen_f16c(const Half* source, int64_t count, float* target) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
  }
  return i;
}
__attribute__((target("avx,f16c"))) inline int64_t narrow_f16c(const float* source, int64_t count, Half* target) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), halves);
  }
  return i;
}
#else
inline bool has_f16c() { return false; }
inline int64_t widen_f16c(const Half*, int64_t, float*) { return 0; }
inline int64_t narrow_f16c(const float*, int64_t, Half*) { return 0; }
#endif

// Not inlined: that would put a copy into every loop of every version of a kernel.
__attribute__((noinline)) inline void widen_halves(const Half* source, int64_t count, float* target) {
  int64_t i = has_f16c() ? widen_f16c(source, count, target) : 0;
  for (; i < count; ++i) target[i] = half_to_float(source[i]);
}
__attribute__((noinline)) inline void narrow_halves(const float* source, int64_t count, Half* target) {
  int64_t i = has_f16c() ? narrow_f16c(source, count, target) : 0;
  for (; i < count; ++i) target[i] = float_to_half(source[i]);
}

// `count` elements to read: the source itself, or a converted copy in the buffer.
template <typename T>
inline const LoopType<T>* load(const T* source, int64_t count, [[maybe_unused]] LoopType<T>* buffer) {
  if constexpr (std::is_same_v<T, Half>) {
    widen_halves(source, count, buffer);
    return buffer;
  } else {
    return source;
  }
}

// Where to write the elements for store(): the target itself, or the buffer.
template <typename T>
inline LoopType<T>* output_buffer([[maybe_unused]] T* target, [[maybe_unused]] LoopType<T>* buffer) {
  if constexpr (std::is_same_v<T, Half>) {
    return buffer;
  } else {
    return target;
  }
}

template <typename T>
inline void store([[maybe_unused]] const LoopType<T>* output, [[maybe_unused]] int64_t count,
                  [[maybe_unused]] T* target) {
  if constexpr (std::is_same_v<T, Half>) narrow_halves(output, count, target);
}

// Calls body(begin, count) for the blocks of [0, size).
template <int64_t kBlock, typename Body>
inline void for_blocks(int64_t size, Body&& body) {
  for (int64_t begin = 0; begin < size; begin += kBlock) body(begin, std::min(kBlock, size - begin));
}

// Calls body(TypeTag<T>{}) with the CPU type of `dtype`.
template <typename Body>
inline void dispatch_dtype(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::kFloat32: return body(TypeTag<float>{});
    case Dtype::kFloat16: return body(TypeTag<Half>{});
    case Dtype::kBFloat16: return body(TypeTag<BFloat16>{});
    case Dtype::kFloat64: return body(TypeTag<double>{});
  }
}

// The same, compiled for the best instruction set: every kernel begins here.
template <typename Body>
inline void dispatch_kernel(Dtype dtype, const Body& body) {
  dispatch_instruction_set([&] { dispatch_dtype(dtype, body); });
}

}  // namespace llmk::cpu
