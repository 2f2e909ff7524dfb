// Online softmax in base 2: scores are multiplied by log2(e), so that e^x becomes 2^x.
#pragma once
#include <cmath>

namespace llmk::kernels {

[[maybe_unused]] constexpr float kLog2E = 1.4426950408889634f;

// The maximum that is subtracted from scores; 0 where there is no score yet, since -inf - -inf is NaN.
__device__ inline float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

}  // namespace llmk::kernels
