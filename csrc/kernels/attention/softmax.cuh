// What the softmaxes of attention have in common. Scores are in units of log 2, so that exponentials are powers of two.
#pragma once
#include <cmath>

namespace llmk::kernels {

[[maybe_unused]] constexpr float kLog2E = 1.4426950408889634f;

// What is subtracted from scores: anything where there are none yet.
__device__ inline float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

}  // namespace llmk::kernels
