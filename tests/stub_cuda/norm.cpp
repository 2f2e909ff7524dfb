// RMSNorm and LayerNorm on the CPU, forward and backward: rows of any width that start anywhere, beside pages that no
// one may touch. Fails where a result is not that of the formula, where equal rows have other bits, or something else
// was written.
#include "kernels/norm/layer_norm.cu"
#include "kernels/norm/layer_norm_backward.cu"
#include "kernels/norm/rms_norm.cu"
#include "kernels/norm/rms_norm_backward.cu"
#include "matrix.h"

namespace llmk::kernels::norm {

constexpr size_t kShared = stub::kShared / sizeof(int4);
thread_local int4 cache[kShared], ring[kShared], parameters[kShared];  // dynamic shared memory

}  // namespace llmk::kernels::norm

using namespace llmk;
using namespace llmk::kernels;

namespace {

int launches = 0;

void run(int64_t rows, int64_t cols, int64_t stride, bool centered, bool extra, bool equal, bool at_end) {
  ++launches;
  Matrix x(rows, cols, stride, at_end), residual(rows, cols, cols, at_end), weight(1, cols, cols, at_end),
      bias(1, cols, cols, at_end), y(rows, cols, cols, at_end), sum(rows, cols, cols, at_end),
      grad_y(rows, cols, stride, at_end), grad_sum(rows, cols, cols, at_end), grad_x(rows, cols, cols, at_end),
      grad_weight(1, cols, cols, at_end), grad_bias(1, cols, cols, at_end);
  for (Matrix* one : {&x, &residual, &weight, &bias, &grad_y, &grad_sum}) one->fill(equal);
  for (int64_t r = 0; r < rows && equal; ++r) {  // a number near one row is far from the next
    for (int64_t c = 0; c < cols && !Matrix::is_equal(r); ++c) x(r, c) = __float2bfloat16_rn(1000.f * x.value(r, c));
  }
  const RmsNormOptions options{.eps = 1e-5, .weight_offset = 1, .cast_before_weight = false};
  const NormParams forward{.x = x.data(),
                           .residual = extra ? residual.data() : nullptr,
                           .weight = weight.data(),
                           .bias = centered ? bias.data() : nullptr,
                           .y = y.data(),
                           .sum = extra ? sum.data() : nullptr,
                           .rows = rows,
                           .cols = cols,
                           .x_stride = stride,
                           .residual_stride = extra ? cols : 0,
                           .options = options};
  (centered ? layer_norm : rms_norm)(forward, Dtype::kBFloat16, nullptr, true);
  NormBackwardParams backward{.grad_y = grad_y.data(),
                              .x = x.data(),
                              .weight = weight.data(),
                              .grad_sum = extra ? grad_sum.data() : nullptr,
                              .grad_x = grad_x.data(),
                              .grad_weight = grad_weight.data(),
                              .grad_bias = centered ? grad_bias.data() : nullptr,
                              .partials = nullptr,
                              .partial_rows = 0,
                              .rows = rows,
                              .cols = cols,
                              .grad_y_stride = stride,
                              .x_stride = stride,
                              .grad_sum_stride = extra ? cols : 0,
                              .options = options};
  NormBackwardWorkspace workspace;
  (centered ? layer_norm_backward_workspace : rms_norm_backward_workspace)(backward, Dtype::kBFloat16, workspace);
  const gpu::Guarded partials(max<int64_t>(workspace.floats, 1) * sizeof(float), at_end, sizeof(float));
  backward.partials = partials.data(), backward.partial_rows = workspace.partial_rows;
  (centered ? layer_norm_backward : rms_norm_backward)(backward, Dtype::kBFloat16, nullptr);

  std::vector<double> of_weight(cols), of_bias(cols), size_of_weight(cols), size_of_bias(cols);
  for (int64_t r = 0; r < rows; ++r) {
    // Once of x, once of the sum: the statistics of a row, and its normalized element.
    const auto normalize = [&](const auto& element) {
      double mean = 0, square = 0;
      for (int64_t c = 0; c < cols; ++c) mean += centered ? element(c) / static_cast<double>(cols) : 0;
      for (int64_t c = 0; c < cols; ++c)
        square += (element(c) - mean) * (element(c) - mean) / static_cast<double>(cols);
      return std::pair(mean, 1 / std::sqrt(square + options.eps));
    };
    const auto element = [&](int64_t c) { return extra ? sum.value(r, c) : x.value(r, c); };
    const auto [mean, rstd] = normalize(element);
    for (int64_t c = 0; c < cols; ++c) {
      if (extra) {
        const double s = x.value(r, c) + residual.value(r, c);
        check(sum.value(r, c), s, std::fabs(s), "the sum", rows, cols);
      }
      const double w = 1 + weight.value(0, c), b = centered ? bias.value(0, c) : 0;
      const double expected = (element(c) - mean) * rstd * w + b;
      check(y.value(r, c), expected, std::fabs(expected) + 2 * std::fabs(w), "y", rows, cols);
    }
    const auto [mean_x, rstd_x] = normalize([&](int64_t c) { return x.value(r, c); });
    double of_g = 0, of_gn = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const double n = (x.value(r, c) - mean_x) * rstd_x, g = grad_y.value(r, c) * (1 + weight.value(0, c));
      of_g += centered ? g / static_cast<double>(cols) : 0, of_gn += g * n / static_cast<double>(cols);
    }
    for (int64_t c = 0; c < cols; ++c) {
      const double n = (x.value(r, c) - mean_x) * rstd_x, dy = grad_y.value(r, c), g = dy * (1 + weight.value(0, c));
      const double more = extra ? grad_sum.value(r, c) : 0, expected = rstd_x * (g - of_g - n * of_gn) + more;
      check(grad_x.value(r, c), expected, 5 * rstd_x + std::fabs(more), "the gradient of x", rows, cols);
      of_weight[c] += dy * n, of_bias[c] += dy;
      size_of_weight[c] += std::fabs(dy * n), size_of_bias[c] += std::fabs(dy);
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    check(grad_weight.value(0, c), of_weight[c], size_of_weight[c] + 0.1, "the gradient of the weight", rows, cols);
    if (centered) check(grad_bias.value(0, c), of_bias[c], size_of_bias[c], "the gradient of the bias", rows, cols);
  }
  if (equal) check_equal_rows(y, "y of an equal row"), check_equal_rows(grad_x, "the gradient of an equal row");
}

}  // namespace

int main() {
  for (const int64_t cols : {1, 7, 24, 129, 136, 257, 520, 1001, 2050}) {
    for (const int64_t rows : {1, 3, 20}) {
      for (const bool centered : {false, true}) {
        const bool extra = (rows + centered) % 2 == 0, at_end = cols % 2 == 0;
        run(rows, cols, cols, centered, extra, rows == 20, at_end);
        run(rows, cols, cols + 3, centered, !extra, rows != 20, !at_end);
      }
    }
  }
  for (const bool centered : {false, true}) {
    run(9, 4097, 4097, centered, centered, true, !centered), run(3, 20001, 20001, centered, !centered, true, centered);
    run(2, 60001, 60004, centered, false, true, centered);
    run(1700, 136, 139, centered, false, true, true), run(1700, 136, 136, centered, true, true, true);  // some turns
  }
  is_hopper = false;
  for (const int64_t cols : {9872, 30001}) run(2, cols, cols + 2, true, false, true, true);
  std::printf("%d launches of each, %d failures\n", launches, failures);
  return failures > 0;
}
