// Parameters of the FP8 kernels, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace llmk {

// Where a quantization writes to. A group of elements shares a scale: `group` columns of a row, the last group of a row
// may be shorter; or all elements, which is asked for by another function.
struct Fp8Output {
  void* q;       // [rows, cols], contiguous
  float* scale;  // that of group g of row r is scale[r * scale_row_stride + g * scale_group_stride]
  int64_t rows, cols;
  int64_t group;
  int64_t scale_row_stride, scale_group_stride;
  Fp8Format format;
  bool power_of_two;
};

struct Fp8QuantizeParams {
  const void* x;                // [rows, cols]; the gate of a SwiGLU
  const void* up;               // [rows, cols], or null: x itself is quantized, else silu(x) up
  int64_t x_stride, up_stride;  // between rows
  Fp8Output out;
};

// The end of fp8_linear where it is not part of the product: y = acc x_scale weight_scale + bias.
struct Fp8EpilogueParams {
  const float* acc;           // [rows, cols]: the product of the bytes
  const float* x_scale;       // [rows]
  const float* weight_scale;  // [cols]
  const void* bias;           // [cols] of the dtype of y, or null
  void* y;                    // [rows, cols]
  int64_t rows, cols;
  int64_t acc_stride, y_stride;  // between rows
};

}  // namespace llmk
