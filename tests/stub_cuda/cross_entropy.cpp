// Cross-entropy with its gradient in the same pass, and its backward alone, on the CPU: vocabularies of any size, rows
// that start anywhere, beside pages that no one may touch. Fails where a result is not that of the formula.
#include "kernels/loss/cross_entropy.cu"
#define kThreads kThreadsOfBackward  // each file has its own
#include "kernels/loss/cross_entropy_backward.cu"
#include "matrix.h"

using namespace llmk;
using namespace llmk::kernels;

namespace {

int launches = 0;

void run(int64_t rows, int64_t vocab, int64_t stride, double smoothing, double largest, bool at_end) {
  ++launches;
  constexpr int64_t kIgnored = -100;
  Matrix logits(rows, vocab, stride, at_end), grad(rows, vocab, stride, at_end), again(rows, vocab, stride, at_end);
  logits.fill();
  std::vector<int64_t> target(rows);
  for (int64_t r = 0; r < rows; ++r) {
    target[r] = r == 1 ? kIgnored : (r * 7919 + 3) % vocab;
    if (largest > 0) logits(r, vocab * 5 / 7) = __float2bfloat16_rn(static_cast<float>(largest));
  }
  const gpu::Guarded losses(rows * sizeof(float), at_end, 4), lse(rows * sizeof(float), at_end, 4);
  const float grad_loss = 0.5f;
  CrossEntropyParams p{.logits = logits.data(),
                       .target = target.data(),
                       .weight = nullptr,
                       .sums = nullptr,
                       .losses = losses.data(),
                       .lse = lse.data(),
                       .grad_loss = nullptr,
                       .grad = grad.data(),
                       .rows = rows,
                       .vocab = vocab,
                       .logits_stride = stride,
                       .grad_stride = stride,
                       .grad_loss_stride = 0,
                       .grad_is_of_one = false,
                       .options = {kIgnored, smoothing, 0, 0}};
  cross_entropy(p, Dtype::kBFloat16, nullptr);
  p.losses = nullptr, p.grad_loss = &grad_loss, p.grad = again.data();
  cross_entropy_backward(p, Dtype::kBFloat16, nullptr);
  for (int64_t r = 0; r < rows; ++r) {
    double maximum = -INFINITY, sum = 0, of_all = 0;
    for (int64_t c = 0; c < vocab; ++c) maximum = max(maximum, logits.value(r, c));
    for (int64_t c = 0; c < vocab; ++c) sum += std::exp(logits.value(r, c) - maximum), of_all += logits.value(r, c);
    const double log_sum = maximum + std::log(sum), each = smoothing / static_cast<double>(vocab);
    const bool ignored = target[r] == kIgnored;
    const double of_target = ignored ? 0 : logits.value(r, target[r]);
    const double loss = ignored ? 0 : (1 - smoothing) * (log_sum - of_target) + smoothing * log_sum - each * of_all;
    check(static_cast<const float*>(losses.data())[r], loss, std::fabs(loss) + 0.01, "the loss", rows, vocab);
    for (int64_t c = 0; c < vocab; ++c) {
      const double probability = std::exp(logits.value(r, c) - log_sum), hot = c == target[r] ? 1 - smoothing : 0;
      const double expected = ignored ? 0 : probability - each - hot, size = probability + each + hot + 1e-30;
      check(grad.value(r, c), expected, size, "the gradient", rows, vocab);
      check(again.value(r, c), grad_loss * expected, size, "the gradient once more", rows, vocab);
    }
  }
  check_gaps(grad, "behind a row of the gradient");
}

}  // namespace

int main() {
  for (const int64_t vocab : {1, 7, 24, 129, 136, 1001, 4097}) {
    for (const int64_t rows : {1, 3, 17}) {
      run(rows, vocab, vocab, 0, 0, vocab % 2 == 0), run(rows, vocab, vocab + 3, 0.1, rows == 3 ? 200 : 0, rows == 3);
    }
  }
  run(3, 20001, 20001, 0.1, 200, true), run(3, 32000, 32000, 0, 0, false);
  // What a row takes of shared memory leaves room for the reductions, whatever the GPU has of it.
  for (const int64_t bytes : {101376, 166912, 232448}) {
    DeviceInfo device{};
    device_info(device);
    device.shared_bytes = bytes;
    for (int64_t cols = 24000; cols < 120000; ++cols) {
      for (const int operands : {1, 2}) {
        for (const bool vector : {false, true}) {
          const RowSplit split = split_row(cols, 2, operands, vector, device, kAloneBytes, kCachedThreads, 1);
          check(split.shared_bytes + kReductionBytes <= device.shared_bytes, 1, 0, "shared memory", bytes, cols);
        }
      }
    }
  }
  is_hopper = false;
  run(2, 60001, 60001, 0.1, 200, true);
  std::printf("%d launches of each, %d failures\n", launches, failures);
  return failures > 0;
}
