// Parameters of the kernels beside a low-rank adapter's matrix products, on either device. Strides count elements;
// columns are contiguous.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace llmk {

// A float32 matrix as the sum of two of bfloat16, each number x as its upper part bf16(x) and its lower part
// bf16(x - upper). Three parts of each number are written, side by side or one below the other: the upper one three
// times, but the lower one at `lower`.
struct LoraSplit {
  const float* source;  // [rows, cols]
  void* parts;          // bfloat16: part p of (row, col) is at row * row_stride + p * part_stride + col
  int64_t rows, cols;
  int64_t source_stride;
  // x = factor (source[row, col] + source[row, col + half]); without a half, 0, x = source[row, col]
  int64_t half;
  float factor;
  int64_t row_stride, part_stride;
  int lower;  // 1 or 2
};

// sum[row, col] = source[row, col] + source[row, col + half]
struct LoraSum {
  const float* source;  // [rows, cols]
  float* sum;           // [rows, cols], contiguous
  int64_t rows, cols;
  int64_t source_stride, half;
};

// One or two of them in one launch; a second one without elements is none.
struct LoraSplits {
  LoraSplit first, second;
};
struct LoraSums {
  LoraSum first, second;
};

// y[:, begin : begin + n] += scaling (x A^T) B^T
struct LoraAdapter {
  const void *a, *b;  // [rank, K], [n, rank], contiguous
  int64_t begin, n, rank;
  double scaling;
};

// Adapters of one product, whose columns of y are apart.
struct LoraAdapters {
  static constexpr int kMax = 8;

  const void* x;  // [rows, k]
  void* y;        // in the dtype of x
  float* sums;    // on a GPU: [rows, ranks of all], contiguous
  int64_t rows, k, x_stride, y_stride;
  Dtype factors;  // that of A and B: that of x, or float32
  int count;
  LoraAdapter adapters[kMax];
};

}  // namespace llmk
