// Parameters of the softmax kernels, on either device. Strides count elements; columns of x and y are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

// A mask that broadcasts to the rows: row r is (i * sizes[0] + j) * sizes[1] + k, and has its mask at
// i * strides[0] + j * strides[1] + k * strides[2].
struct SoftmaxMask {
  const void* data;  // or null
  bool is_bool;      // one byte per element, not 0 where the column takes part; else the dtype of x, added to it
  int64_t sizes[2];
  int64_t strides[3];
  int64_t col_stride;  // 0 or 1
};

struct SoftmaxParams {
  const void* x;  // [rows, cols]
  void* y;        // [rows, cols], contiguous
  int64_t rows, cols;
  int64_t x_stride;     // between rows
  double scale;         // of x
  bool log;             // the logarithm of the softmax
  int64_t causal_rows;  // rows of each causal matrix, whose last row takes part as a whole; 0: not causal
  SoftmaxMask mask;
};

struct SoftmaxBackwardParams {
  const void* grad_y;  // [rows, cols]
  const void* y;       // [rows, cols]
  void* grad_x;        // [rows, cols], contiguous
  int64_t rows, cols;
  int64_t grad_y_stride, y_stride;  // between rows
  double scale;
  bool log;
};

}  // namespace llmk
