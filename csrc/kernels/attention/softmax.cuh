// What the attention kernels make of a product of query and key, and their softmax in the making.
#pragma once
#include <cmath>

#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "params/attention.h"

namespace llmk::kernels {

[[maybe_unused]] constexpr float kLog2E = 1.4426950408889634f;

// What an unfinished softmax is made of: the maximum of the scores (in units of log 2), and the sum of 2^(s - maximum).
struct alignas(8) Softmax {
  float maximum, sum;
};

// What is subtracted from scores: anything where there are none yet.
__device__ inline float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// From the product to the score.
struct Scoring {
  float scale, cap, cap_scale;  // in units of log 2; cap 0: none

  __device__ explicit Scoring(const DecodeAttentionParams& params)
      : scale(static_cast<float>(params.scale) * kLog2E),
        cap(static_cast<float>(params.softcap) * kLog2E),
        cap_scale(params.softcap > 0 ? static_cast<float>(params.scale / params.softcap) * 2 * kLog2E : 0.f) {}

  __device__ float operator()(float product) const {
    if (cap <= 0) return product * scale;
    // tanh(x) = 1 - 2 / (1 + e^2x)
    return cap - 2 * cap * reciprocal_approximate(1.f + exp2_approximate(product * cap_scale));
  }
};

}  // namespace llmk::kernels
