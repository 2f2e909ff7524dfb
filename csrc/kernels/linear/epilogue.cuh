// What follows the products: partial sums are added up, in a fixed order, and become results.
#pragma once
#include "device/swiglu.cuh"
#include "device/vec.cuh"
#include "ring.cuh"

namespace llmk::kernels::few_tokens {

#if __CUDA_ARCH__ >= 900

__device__ inline float shared_load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ inline float4 shared_load_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

// The sum of what lies `step` bytes apart from `from` on, once for each group, and that over the blocks of the cluster.
template <int kWidth>
__device__ void gather(float (&sums)[kWidth], const LinearPlan& plan, uint32_t from, int step) {
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
    for (int group = 0; group < kLinearWarps; ++group) {
      if (group < plan.k_workers) add(from + group * step, shared_load_float, shared_load_float4);
    }
    return;
  }
  for (int group = 0; group < plan.k_workers; ++group) {
#pragma unroll 4
    for (int rank = 0; rank < plan.cluster; ++rank) {
      add(cluster_address(from + group * step, rank), cluster_load, cluster_load4);
    }
  }
}

// Turns the partial sums into the columns [first, first + rows of the tile) of y.
template <typename T, int kWidth, int kThreads>
__device__ void finish(const Arguments& a, const Layout& layout, int64_t first, int rank) {
  using V = Vec<T, kWidth>;
  const LinearPlan& plan = a.plan;
  const int rows = plan.tile_rows, per_token = rows / kWidth;
  for (int i = rank * kThreads + threadIdx.x; i < a.m * per_token; i += plan.cluster * kThreads) {
    const int token = divide(i, per_token), row = (i - token * per_token) * kWidth;
    const int64_t column = first + row;
    if (column >= a.out) continue;
    const int box = !a.swiglu && row >= plan.box_rows;
    T* const y = static_cast<T*>(a.y) + token * a.y_stride + column;
    // Loads from memory first: behind the weights that are under way they take a while.
    V bias, before;
    if (a.bias) bias = V::load(static_cast<const T*>(a.bias) + column);
    if (a.add) before = V::load(y);
    float rstd[1] = {1.f}, sums[kWidth];
    if (a.fold) {
      gather(rstd, plan, layout.squares + 4 * token, 4 * kLinearMaxTokens);
      rstd[0] = rsqrtf(rstd[0] * (1.f / static_cast<float>(a.k)) + a.eps);
    }
    const auto gather_row = [&](int at) {
      gather(sums, plan, layout.partials + 4 * (token * plan.pitch + at), 4 * a.m * plan.pitch);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] *= rstd[0];
    };
    gather_row(box * plan.box_pitch + row - box * plan.box_rows);
    if (a.bias) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] += bias[e];
    }
    if (a.swiglu) {
      float gates[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) gates[e] = sums[e];
      gather_row(plan.box_pitch + row);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] = swiglu<T>(gates[e], sums[e]);
    }
    V result = V::of([&](int e) { return sums[e]; });
    if (a.add) result = add(before, result);
    result.store(y);
  }
}

#endif

}  // namespace llmk::kernels::few_tokens
