// What device/mma.cuh has besides tensor cores, for kernels that run on the CPU.
#pragma once
#include <cmath>

namespace llmk {

inline float exp2_approximate(float x) { return std::exp2(x); }

}  // namespace llmk
