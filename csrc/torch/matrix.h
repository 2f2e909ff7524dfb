// Views of tensors as the operands of matrix products.
#pragma once
#include "binding.h"

namespace llmk {

// Rows of `tensor`, which lie `stride` elements apart and have contiguous columns.
inline Tensor matrix(const Tensor& tensor, int64_t rows, int64_t cols, int64_t stride, int64_t first_row = 0) {
  return view(tensor, {rows, cols}, {rows > 1 ? stride : cols, 1}, first_row * stride);
}

// All rows, in a copy where they lie at no constant distance.
inline Tensor matrix(const Tensor& tensor) {
  const Rows rows = as_rows(tensor);
  return matrix(rows.tensor, rows.rows, rows.cols, rows.stride);
}

inline Tensor transposed(const Tensor& m) { return view(m, {m.size(1), m.size(0)}, {m.stride(1), m.stride(0)}, 0); }

// Columns [begin, end) of a matrix.
inline Tensor columns(const Tensor& m, int64_t begin, int64_t end) {
  return view(m, {m.size(0), end - begin}, {m.stride(0), m.stride(1)}, begin * m.stride(1));
}

// A dimension of size 1 may have any stride, which cuBLAS would use.
inline Tensor with_plain_strides(const Tensor& m) {
  const int64_t rows = m.size(0), cols = m.size(1);
  if (rows != 1 && cols != 1) return m;
  return view(m, {rows, cols}, {rows == 1 ? cols : m.stride(0), cols == 1 ? 1 : m.stride(1)}, 0);
}

}  // namespace llmk
