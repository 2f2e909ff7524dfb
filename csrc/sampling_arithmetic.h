// The arithmetic of sampling, bitwise the same on the CPU and on the GPU, so that both draw the same token.
//
// Logits are compared by keys: unsigned integers in the same order as the floats. Probabilities are integers too: the
// weight of a logit is 2^42 exp((logit - max) / temperature), rounded down. So sums are exact in any order, and
// histograms built by atomic additions are deterministic.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define LLMK_ANYWHERE __host__ __device__ __forceinline__
#else
#define LLMK_ANYWHERE inline
#endif

namespace llmk::sampling {

constexpr int kWeightBits = 42;
constexpr uint64_t kMaxWeight = uint64_t{1} << kWeightBits;
constexpr int64_t kMaxVocab = int64_t{1} << 21;  // their weights add up to less than 2^63

// The low bits of the random state's second word are its offset. While a GPU kernel runs, the bits above count the
// rows that are done.
constexpr int kOffsetBits = 44;
constexpr int64_t kOffsetMask = (int64_t{1} << kOffsetBits) - 1;
constexpr int64_t kMaxRows = (int64_t{1} << (63 - kOffsetBits)) - 1;

// Each operation rounds once: the compiler must not contract them.
LLMK_ANYWHERE float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
LLMK_ANYWHERE float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
LLMK_ANYWHERE float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
LLMK_ANYWHERE float multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
// The semantics of PTX's max and min: NaN only if both are.
LLMK_ANYWHERE float larger(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}
LLMK_ANYWHERE float smaller(float a, float b) {
#ifdef __CUDA_ARCH__
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}

LLMK_ANYWHERE uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
LLMK_ANYWHERE float float_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Larger for larger floats; x must be neither NaN nor -0.
LLMK_ANYWHERE uint32_t key_of(float x) {
  const uint32_t bits = float_bits(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
LLMK_ANYWHERE float value_of(uint32_t key) { return float_from_bits(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }
constexpr uint32_t kNoKey = 0x007fffffu;  // the key of -inf; such a token is never drawn

// Replaces NaN by -inf, inf by the largest finite number, and -0 by 0.
LLMK_ANYWHERE float sanitize(float x, float largest = 3.40282347e38f) {
  return add(smaller(larger(x, -INFINITY), largest), 0.f);
}

// A positive repetition penalty. The division of positive logits is a multiplication by 1 / penalty.
struct Penalty {
  float for_positive, for_negative;

  Penalty() = default;
  LLMK_ANYWHERE explicit Penalty(float penalty) : for_positive(divide(1.f, penalty)), for_negative(penalty) {}
  LLMK_ANYWHERE float operator()(float x) const { return sanitize(mul(x, x > 0.f ? for_positive : for_negative)); }
};

// How far a logit lies below the largest one: log2 of the ratio of their probabilities. From 63 on it has no weight.
constexpr float kMaxDistance = 63.f;
struct Distance {
  float max, scale;

  Distance() = default;
  LLMK_ANYWHERE Distance(float max, float temperature)
      : max(max), scale(smaller(divide(1.44269504f, temperature), 1e38f)) {}
  LLMK_ANYWHERE float operator()(float x) const { return smaller(mul(add(max, -x), scale), kMaxDistance); }
};

// Adding 2^23 to a small float rounds it to an integer, which is then in its low bits.
constexpr float kShifter = 8388608.f;
constexpr uint32_t kShifterBits = 0x4b000000u;

// Histogram bins of the distance, 32 per power of two.
constexpr int kBins = 2048, kLastBin = static_cast<int>(kMaxDistance) * 32;  // the bin of kMaxDistance
LLMK_ANYWHERE int bin_of(float distance) {
  return static_cast<int>(float_bits(multiply_add(distance, 32.f, kShifter)) - kShifterBits);
}

// 2^(42 - distance), rounded down, for distances from 0 to kMaxDistance.
LLMK_ANYWHERE uint64_t weight_of(float distance) {
  const float shifted = add(distance, kShifter);
  const float f = add(add(shifted, -kShifter), -distance);  // at most 1/2
  // 2^f to 1e-7 by a minimax polynomial that is exact at 0; between 0.707 and 1.415.
  float power = 1.32647269e-03f;
  power = multiply_add(power, f, 9.67151291e-03f);
  power = multiply_add(power, f, 5.55073375e-02f);
  power = multiply_add(power, f, 2.40222421e-01f);
  power = multiply_add(power, f, 6.93146978e-01f);
  power = multiply_add(power, f, 1.f);
  const uint64_t mantissa = float_bits(add(power, 2.f)) - 0x40000000u;  // 22 fractional bits
  return (mantissa << (kWeightBits - 22)) >> (float_bits(shifted) - kShifterBits);
}

// The weight that the most probable tokens must reach for top-p; at least 1.
LLMK_ANYWHERE uint64_t top_p_target(float top_p, uint64_t total) {
  const double target = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return target < 1.0 ? 1 : static_cast<uint64_t>(target) < total ? static_cast<uint64_t>(target) : total;
}

// The least weight that min-p keeps.
LLMK_ANYWHERE uint64_t min_p_weight(float min_p) {
  if (!(min_p > 0.f)) return 1;
  if (min_p >= 1.f) return kMaxWeight;
  const double least = ceil(static_cast<double>(min_p) * static_cast<double>(kMaxWeight));
  return least < 1.0 ? 1 : static_cast<uint64_t>(least);
}

LLMK_ANYWHERE uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// 64 random bits for a row of a call: Philox 4x32-10 (Salmon et al. 2011) with the seed as the key and the counter
// (offset, row).
LLMK_ANYWHERE uint64_t random_bits(uint64_t seed, uint64_t offset, uint64_t row) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(offset), c1 = static_cast<uint32_t>(offset >> 32);
  uint32_t c2 = static_cast<uint32_t>(row), c3 = static_cast<uint32_t>(row >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xd2511f53u} * c0, product1 = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return uint64_t{c1} << 32 | c0;
}

}  // namespace llmk::sampling
