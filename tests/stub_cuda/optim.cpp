// A step of AdamW for a list of tensors, the norm of a list of gradients and their clipping, on the CPU: tensors of any
// size, empty ones, more than one table holds, beside pages that no one may touch. Fails where a result is not that of
// the formula, or a step is not counted once.
#include <deque>

#include "cuda_runtime.h"
#define CUDART_VERSION 13000  // tables of 32 KB
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
#include "kernels/optim/grad_norm.cu"
#define FewTensors FewTensorsOfAdam  // each file has its own
#define ManyTensors ManyTensorsOfAdam
#define kAligned kAlignedOfAdam
#define kDtypeShift kDtypeShiftOfAdam
#define dispatch_kind dispatch_kind_of_adam
#include "kernels/optim/adam.cu"
#include "matrix.h"

using namespace llmk;
using namespace llmk::kernels;

namespace {

int launches = 0;

struct Floats {
  gpu::Guarded memory;
  int64_t size;

  Floats(int64_t size, bool at_end, float value) : memory(size * sizeof(float), at_end, sizeof(float)), size(size) {
    std::fill_n(data(), size, value);
  }
  float* data() const { return static_cast<float*>(memory.data()); }
};

// A parameter of bfloat16 with states of float32. The first step: m and v begin as 0.
struct Parameter {
  Matrix p, grad, old_p, old_grad;
  Floats m, v, largest, step;

  Parameter(int64_t size, bool at_end)
      : p(1, size, size, at_end),
        grad(1, size, size, at_end),
        old_p(1, size, size, at_end),
        old_grad(1, size, size, at_end),
        m(size, at_end, 0),
        v(size, at_end, 0),
        largest(size, at_end, 0),
        step(1, at_end, 0) {
    p.fill(), grad.fill();
    for (int64_t i = 0; i < size; ++i) old_p(0, i) = p(0, i), old_grad(0, i) = grad(0, i);
  }
};

void run(const std::vector<int64_t>& sizes, bool at_end, bool amsgrad, bool skip, bool empty_too) {
  ++launches;
  std::deque<Parameter> parameters;
  std::vector<AdamTensor> list;
  std::vector<GradTensor> grads;
  for (const int64_t size : sizes) {
    Parameter& one = parameters.emplace_back(size, at_end);
    list.push_back({one.p.data(), one.grad.data(), one.m.data(), one.v.data(), one.largest.data(), one.step.data(),
                    size, Dtype::kBFloat16, Dtype::kFloat32, static_cast<int>(list.size())});
    grads.push_back({one.grad.data(), size, Dtype::kBFloat16});
  }
  Floats step_of_none(1, at_end, 0);
  if (empty_too) {
    list.insert(list.begin() + list.size() / 2, {nullptr, nullptr, nullptr, nullptr, nullptr, step_of_none.data(), 0,
                                                 Dtype::kFloat32, Dtype::kFloat32, 0});
    grads.insert(grads.begin(), {nullptr, 0, Dtype::kFloat32});
  }
  const int64_t count = static_cast<int64_t>(list.size());

  double squares = 0, most = 0;
  for (Parameter& one : parameters) {
    for (int64_t i = 0; i < one.m.size; ++i) {
      const double g = one.old_grad.value(0, i);
      squares += g * g, most = max(most, std::fabs(g));
    }
  }
  Floats partials(max(grad_norm_partials(grads.data(), count), int64_t{1}), at_end, NAN), norm(1, at_end, NAN);
  for (const bool infinity : {true, false}) {
    grad_norm({grads.data(), count, infinity, partials.data(), norm.data()}, nullptr);
    const double expected = infinity ? most : std::sqrt(squares);
    check(norm.data()[0], expected, 0.01 * expected, "the norm", count, infinity);
  }
  const double max_norm = 0.5 * std::sqrt(squares);
  clip_grads({grads.data(), count, norm.data(), max_norm}, nullptr);

  const float rate = 0.125f, found_inf = skip;
  int counter = 0;
  AdamParams params{};
  params.tensors = list.data(), params.count = count, params.lr = &rate, params.found_inf = &found_inf;
  params.counter = &counter, params.amsgrad = amsgrad;
  params.options = {7, 0.75, 0.5, 1e-8, 0.25, 0, true, false};
  adam(params, nullptr);

  for (Parameter& one : parameters) {
    check(one.step.data()[0], skip ? 0 : 1, 0, "the step", count, one.m.size);
    for (int64_t i = 0; i < one.m.size; ++i) {
      const double g = one.grad.value(0, i), old = one.old_p.value(0, i), old_g = one.old_grad.value(0, i);
      check(g, old_g / 2, std::fabs(old_g), "a clipped gradient", count, i);
      // Behind the first step m / (1 - beta1) is g, and v / (1 - beta2) its square.
      const double expected = skip ? old : old * (1 - rate * 0.25) - rate * (g > 0 ? 1 : g < 0 ? -1 : 0);
      check(one.p.value(0, i), expected, std::fabs(old) + rate, "a parameter", count, i);
      check(one.m.data()[i], skip ? 0 : g / 4, std::fabs(g) / 10, "its mean", count, i);
      check(one.v.data()[i], skip ? 0 : g * g / 2, g * g / 10, "its square", count, i);
      check(one.largest.data()[i], skip || !amsgrad ? 0 : g * g / 2, g * g / 10, "the largest square", count, i);
    }
  }
  if (empty_too) check(step_of_none.data()[0], skip ? 0 : 1, 0, "the step of a tensor without elements", count, 0);
  check(counter, 0, 0, "the counter", count, 0);
}

}  // namespace

int main() {
  for (const bool at_end : {false, true}) {
    for (const bool amsgrad : {false, true}) {
      run({1}, at_end, amsgrad, false, true), run({8, 9, 4099}, at_end, amsgrad, false, false);
      run({2048, 3, 12289, 1024}, at_end, amsgrad, true, true), run({}, at_end, amsgrad, false, true);
    }
    std::vector<int64_t> many;  // more tensors than a small table holds, and than a large one
    for (int i = 0; i < 190; ++i) many.push_back(1 + i % 11);
    run(many, at_end, false, false, true);
    for (int i = 0; i < 1400 && at_end; ++i) many.push_back(1 + i % 2);
    if (at_end) run(many, at_end, true, false, true);
  }
  std::printf("%d launches of each, %d failures\n", launches, failures);
  return failures > 0;
}
