// How the kernels of linears read the elements of a weight: a struct for each type, which is a template argument of the
// kernel and an argument of its launch. A new type is such a struct, in a file of its own, and a line of
// dispatch_weight().
//
//   kBytes             of an element
//   Eight              eight neighbours as they lie in memory; eight[i] is one of them as a float
//   to_pairs<T>()      the same as four registers of pairs of T, the type of x, as mma.sync takes them
//   scale(row)         what the sum of that row is multiplied by
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/vec.cuh"
#include "params/weight.h"
#include "weight_int8.cuh"

namespace llmk::kernels {

// Elements of the type of x, 16 bits.
template <typename T>
struct Unquantized {
  static constexpr int kBytes = sizeof(T);
  using Eight = Vec<T, 8>;

  template <typename>
  __device__ static void to_pairs(const Eight& eight, uint32_t (&pairs)[4]) {
    const auto& words = reinterpret_cast<const uint4&>(eight);
    pairs[0] = words.x, pairs[1] = words.y, pairs[2] = words.z, pairs[3] = words.w;
  }
  __device__ static constexpr float scale(int64_t) { return 1.f; }
};

// Calls body(element) with the struct of the weight's type; T is the type of x.
template <typename T, typename Body>
cudaError_t dispatch_weight(const Weight& weight, const Body& body) {
  switch (weight.type) {
    case ElementType::kInt8: return body(Int8{weight.scales});
    default: return body(Unquantized<T>{});
  }
}

}  // namespace llmk::kernels
