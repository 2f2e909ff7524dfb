// The SwiGLU epilogue of a linear with gate and up rows.
#pragma once
#include "device/vec.cuh"

namespace llmk {

// silu(gate) up of float32 sums, by an approximate exponential. Rounds as eager PyTorch: gate and up, then silu; the
// product is rounded by the store.
template <typename T>
__device__ inline float swiglu(float gate_sum, float up_sum) {
  const auto rounded = [](float x) { return to_float(from_float<T>(x)); };
  const float gate = rounded(gate_sum);
  return rounded(gate / (1.f + __expf(-gate))) * rounded(up_sum);
}

}  // namespace llmk
