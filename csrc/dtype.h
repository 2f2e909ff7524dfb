// The element types that kernels are instantiated for.
#pragma once

namespace llmk {

enum class Dtype { kFloat32, kFloat16, kBFloat16, kFloat64 };  // float64: on the CPU only

constexpr int kHalfBytes = 2;  // of an element of float16 or bfloat16

// The results of a quantization: 4 bits of exponent and 3 of mantissa, without infinities, or 5 and 2. No kernel is
// instantiated for them: they are bytes to all but csrc/fp8_arithmetic.h.
enum class Fp8Format { kE4M3, kE5M2 };

template <typename T>
struct TypeTag {
  using type = T;
};

}  // namespace llmk
