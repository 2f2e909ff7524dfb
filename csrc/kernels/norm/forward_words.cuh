// The norms' forward (forward.cuh) for rows of any alignment in registers, by words (row_words.cuh).
#pragma once
#include "device/ptx.cuh"
#include "forward_row.cuh"
#include "kernels/row_words.cuh"

namespace llmk::kernels::norm {

constexpr int kMaxWordSums = 2 * kMaxWordThreads / 32;        // two for each warp
static_assert(2 * kMaxWordSums >= 3 * kMaxWordThreads / 32);  // PartSums takes both buffers

// The scale of a row (see scale_of_row()) of which a thread has words. What lies behind the end of the row may be
// anything. `element` is one of the row's: of 16 bits each warp takes its own first one. `shared`: two buffers of
// group_sum(), for two values.
template <typename Slot, int kWords>
__device__ RowScale scale_of_words(const typename Slot::Word (&s)[kWords], const Slot& slot, int cols, float element,
                                   float inverse_cols, float eps, const Group& group, float (*shared)[kMaxWordSums]) {
  using Differences = Centered<typename Slot::Type, Slot::kPerWord>;
  float sums[2];
  const auto add_up = [&](float number) {
    sums[0] = sums[1] = 0.f;
    if (slot.is_full()) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const Differences centered(s[i], number);
        sums[0] += centered.sum();
        sums[1] += centered.sum_of_squares();
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const Differences centered(s[i], number);
        sums[0] += centered.sum(cols - slot.column(i));
        sums[1] += centered.sum_of_squares(cols - slot.column(i));
      }
    }
  };
  if constexpr (Slot::kPerWord == 2) {
    const float number = __shfl_sync(0xffffffffu, s[0][0], 0);
    add_up(number);
    const float sum = warp_sum_each(sums);
    const int lane = group.rank % 32, part = group.rank / 32;
    if (group.threads == 32) {
      const auto of_lane = [&](int from) { return __shfl_sync(0xffffffffu, sum, from); };
      return scale_of_sums(number, of_lane(0), of_lane(16), inverse_cols, eps);
    }
    const PartSums parts{shared[0], kMaxWordThreads / 32};
    if (lane % 16 == 0) parts.put(part, 1 + lane / 16, sum);
    if (lane == 0) parts.put(part, 0, number);
    group_barrier(group);
    const auto count_of = [&](int i) { return static_cast<float>(min(cols - i * Slot::kPart, Slot::kPart)); };
    return merge_parts(parts, (cols + Slot::kPart - 1) / Slot::kPart, count_of, inverse_cols, eps);
  } else {
    add_up(element);
    float sum[1] = {sums[0]};
    group_sum(sum, group, shared[0]);
    const float mean = element + sum[0] * inverse_cols;
    add_up(mean);
    group_sum(sums, group, shared[1]);
    return scale_of_sums(mean, sums[0], sums[1], inverse_cols, eps);
  }
}

// A row of any alignment in registers, by words (row_words.cuh). With a sum, the second slot has the residual, and then
// the sum, or the addend.
template <typename T, int kWords, bool kCentered, Sum kSum>
__global__ void __launch_bounds__(kMaxWordThreads, 2)
    norm_words_kernel(const NormParams params, const WordPlan plan, bool keep_inputs) {
  using Slot = RowSlot<T, kWords>;
  using W = typename Slot::Word;
  constexpr bool kResidual = kSum == Sum::kBefore;
  extern __shared__ int4 slots[];
  __shared__ float shared[2][kMaxWordSums];
  const Group group = row_group();
  const int64_t index = row_index();
  const Row<T> row(params, index);
  const int all = static_cast<int>(params.cols), cols = index < params.rows ? all : 0;
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  Slot x(slots, 0, group, plan.rows_per_block, cols), other(slots, 1, group, plan.rows_per_block, cols);
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t policy = l2_policy(keep_inputs);
  x.copy(row.x, policy);
  if constexpr (kSum != Sum::kNone) other.copy(kResidual ? row.residual : row.addend, policy);
  cp_async_commit();
  float element = 0.f;
  if constexpr (kCentered) {
    if (sizeof(T) == 4 && cols > 0) element = row.template load<1>(kResidual, 0)[0];
  } else {
    x.pad(0.f);
    if constexpr (kSum != Sum::kNone) other.pad(0.f);
  }
  Slot::arrived();
  W s[kWords];
  [[maybe_unused]] W r[kWords];
  x.load(s);
  if constexpr (kSum != Sum::kNone) other.load(r);
  if constexpr (kResidual) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) s[i] = add(s[i], r[i]);
    other.put(row.sum, s);
  }
  constexpr int kHalf = kWords / 2;
  W w[kCentered ? kHalf : kWords];  // the sums of a LayerNorm leave registers for half of them and of the biases
  if constexpr (!kCentered) load_parameters(row.weight, all, x.column(0), 1.f, w);
  RowScale of_row{};
  if constexpr (kCentered) {
    of_row = scale_of_words(s, x, cols, element, inverse_cols, eps, group, shared);
  } else {
    float squares[1] = {0.f};
#pragma unroll
    for (int i = 0; i < kWords; ++i) squares[0] = sum_of_squares(s[i], squares[0]);
    group_sum(squares, group, shared[0]);
    of_row.rstd = rsqrtf(squares[0] * inverse_cols + eps);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) forget_floats(s[i]);
  const float offset = weight_offset_of(params);
  if constexpr (kCentered) {
    W bias[kHalf];
#pragma unroll
    for (int half = 0; half < kWords; half += kHalf) {
      load_parameters(row.weight, all, x.column(half), 1.f, w);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) w[i] = with_offset(w[i], offset);
      load_parameters(row.bias, all, x.column(half), 0.f, bias);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        s[half + i] = Centered<T, Slot::kPerWord>(s[half + i], of_row.mean).output(of_row.rstd, w[i], bias[i]);
      }
    }
  } else {
    const float rstd = of_row.rstd;
    if (params.options.cast_before_weight) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) s[i] = W::of([&](int k) { return s[i][k] * rstd; });
      if (offset == 0.f) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) s[i] = mul(s[i], w[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) s[i] = W::of([&](int k) { return s[i][k] * (offset + w[i][k]); });
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) s[i] = W::of([&](int k) { return s[i][k] * rstd * (offset + w[i][k]); });
    }
    if constexpr (kSum == Sum::kAfter) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) s[i] = add_scaled(r[i], s[i], static_cast<float>(params.alpha));
    }
  }
  T* const target = kSum == Sum::kAfter ? row.target : row.y;
  x.put(target, s);
  x.store(target);
  if constexpr (kResidual) other.store(row.sum);
}

}  // namespace llmk::kernels::norm
