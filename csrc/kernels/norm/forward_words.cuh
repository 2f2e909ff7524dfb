// The norms' forward (forward.cuh) for rows of any alignment in registers, by words (row_words.cuh).
#pragma once
#include "device/ptx.cuh"
#include "forward_row.cuh"
#include "kernels/row_words.cuh"

namespace llmk::kernels::norm {

// The scale of a row (see scale_of_row()) of which a thread has words; those outside of the row are `typical`.
// `columns(i)`: of word i, in the row.
template <typename T, int kPerWord, int kWords, typename Columns>
__device__ RowScale scale_of_words(const Vec<T, kPerWord> (&s)[kWords], float typical, float inverse_cols, float eps,
                                   const Group& group, float* first, float* second, const Columns& columns) {
  float sums[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const Centered<T, kPerWord> centered(s[i], typical);
    sums[0] += centered.sum();
    sums[1] += centered.sum_of_squares();
  }
  if constexpr (sizeof(T) == 2) {
    group_sum(sums, group, first);
    return scale_of_sums(typical, sums[0], sums[1], inverse_cols, eps);
  } else {
    float sum[1] = {sums[0]}, squares[1] = {0.f};
    group_sum(sum, group, first);
    const float mean = typical + sum[0] * inverse_cols;
#pragma unroll
    for (int i = 0; i < kWords; ++i) squares[0] += Centered<T, kPerWord>(s[i], mean).sum_of_squares(columns(i));
    group_sum(squares, group, second);
    return {mean, rsqrtf(squares[0] * inverse_cols + eps), 0.f};
  }
}

// A row of any alignment in registers, by words (row_words.cuh). With a sum, the second slot has the residual, and then
// the sum, or the target.
template <typename T, int kWords, bool kCentered, Sum kSum>
__global__ void __launch_bounds__(kMaxWordThreads, 2)
    norm_words_kernel(const NormParams params, const WordPlan plan, bool keep_inputs) {
  using Slot = RowSlot<T, kWords>;
  using W = typename Slot::Word;
  constexpr bool kResidual = kSum == Sum::kBefore;
  extern __shared__ int4 slots[];
  __shared__ float shared[2][2 * kMaxWordThreads / 32];
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
  if constexpr (kSum != Sum::kNone) other.copy(kResidual ? row.residual : row.target, policy);
  cp_async_commit();
  const float typical = kCentered && cols > 0 ? row.template typical<1>(kResidual, params.cols) : 0.f;
  x.pad(typical);
  if constexpr (kSum != Sum::kNone) other.pad(0.f);
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
  W w[kWords];
  load_parameters(row.weight, all, x.column(0), 1.f, w);
  RowScale of_row{};
  if constexpr (kCentered) {
    of_row = scale_of_words(s, typical, inverse_cols, eps, group, shared[0], shared[1],
                            [&](int i) { return cols - x.column(i); });
  } else {
    float squares[1] = {0.f};
#pragma unroll
    for (int i = 0; i < kWords; ++i) squares[0] = sum_of_squares(s[i], squares[0]);
    group_sum(squares, group, shared[0]);
    of_row.rstd = rsqrtf(squares[0] * inverse_cols + eps);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) forget_floats(s[i]);
  if constexpr (kCentered) {
    W bias[kWords];
    load_parameters(row.bias, all, x.column(0), 0.f, bias);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      s[i] = Centered<T, Slot::kPerWord>(s[i], of_row.number).scale_and_shift(of_row.rstd, of_row.shift, w[i], bias[i]);
    }
  } else {
    const float offset = row.weight ? static_cast<float>(params.options.weight_offset) : 0.f, rstd = of_row.rstd;
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
