// The activations, and parameters of their kernels on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

// An activation is added here, with the name that transformers has for it, in kernels/activation/activation.cuh and in
// cpu/activation.h.
enum class Activation { kSilu, kGeluTanh, kGeluErf, kRelu2, kSigmoid, kRelu };
constexpr const char* kActivationNames[] = {"silu", "gelu_pytorch_tanh", "gelu", "relu2", "sigmoid", "relu"};
constexpr int kActivations = sizeof(kActivationNames) / sizeof(*kActivationNames);

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
  // [rows, cols], or null: where the result of the forward is computed again. It may be grad_y, and the gradients may
  // be gate and up: each element is read before it is written.
  void* y = nullptr;
  int64_t y_stride = 0;
};

// An activation with biases in front, gated or not: y = act(gate + gate_bias) (up + up_bias), or act(gate + gate_bias).
struct BiasActParams {
  const void* gate;       // [rows, cols]
  const void* up;         // [rows, cols], or null: not gated
  const void* gate_bias;  // [cols], or null
  const void* up_bias;    // [cols], or null
  void* y;                // [rows, cols], contiguous
  int64_t rows, cols;
  int64_t gate_stride, up_stride;  // between rows
};

struct BiasActBackwardParams {
  const void* grad_y;     // [rows, cols]
  const void* gate;       // [rows, cols]
  const void* up;         // [rows, cols], or null: not gated
  const void* gate_bias;  // [cols], or null
  const void* up_bias;    // [cols], or null
  void* grad_gate;        // [rows, cols], rows grad_stride apart
  void* grad_up;          // [rows, cols], rows grad_stride apart, if gated
  void* grad_gate_bias;   // [cols], or null when it is not wanted
  void* grad_up_bias;     // [cols], or null when it is not wanted
  void* partials;         // workspace [partial_rows, cols] of the accumulation dtype for each of the two that is wanted
  int64_t partial_rows;   // how many partial sums over rows are made; fixes the order of the summation
  int64_t rows, cols;
  int64_t grad_y_stride, gate_stride, up_stride, grad_stride;  // between rows
};

}  // namespace llmk
