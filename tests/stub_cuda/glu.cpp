// Gated activations, forward and backward, on the CPU: rows of any width that start anywhere, packed or not, beside
// pages that no one may touch. Fails where a result is not that of the formula.
#include "kernels/activation/glu.cu"
#include "matrix.h"

using namespace llmk;
using namespace llmk::kernels;

namespace {

int launches = 0;

// silu(gate) up.
void run(int64_t rows, int64_t cols, int64_t stride, int64_t grad_stride, bool at_end) {
  ++launches;
  Matrix gate(rows, cols, stride, at_end), up(rows, cols, stride, at_end), y(rows, cols, cols, at_end),
      grad_y(rows, cols, cols, at_end), grad_gate(rows, cols, grad_stride, at_end),
      grad_up(rows, cols, grad_stride, at_end);
  for (Matrix* one : {&gate, &up, &grad_y}) one->fill();
  glu({gate.data(), up.data(), y.data(), rows, cols, stride, stride}, Activation::kSilu, Dtype::kBFloat16, nullptr);
  glu_backward({.grad_y = grad_y.data(),
                .gate = gate.data(),
                .up = up.data(),
                .grad_gate = grad_gate.data(),
                .grad_up = grad_up.data(),
                .rows = rows,
                .cols = cols,
                .grad_y_stride = cols,
                .gate_stride = stride,
                .up_stride = stride,
                .grad_stride = grad_stride},
               Activation::kSilu, Dtype::kBFloat16, nullptr);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const double g = gate.value(r, c), u = up.value(r, c), dy = grad_y.value(r, c), sigmoid = 1 / (1 + std::exp(-g));
      const double slope = sigmoid * (1 + g * (1 - sigmoid));
      check(y.value(r, c), g * sigmoid * u, std::fabs(g * sigmoid * u) + 1e-6, "y", rows, cols);
      check(grad_up.value(r, c), dy * g * sigmoid, std::fabs(dy * g) + 1e-6, "the gradient of up", rows, cols);
      check(grad_gate.value(r, c), dy * u * slope, std::fabs(dy * u) + 1e-6, "the gradient of the gate", rows, cols);
    }
  }
  check_gaps(grad_gate, "behind a row of the gate's gradient");
  check_gaps(grad_up, "behind a row of up's gradient");
}

}  // namespace

int main() {
  for (const bool at_end : {false, true}) {
    for (const int64_t cols : {1, 7, 8, 24, 129, 1001, 2050}) {
      for (const int64_t rows : {1, 2, 9}) {
        run(rows, cols, cols, cols, at_end), run(rows, cols, cols + 3, cols + 8, at_end);
        run(rows, cols, 2 * cols, 2 * cols, at_end);
      }
    }
  }
  std::printf("%d launches of each, %d failures\n", launches, failures);
  return failures > 0;
}
