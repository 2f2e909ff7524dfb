// What device/divide.cuh needs of the instructions, for tests on machines without a GPU.
#pragma once

namespace llmk {

inline float reciprocal_approximate(float x) { return 1.f / x; }

}  // namespace llmk
