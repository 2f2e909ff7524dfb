// Softmax and its gradient on the CPU: rows of any width that start anywhere, beside pages that no one may touch, with
// numbers far above the others. Fails where a result is not that of the formula, or equal rows have other bits.
#include "kernels/softmax/softmax.cu"
#define kShortThreads kShortThreadsOfBackward  // each file has its own
#include "kernels/softmax/softmax_backward.cu"
#include "matrix.h"

using namespace llmk;
using namespace llmk::kernels;

namespace {

int launches = 0;

void run(int64_t rows, int64_t cols, int64_t stride, bool log, bool equal, bool at_end, double largest) {
  ++launches;
  Matrix x(rows, cols, stride, at_end), y(rows, cols, cols, at_end), grad_y(rows, cols, stride, at_end),
      grad_x(rows, cols, cols, at_end);
  x.fill(equal), grad_y.fill(equal);
  for (int64_t r = 0; r < rows && largest > 0; ++r)
    x(r, cols * 5 / 7) = __float2bfloat16_rn(static_cast<float>(largest));
  const double scale = 0.75;
  softmax({x.data(), y.data(), rows, cols, stride, scale, log, 0, {}}, Dtype::kBFloat16, nullptr);
  softmax_backward({grad_y.data(), y.data(), grad_x.data(), rows, cols, stride, cols, scale, log}, Dtype::kBFloat16,
                   nullptr);
  for (int64_t r = 0; r < rows; ++r) {
    double maximum = -INFINITY, sum = 0, of_grad = 0, of_product = 0, size = 0;
    for (int64_t c = 0; c < cols; ++c) maximum = max(maximum, scale * x.value(r, c));
    for (int64_t c = 0; c < cols; ++c) sum += std::exp(scale * x.value(r, c) - maximum);
    for (int64_t c = 0; c < cols; ++c) {
      const double z = scale * x.value(r, c) - maximum;
      const double expected = log ? z - std::log(sum) : std::exp(z) / sum;
      check(y.value(r, c), expected, std::fabs(expected) + (log ? 0.1 : 1e-30), "y", rows, cols);
      of_grad += grad_y.value(r, c), of_product += grad_y.value(r, c) * y.value(r, c);
      size += std::fabs(grad_y.value(r, c)) * (log ? 1 : y.value(r, c));
    }
    for (int64_t c = 0; c < cols; ++c) {
      const double dy = grad_y.value(r, c), v = y.value(r, c);
      const double expected = scale * (log ? dy - std::exp(v) * of_grad : v * (dy - of_product));
      const double allowed = log ? std::fabs(dy) + std::exp(v) * size : v * (std::fabs(dy) + size);
      check(grad_x.value(r, c), expected, allowed + 1e-30, "the gradient", rows, cols);
    }
  }
  if (equal) check_equal_rows(y, "y of an equal row"), check_equal_rows(grad_x, "the gradient of an equal row");
}

}  // namespace

int main() {
  for (const int64_t cols : {1, 7, 24, 129, 136, 257, 1001, 2050, 4097}) {
    for (const int64_t rows : {1, 3, 17}) {
      for (const bool log : {false, true}) {
        run(rows, cols, cols, log, rows == 17, cols % 2 == 0, 0);
        run(rows, cols, cols + 3, log, rows != 17, cols % 2 != 0, rows == 3 ? 300 : 0);
      }
    }
  }
  for (const bool log : {false, true})
    run(5, 20001, 20001, log, log, log, 300), run(2, 20001, 20004, log, true, log, 0);
  is_hopper = false;
  run(2, 60001, 60001, false, true, true, 300);
  std::printf("%d launches of each, %d failures\n", launches, failures);
  return failures > 0;
}
