// The weight of a linear. Plain host code.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace llmk {

// The types of a weight's elements: those of x, and quantized ones.
enum class ElementType { kFloat32, kFloat16, kBFloat16, kFloat64, kInt8 };

constexpr ElementType element_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return ElementType::kFloat32;
    case Dtype::kFloat16: return ElementType::kFloat16;
    case Dtype::kBFloat16: return ElementType::kBFloat16;
    case Dtype::kFloat64: break;
  }
  return ElementType::kFloat64;
}

constexpr int element_bits(ElementType type) {
  switch (type) {
    case ElementType::kFloat32: return 32;
    case ElementType::kFloat16:
    case ElementType::kBFloat16: return 16;
    case ElementType::kInt8: return 8;
    case ElementType::kFloat64: break;
  }
  return 64;
}

constexpr int64_t bytes_of(ElementType type, int64_t elements) { return elements * element_bits(type) / 8; }

constexpr bool is_quantized(ElementType type) { return type == ElementType::kInt8; }

// Rows of contiguous columns.
struct Weight {
  const void* data;
  ElementType type;
  int64_t rows, cols;
  int64_t stride;                 // elements between rows
  const float* scales = nullptr;  // [rows], contiguous: an element stands for itself times that of its row; or null

  int64_t bytes(int64_t elements) const { return bytes_of(type, elements); }
  int64_t row_bytes() const { return bytes(stride); }  // from row to row
};

}  // namespace llmk
