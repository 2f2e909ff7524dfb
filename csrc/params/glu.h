// Parameters of the gated-activation kernels, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

enum class Activation { kSilu, kGeluTanh, kGeluErf };

struct GluParams {
  const void* gate;  // [rows, cols]
  const void* up;    // [rows, cols]
  void* y;           // [rows, cols], contiguous
  int64_t rows, cols;
  int64_t gate_stride, up_stride;  // between rows
};

struct GluBackwardParams {
  const void* grad_y;  // [rows, cols]
  const void* gate;    // [rows, cols]
  const void* up;      // [rows, cols]
  void* grad_gate;     // [rows, cols], rows grad_stride apart
  void* grad_up;       // [rows, cols], rows grad_stride apart
  int64_t rows, cols;
  int64_t grad_y_stride, gate_stride, up_stride, grad_stride;  // between rows
};

}  // namespace llmk
