// The element types that kernels are instantiated for.
#pragma once

namespace llmk {

enum class Dtype { kFloat32, kFloat16, kBFloat16, kFloat64 };  // float64: on the CPU only

template <typename T>
struct TypeTag {
  using type = T;
};

}  // namespace llmk
