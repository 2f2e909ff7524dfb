// Parameters of the RMSNorm and LayerNorm kernels, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

struct RmsNormOptions {  // of LayerNorm: {eps, weight_offset, false}
  double eps;
  double weight_offset;     // a weight scales the row by weight_offset + weight: 0, or 1 for Gemma
  bool cast_before_weight;  // round x / rms to the dtype before the multiplication by the weight, as Hugging Face does
};

struct NormParams {
  const void* x;                   // [rows, cols]
  const void* residual = nullptr;  // [rows, cols], or null: the norm of x alone
  const void* weight;              // [cols], or null
  const void* bias = nullptr;      // [cols], or null; of LayerNorm only
  void* y = nullptr;               // [rows, cols], contiguous; null with a target
  void* sum = nullptr;             // [rows, cols], contiguous: x + residual, when there is a residual
  int64_t rows, cols;
  int64_t x_stride, residual_stride = 0;  // between rows
  RmsNormOptions options;
  // RMSNorm of x alone: target = addend + alpha norm(x), in place of y. [rows, cols], one and the same or not; or null.
  const void* addend = nullptr;
  void* target = nullptr;
  int64_t addend_stride = 0, target_stride = 0;
  double alpha = 1;
};

struct NormBackwardParams {
  const void* grad_y;    // [rows, cols]
  const void* x;         // [rows, cols]: what was normalized
  const void* weight;    // [cols], or null
  const void* grad_sum;  // [rows, cols], or null: a second gradient of x, added to its result
  void* grad_x;          // [rows, cols], contiguous
  void* grad_weight;     // [cols], or null when it is not wanted
  void* grad_bias;       // [cols], or null when it is not wanted; of LayerNorm only
  void* partials;        // workspace [partial_rows, cols] of the accumulation dtype for each of the two that is wanted
  int64_t partial_rows;  // how many partial sums over rows are made; fixes the order of the summation
  int64_t rows, cols;
  int64_t grad_y_stride, x_stride, grad_sum_stride;  // between rows
  RmsNormOptions options;
};

}  // namespace llmk
