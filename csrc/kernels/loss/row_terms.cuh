// The arithmetic of cross-entropy that forward and backward share.
//
//   z = softcap tanh(x / softcap)   or x;   lse = log(sum(e^z));   W = sum(w);   s = label_smoothing / vocab
//   a = (1 - label_smoothing) w_target
//   loss = a (lse - z_target) + s (W lse - sum(w z)) + lse_square_scale lse^2
//   d loss / d z_c = e^(z_c - lse) (a + s W + 2 lse_square_scale lse) - s w_c - [c = target] a
#pragma once
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "params/cross_entropy.h"

namespace llmk::kernels {

// What all rows have in common.
struct LossTerms {
  const float* weight;
  int64_t vocab;
  float divisor, class_weights, smoothing, kept, lse_square_scale, softcap, inverse_softcap;

  __device__ explicit LossTerms(const CrossEntropyParams& p)
      : weight(static_cast<const float*>(p.weight)),
        vocab(p.vocab),
        divisor(p.sums ? static_cast<const float*>(p.sums)[0] : 1.f),
        class_weights(p.sums ? static_cast<const float*>(p.sums)[1] : static_cast<float>(p.vocab)),
        smoothing(static_cast<float>(p.options.label_smoothing / static_cast<double>(p.vocab))),
        kept(static_cast<float>(1.0 - p.options.label_smoothing)),
        lse_square_scale(static_cast<float>(p.options.lse_square_scale)),
        softcap(static_cast<float>(p.options.softcap)),
        inverse_softcap(static_cast<float>(1.0 / p.options.softcap)) {}

  // a. A target that is no class makes loss and gradient NaN.
  __device__ float of_target(int64_t target, int64_t vocab) const {
    if (target < 0 || target >= vocab) return NAN;
    return kept * (weight ? weight[target] : 1.f);
  }
  template <bool kGeneral>
  __device__ float score(float x) const {
    if constexpr (kGeneral) return softcap > 0.f ? __fmul_rn(softcap, tanhf(x * inverse_softcap)) : x;
    return x;
  }
  // kPartial: c may lie outside of the row, where nobody looks at the result.
  template <bool kGeneral, bool kPartial = false>
  __device__ float class_weight(int64_t c) const {
    if constexpr (kGeneral) return weight && (!kPartial || (c >= 0 && c < vocab)) ? weight[c] : 1.f;
    return 1.f;
  }
  // The factor of e^(z - lse).
  __device__ float probability_factor(float a, float lse) const {
    return a + smoothing * class_weights + 2.f * lse_square_scale * lse;
  }
};

// The gradient of a row: grad_c = e^(z_c - shift) factor - uniform w_c - [c = target] hot. Which products are rounded
// before they are added is written out: the compiler has a copy of this for the ends of a row that is not aligned, and
// an element would have other bits there.
struct RowGradient {
  float shift, factor, uniform, hot;

  template <bool kGeneral, bool kPartial, typename T, int N>
  __device__ Vec<T, N> operator()(const Vec<T, N>& x, int64_t c, int64_t target, const LossTerms& terms) const {
    float grad[N];
    const uint64_t from_target = static_cast<uint64_t>(target - c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float z = terms.score<kGeneral>(x[i]);
      grad[i] = __fmul_rn(exp_approximate(z - shift), factor);
      if constexpr (kGeneral) grad[i] = fmaf(-uniform, terms.class_weight<kGeneral, kPartial>(c + i), grad[i]);
    }
    if (from_target < N) {
#pragma unroll
      for (int i = 0; i < N; ++i) grad[i] -= from_target == i ? hot : 0.f;
    }
    if constexpr (kGeneral) {
      if (terms.softcap > 0.f) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float tanh = terms.score<kGeneral>(x[i]) * terms.inverse_softcap;
          grad[i] *= fmaf(-tanh, tanh, 1.f);
        }
      }
    }
    return Vec<T, N>::of([&](int i) { return grad[i]; });
  }
};

inline RowOperands row_operands(const CrossEntropyParams& p) {
  return {p.rows, p.vocab, {{p.logits, p.logits_stride}, {p.grad, p.grad_stride}}};
}

// Whether the kernels need what is slower: a cap, or a smoothed loss.
inline bool is_general(const CrossEntropyParams& p) { return p.options.softcap > 0 || p.options.label_smoothing > 0; }

}  // namespace llmk::kernels
