// The arithmetic of a step of Adam, on either device. A is the type computed in: float, or double on the CPU.
#pragma once
#include <cmath>
#include <cstdint>

#include "params/optim.h"
#include "sampling_arithmetic.h"

namespace llmk::optim {

// What clip_grad_norm_ of PyTorch multiplies gradients of this norm by. NaN stays NaN.
template <typename A>
LLMK_ANYWHERE A clip_factor(A norm, A max_norm) {
  const A factor = max_norm / (norm + A(1e-6));
  return factor > A(1) ? A(1) : factor;
}

// Logarithms of the betas, from the host: beta^step is exp(step log(beta)), and 1 - beta^step has no cancellation.
struct LogBetas {
  double log_beta1, log_beta2;

  explicit LogBetas(const AdamOptions& options)
      : log_beta1(std::log(options.beta1)), log_beta2(std::log(options.beta2)) {}
};

LLMK_ANYWHERE float one_minus_power(float log_base, float exponent) { return -expm1f(exponent * log_base); }
LLMK_ANYWHERE double one_minus_power(double log_base, double exponent) { return -expm1(exponent * log_base); }

// On a GPU right to 2 units in the last place. IEEE's have branches for special operands, which would keep the compiler
// from interleaving elements. The divisor is 0 or far from subnormal, being a root.
LLMK_ANYWHERE float root(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::sqrt(x);
#endif
}
LLMK_ANYWHERE float quotient(float x, float y) {
#ifdef __CUDA_ARCH__
  return __fdividef(x, y);
#else
  return x / y;
#endif
}
LLMK_ANYWHERE double root(double x) { return std::sqrt(x); }
LLMK_ANYWHERE double quotient(double x, double y) { return x / y; }

template <typename A>
struct AdamScalars {
  A grad_factor;  // 1 / grad_scale, the clipping and the sign of `maximize`
  A l2, decay;    // the weight decay, added to the gradient or taken off the parameter
  A beta1_complement, beta2, beta2_complement;
  A eps, step_size;  // of which the second has the bias correction of exp_avg
  A bias_factor;     // of sqrt(exp_avg_sq)

  // m, v and the maximum of v are the state; without amsgrad `v_max` is unused. Returns the parameter.
  template <bool kAmsgrad>
  LLMK_ANYWHERE A update(A p, A g, A& m, A& v, [[maybe_unused]] A& v_max) const {
    g *= grad_factor;
    g = l2 != A(0) ? g + l2 * p : g;  // 0 times an infinite parameter would be NaN
    p *= decay;
    m += beta1_complement * (g - m);
    v = beta2 * v + beta2_complement * g * g;
    A largest = v;
    if constexpr (kAmsgrad) v_max = largest = v > v_max || v != v ? v : v_max;
    return p - step_size * quotient(m, root(largest) * bias_factor + eps);
  }
};

// What one launch needs to make them: rounded once, on the host.
template <typename A>
struct AdamConstants {
  A lr, weight_decay, max_norm, eps, log_beta1, log_beta2, beta1_complement, beta2, beta2_complement;
  bool decoupled_weight_decay, maximize;

  explicit AdamConstants(const AdamOptions& options)
      : lr(static_cast<A>(options.lr)),
        weight_decay(static_cast<A>(options.weight_decay)),
        max_norm(static_cast<A>(options.max_norm)),
        eps(static_cast<A>(options.eps)),
        log_beta1(static_cast<A>(LogBetas(options).log_beta1)),
        log_beta2(static_cast<A>(LogBetas(options).log_beta2)),
        beta1_complement(static_cast<A>(1 - options.beta1)),
        beta2(static_cast<A>(options.beta2)),
        beta2_complement(static_cast<A>(1 - options.beta2)),
        decoupled_weight_decay(options.decoupled_weight_decay),
        maximize(options.maximize) {}

  // `step` counts from 1. A null pointer: the value in the options, or none.
  LLMK_ANYWHERE AdamScalars<A> at(A step, const float* lr_tensor, const float* grad_scale,
                                  const float* grad_norm) const {
    const A rate = lr_tensor ? static_cast<A>(*lr_tensor) : lr;
    const A unscale = grad_scale ? A(1) / static_cast<A>(*grad_scale) : A(1);
    const A clip = grad_norm ? clip_factor(static_cast<A>(*grad_norm) * unscale, max_norm) : A(1);
    return {(maximize ? A(-1) : A(1)) * unscale * clip,
            decoupled_weight_decay ? A(0) : weight_decay,
            decoupled_weight_decay ? A(1) - rate * weight_decay : A(1),
            beta1_complement,
            beta2,
            beta2_complement,
            eps,
            rate / one_minus_power(log_beta1, step),
            A(1) / std::sqrt(one_minus_power(log_beta2, step))};
  }
};

using sampling::float_bits;
using sampling::float_from_bits;

// Random numbers of one parameter in one step. They are a function of what all ranks of a data-parallel training have
// in common, so that replicas stay equal: Philox with the seed as the key and the counter (step, index, quad).
struct RandomQuads {
  uint64_t seed, step, index;

  // `step` counts from 0.
  LLMK_ANYWHERE RandomQuads(uint64_t seed, float step, int index)
      : seed(seed), step(static_cast<uint64_t>(step)), index(static_cast<uint64_t>(index)) {}

  // 16 random bits each for elements 4 i to 4 i + 3: element 4 i has the lowest.
  LLMK_ANYWHERE uint64_t operator()(int64_t i) const {
    return sampling::random_bits(seed, step, index << 44 | static_cast<uint64_t>(i));
  }
};

// One of the two neighbours of x in a 16-bit type, the nearer one more often: on average it is x. The random bits are
// added to those that the type lacks, and these are cut off. The result converts without rounding, unless x is NaN,
// infinite or beyond the type's range: then it is x.
LLMK_ANYWHERE float round_to_bfloat16(float x, uint32_t random) {
  const uint32_t bits = float_bits(x);
  return (bits & 0x7fffffffu) >= 0x7f7f0000u ? x : float_from_bits((bits + random) & 0xffff0000u);
}
LLMK_ANYWHERE float round_to_float16(float x, uint32_t random) {
  const float magnitude = fabsf(x);
  // Subnormal numbers are 2^-24 apart, as those from 2^-14 to 2^-13 are: an addition aligns their bits.
  const float offset = magnitude < 0x1p-14f ? 0x1p-14f : 0.f;
  const uint32_t bits = float_bits(magnitude + offset) + (random >> 3);
  const float rounded = float_from_bits(bits & 0xffffe000u) - offset;
  return magnitude < 65504.f ? copysignf(rounded, x) : x;
}

}  // namespace llmk::optim
