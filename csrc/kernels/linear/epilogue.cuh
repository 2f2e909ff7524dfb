// Epilogue of a linear for few tokens. The partial sums of all K groups, of all blocks of the cluster, are added up in
// a fixed order; then come 1 / rms of a folded norm, bias, gated activation or residual add, and the store.
#pragma once
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "finish.cuh"
#include "prologue.cuh"
#include "weight_element.cuh"

namespace llmk::kernels::few_tokens {

// The sum over all K groups, at most kGroups, `step` bytes apart from `from` on, and over all blocks of the cluster.
template <int kGroups, int kWidth>
__device__ void reduce_partials(float (&sums)[kWidth], const LinearPlan& plan, uint32_t from, int step) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i] = 0.f;
  const auto add = [&](uint32_t address, auto load, auto load4) {
    if constexpr (kWidth == 4) {
      const float4 v = load4(address);
      sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
    } else {
      sums[0] += load(address);
    }
  };
  if (plan.cluster == 1) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group < plan.k_consumers) add(from + group * step, shared_load_float, shared_load_float4);
    }
    return;
  }
#if __CUDA_ARCH__ >= 900  // there are no clusters before
  for (int group = 0; group < plan.k_consumers; ++group) {
#pragma unroll 4
    for (int rank = 0; rank < plan.cluster; ++rank) {
      add(cluster_address(from + group * step, rank), cluster_load, cluster_load4);
    }
  }
#endif
}

// Reduces the squares that epilogue() has stored in shared memory to this block's partial sum for each token, with four
// lanes per token.
template <typename T, int kWidth, int kThreads>
__device__ void reduce_squares(const Arguments& a, const Layout& layout, int64_t first, int tile, int rank) {
  const LinearPlan& plan = a.plan;
  const int per_token = plan.tile_rows / kWidth;
  const int count = static_cast<int>(min(int64_t{per_token}, (a.out - first) / kWidth));
  named_barrier(kConsumersBarrier, kThreads);
  for (int token = threadIdx.x / 4; token < kLinearMaxTokens; token += kThreads / 4) {
    float sum[1] = {0.f};
#pragma unroll 4
    for (int i = threadIdx.x % 4; i < count; i += 4) {
      const int by = (token * per_token + i) / kThreads & (plan.cluster - 1);
      if (by == rank && token < a.m)
        sum[0] += shared_load_float(layout.partials + 4 * (token * plan.pitch + i * kWidth));
    }
    warp_sum(sum, 4);
    if (threadIdx.x % 4 == 0) a.next_squares[(tile * plan.cluster + rank) * kHandoffTokens + token] = sum[0];
  }
  if (tile + rank + threadIdx.x == 0)
    a.next_squares[plan.output_tiles * plan.cluster * kHandoffTokens] = norm_weight_scale<T>(layout);
}

// Turns the partial sums into columns [first, first + plan.tile_rows) of y.
template <typename T, int kWidth, int kThreads, bool kNormHandoff, typename Element = Unquantized<T>>
__device__ void epilogue(const Arguments& a, const Layout& layout, int64_t first, int tile, int rank,
                         const Element& element = {}) {
  using V = Vec<T, kWidth>;
  const LinearPlan& plan = a.plan;
  constexpr int kGroups = kNormHandoff ? kLinearWarpgroups : kThreads / 32;
  const int rows = plan.tile_rows, per_token = rows / kWidth;
  for (int i = rank * kThreads + threadIdx.x; i < a.m * per_token; i += plan.cluster * kThreads) {
    const int token = divide(i, per_token), row = (i - token * per_token) * kWidth;
    const int64_t column = first + row;
    if (column >= a.out) continue;
    const int box = !a.glu && row >= plan.box_rows;
    T* const y = static_cast<T*>(a.y) + token * a.y_stride + column;
    // Global loads first: they are served after the copies of weights in flight.
    V bias, residual, next_weight;
    if (a.bias) bias = V::load(static_cast<const T*>(a.bias) + column);
    if (a.add_residual) residual = V::load(y);
    if (kNormHandoff && a.scaled) next_weight = V::load(static_cast<const T*>(a.next_norm_weight) + column);
    float rstd[1] = {1.f}, sums[kWidth], scales[kWidth], up_scales[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      scales[e] = element.scale(column + e);
      up_scales[e] = a.glu ? element.scale(a.out + column + e) : 1.f;
    }
    if (a.fold_norm) {
      reduce_partials<kGroups>(rstd, plan, layout.squares + 4 * token, 4 * kLinearMaxMmaTokens);
      rstd[0] = rstd_of(a, rstd[0]) * norm_weight_scale<T>(layout);
    } else if (kNormHandoff && a.parts > 0) {
      rstd[0] = shared_load_float(layout.squares + 4 * token);
    }
    const uint32_t partials = layout.partials + 4 * token * plan.pitch;
    const auto reduce_row = [&](int at, const float(&row_scales)[kWidth]) {
      reduce_partials<kGroups>(sums, plan, partials + 4 * at, 4 * a.m * plan.pitch);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] *= rstd[0] * row_scales[e];
    };
    reduce_row(box * plan.box_pitch + row - box * plan.box_rows, scales);
    if (a.bias) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] += bias[e];
    }
    if (a.glu) {
      float gates[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) gates[e] = sums[e];
      reduce_row(plan.box_pitch + row, up_scales);
      activation::dispatch_on_device(a.activation, [&](auto act) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sums[e] = glu_of_sums<decltype(act), T>(gates[e], sums[e]);
      });
    }
    V result = V::of([&](int e) { return sums[e]; });
    if (a.add_residual) result = add_to_residual(residual, result, a.alpha);
    result.store(y);
    if (kNormHandoff && a.scaled) {
      const float factor = 1.f / norm_weight_scale<T>(layout);
      const V scaled = V::of([&](int e) { return result[e] * ((a.next_offset + next_weight[e]) * factor); });
      scaled.store(static_cast<T*>(a.scaled) + token * a.out + column);
      float squares = 0.f;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) squares += result[e] * result[e];
      shared_store_float(partials + 4 * row, squares);  // this thread alone reads these sums, and has done so
    }
  }
  if (kNormHandoff && a.scaled) reduce_squares<T, kWidth, kThreads>(a, layout, first, tile, rank);
}

}  // namespace llmk::kernels::few_tokens
