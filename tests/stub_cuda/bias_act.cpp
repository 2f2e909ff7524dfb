// The backward of activations with biases on the CPU: matrices of any width whose rows start anywhere, beside pages
// that no one may touch. Fails where a gradient is not that of the formula, or something else was written.
#include "kernels/activation/bias_act.cu"

#include "matrix.h"

using namespace llmk;
using namespace llmk::kernels;

namespace {

int launches = 0;

// relu(gate + gate_bias)^2 (up + up_bias), or without up.
void run(int64_t rows, int64_t cols, int64_t gate_stride, int64_t grad_stride, bool gated, bool at_end) {
  ++launches;
  Matrix grad_y(rows, cols, cols, at_end), gate(rows, cols, gate_stride, at_end), up(rows, cols, gate_stride, at_end),
      gate_bias(1, cols, cols, at_end), up_bias(1, cols, cols, at_end), grad_gate(rows, cols, grad_stride, at_end),
      grad_up(rows, cols, grad_stride, at_end), grad_gate_bias(1, cols, cols, at_end),
      grad_up_bias(1, cols, cols, at_end);
  for (Matrix* one : {&grad_y, &gate, &up, &gate_bias, &up_bias}) one->fill();
  BiasActBackwardParams p{.grad_y = grad_y.data(),
                          .gate = gate.data(),
                          .up = gated ? up.data() : nullptr,
                          .gate_bias = gate_bias.data(),
                          .up_bias = gated ? up_bias.data() : nullptr,
                          .grad_gate = grad_gate.data(),
                          .grad_up = gated ? grad_up.data() : nullptr,
                          .grad_gate_bias = grad_gate_bias.data(),
                          .grad_up_bias = gated ? grad_up_bias.data() : nullptr,
                          .partials = nullptr,
                          .partial_rows = 0,
                          .rows = rows,
                          .cols = cols,
                          .grad_y_stride = cols,
                          .gate_stride = gate_stride,
                          .up_stride = gate_stride,
                          .grad_stride = grad_stride};
  bias_act_backward_partial_rows(p, Dtype::kBFloat16, p.partial_rows);
  gpu::Guarded partials((gated ? 2 : 1) * p.partial_rows * cols * sizeof(float), at_end, sizeof(float));
  p.partials = partials.data();
  bias_act_backward(p, Activation::kRelu2, Dtype::kBFloat16, nullptr);

  const auto sum = [](Matrix& a, int64_t ra, Matrix& b, int64_t c) {
    return __bfloat162float(__float2bfloat16_rn(static_cast<float>(a.value(ra, c) + b.value(0, c))));
  };
  for (int64_t c = 0; c < cols; ++c) {
    double of_gate = 0, of_up = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const double g = max(sum(gate, r, gate_bias, c), 0.f), u = gated ? sum(up, r, up_bias, c) : 1;
      const double y = grad_y.value(r, c), expected = y * u * 2 * g;
      check(grad_gate.value(r, c), expected, std::fabs(expected) + 1e-6, "gradient of the gate", rows, cols);
      if (gated) check(grad_up.value(r, c), y * g * g, std::fabs(y * g * g) + 1e-6, "gradient of up", rows, cols);
      of_gate += grad_gate.value(r, c), of_up += gated ? grad_up.value(r, c) : 0;
    }
    check(grad_gate_bias.value(0, c), of_gate, std::fabs(of_gate) + 0.1, "gradient of the gate's bias", rows, cols);
    if (gated) check(grad_up_bias.value(0, c), of_up, std::fabs(of_up) + 0.1, "gradient of up's bias", rows, cols);
  }
  check_gaps(grad_gate, "behind a row of the gate's gradient");
}

}  // namespace

int main() {
  for (const bool at_end : {false, true}) {
    for (const int64_t cols : {1, 5, 8, 9, 16, 33, 64, 65, 130, 257, 520, 1001}) {
      for (const int64_t rows : {1, 2, 7, 9, 40}) {
        run(rows, cols, cols, cols, rows % 2 == 0, at_end);
        run(rows, cols, cols + 8, cols + 16, true, at_end);
        run(rows, cols, 2 * cols, cols + 3, false, at_end);
      }
    }
  }
  run(3000, 5, 5, 5, true, true), run(700, 65, 65, 65, false, false);
  std::printf("%d launches, %d failures\n", launches, failures);
  return failures > 0;
}
