// The last steps of a linear, the same after every main loop: a gated activation, or the residual add, from sums in
// float32. They round where eager PyTorch does.
#pragma once
#include "device/vec.cuh"
#include "kernels/activation/activation.cuh"

namespace llmk::kernels {

// act(gate) up: rounds gate and up, then act(gate); the product is rounded by the store.
template <typename Act, typename T>
__device__ float glu_of_sums(float gate_sum, float up_sum) {
  const auto rounded = [](float x) { return to_float(from_float<T>(x)); };
  return rounded(Act::template near<T>(rounded(gate_sum))) * rounded(up_sum);
}

// residual + alpha y: rounds alpha y, then the sum.
template <typename T, int N>
__device__ Vec<T, N> add_to_residual(const Vec<T, N>& residual, const Vec<T, N>& y, float alpha) {
  return add(residual, Vec<T, N>::of([&](int e) { return alpha * y[e]; }));
}

}  // namespace llmk::kernels
