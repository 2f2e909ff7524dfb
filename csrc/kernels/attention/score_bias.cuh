// What is added to the scores of a head (params/flash_attention.h, ScoreBias).
#pragma once
#include <cmath>

#include "device/vec.cuh"
#include "params/flash_attention.h"
#include "softmax_rows.cuh"

namespace llmk::kernels::flash {

// `T`: of q.
template <typename T>
class HeadBias {
 public:
  // `shift`: from the index of a query to its position.
  __device__ HeadBias(const FlashAttentionParams& params, int64_t b, int64_t h, int shift)
      : bias_(params.bias),
        mask_(static_cast<const char*>(bias_.mask)),
        slope_(bias_.slopes ? bias_.slopes[b * bias_.slopes_batch + h] : 0.f),
        last_query_(static_cast<int>(params.q_tokens) - 1),
        last_key_(static_cast<int>(params.k_tokens) - 1),
        shift_(shift) {
    if (mask_) mask_ += (b * bias_.batch + h * bias_.head) * element_bytes();
  }

  // The score of a key for a query, with what is added; -inf hides the key. Neither has to exist.
  __device__ float add(float score, int query, int key) const {
    score -= slope_ * static_cast<float>(abs(query + shift_ - key));
    if (!mask_) return score;
    const char* const at = row(query) + min(key, last_key_) * bias_.key * element_bytes();
    switch (bias_.type) {
      case ScoreBias::Type::kBool: return masked(score, *reinterpret_cast<const bool*>(at));
      case ScoreBias::Type::kInput: return masked(score, to_float(*reinterpret_cast<const T*>(at)));
      default: return masked(score, *reinterpret_cast<const float*>(at));
    }
  }

  // Products of a query and the keys key + 8 n + i, n in [0, kPairs), i 0 or 1, to exponents in base 2; `key` is even.
  template <int kPairs, typename Score>
  __device__ void exponents_of_row(const ScoreScale<Extra::kBias>& scale, int query, int key,
                                   const Score& score) const {
    const auto for_all = [&](const auto& body) {
#pragma unroll
      for (int n = 0; n < kPairs; ++n) body(n, 0), body(n, 1);
    };
    if (scale.cap > 0.f) {
      for_all([&](int n, int i) { score(n, i) = scale.apply_early(score(n, i)) * kLog2E; });
    } else {
      const float factor = scale.scale * kLog2E;
      for_all([&](int n, int i) { score(n, i) *= factor; });
    }
    if (slope_ != 0.f) {
      const float distance = static_cast<float>(query + shift_ - key), slope = slope_ * kLog2E;
      for_all([&](int n, int i) { score(n, i) = fmaf(-slope, fabsf(distance - (8 * n + i)), score(n, i)); });
    }
    if (!mask_) return;
    switch (bias_.type) {
      case ScoreBias::Type::kBool: return add_mask<bool, kPairs>(query, key, score);
      case ScoreBias::Type::kInput: return add_mask<T, kPairs>(query, key, score);
      default: return add_mask<float, kPairs>(query, key, score);
    }
  }

 private:
  __device__ int64_t element_bytes() const {
    return bias_.type == ScoreBias::Type::kBool ? 1 : bias_.type == ScoreBias::Type::kFloat ? 4 : sizeof(T);
  }
  __device__ const char* row(int query) const {
    return mask_ + min(query, last_query_) * bias_.query * element_bytes();
  }

  // `unit`: of the score, log2(e) if it is an exponent in base 2.
  __device__ static float masked(float score, bool seen, float = 1.f) { return seen ? score : -INFINITY; }
  __device__ static float masked(float score, float added, float unit = 1.f) {
    return added < kHidden ? -INFINITY : fmaf(added, unit, score);
  }
  __device__ static bool value(bool element) { return element; }
  template <typename Element>
  __device__ static float value(Element element) {
    return to_float(element);
  }

  template <typename Element, int kPairs, typename Score>
  __device__ void add_mask(int query, int key, const Score& score) const {
    struct alignas(2 * sizeof(Element)) Pair {
      Element of[2];
    };
    Pair added[kPairs];
    const Element* const of_row = reinterpret_cast<const Element*>(row(query));
    if (bias_.pairs && key + 8 * (kPairs - 1) + 1 <= last_key_) {
#pragma unroll
      for (int n = 0; n < kPairs; ++n) added[n] = *reinterpret_cast<const Pair*>(of_row + key + 8 * n);
    } else {
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) added[n].of[i] = of_row[min(key + 8 * n + i, last_key_) * bias_.key];
      }
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) score(n, i) = masked(score(n, i), value(added[n].of[i]), kLog2E);
    }
  }

  const ScoreBias& bias_;
  const char* mask_;  // of the head
  float slope_;
  int last_query_, last_key_, shift_;
};

}  // namespace llmk::kernels::flash
