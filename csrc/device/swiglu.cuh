// The activation behind a linear of gate and up rows.
#pragma once
#include "device/vec.cuh"

namespace llmk {

// silu(gate) up of sums in float32, by an approximate exponential, with the roundings of eager PyTorch: of gate and up,
// of silu, and of the product, which is left to who stores it.
template <typename T>
__device__ inline float swiglu(float gate_sum, float up_sum) {
  const auto rounded = [](float x) { return to_float(from_float<T>(x)); };
  const float gate = rounded(gate_sum);
  return rounded(gate / (1.f + __expf(-gate))) * rounded(up_sum);
}

}  // namespace llmk
