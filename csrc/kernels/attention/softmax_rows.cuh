// Rows of an online softmax whose scores are results of matrix instructions: four lanes share a row.
#pragma once
#include "device/mma.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visible.cuh"

namespace llmk::kernels::flash {

// The maximum or the sum over the four lanes that share a row.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Whether scores are scaled before the maximum is taken: a softcap bends them, and a negative scale turns their order.
__host__ __device__ inline bool scales_early(const FlashAttentionParams& params) {
  return static_cast<float>(params.softcap) > 0.f || static_cast<float>(params.softmax_scale) <= 0.f;
}

// From products q k to scores, and on to exponents in base 2. Scores are multiplied by `factor` on their way into the
// exponent, unless they have been scaled before. What adds a bias to them leaves them as exponents.
template <Extra kExtra>
struct ScoreScale {
  float scale, cap, inverse_cap, factor;
  bool early;

  __device__ explicit ScoreScale(const FlashAttentionParams& params)
      : scale(static_cast<float>(params.softmax_scale)),
        cap(static_cast<float>(params.softcap)),
        inverse_cap(1.f / cap),
        early(kExtra == Extra::kScaled || (kExtra == Extra::kPages && scales_early(params))) {
    factor = kExtra == Extra::kBias ? 1.f : early ? kLog2E : scale * kLog2E;
  }
  __device__ float apply_early(float score) const {
    score *= scale;
    return cap > 0.f ? cap * tanhf(score * inverse_cap) : score;
  }
};

// What a lane knows of one row.
struct SoftmaxRow {
  float maximum = -INFINITY;  // of all lanes
  float sum = 0.f;            // of this lane's columns

  // What the weighted values are to be multiplied by, with a sink (its score times log2(e), or -inf); and the log of
  // the sum.
  template <Extra kExtra>
  __device__ float finish(const ScoreScale<kExtra>& scale, float sink, float& lse) const {
    const float highest = maximum * scale.factor, shift = finite(fmaxf(highest, sink));
    const float correction = exp2_approximate(highest - shift);
    const float total = quad_sum(sum) * correction + exp2_approximate(sink - shift);
    lse = (shift + log2f(total)) / kLog2E;
    return total == 0.f ? 0.f : correction / total;
  }
};

// Turns scores of kRows rows into probabilities over their maxima so far, which rise: what was summed before is to be
// multiplied by `corrections`. score(r, n, i), n in [0, kPairs), i 0 or 1, is column 8 n + i of this lane's in row r;
// it sees [from[r], to[r]) of them where not `whole`. Step by step for all rows, so that one hides what another waits
// for.
template <int kRows, int kPairs, Extra kExtra, typename Score>
__device__ void update_rows(SoftmaxRow* rows, const ScoreScale<kExtra>& scale, bool whole, const int* from,
                            const int* to, const Score& score, float* corrections) {
  const auto for_all = [](const auto& body) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) body(r, n, 0), body(r, n, 1);
    }
  };
  if (scale.early) {
    for_all([&](int r, int n, int i) { score(r, n, i) = scale.apply_early(score(r, n, i)); });
  }
  if (!whole) {
    for_all([&](int r, int n, int i) {
      if (n * 8 + i < from[r] || n * 8 + i >= to[r]) score(r, n, i) = -INFINITY;
    });
  }
  float highest[kRows][2], shift[kRows], total[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) highest[r][0] = highest[r][1] = rows[r].maximum, total[r] = 0.f;
  for_all([&](int r, int n, int i) { highest[r][i] = fmaxf(highest[r][i], score(r, n, i)); });
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float maximum = quad_max(fmaxf(highest[r][0], highest[r][1]));
    shift[r] = -finite(maximum) * scale.factor;
    corrections[r] = exp2_approximate(fmaf(rows[r].maximum, scale.factor, shift[r]));
    rows[r].maximum = maximum;
  }
  for_all([&](int r, int n, int i) {
    score(r, n, i) = exp2_approximate(fmaf(score(r, n, i), scale.factor, shift[r]));
    total[r] += score(r, n, i);
  });
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r].sum = rows[r].sum * corrections[r] + total[r];
}

}  // namespace llmk::kernels::flash
