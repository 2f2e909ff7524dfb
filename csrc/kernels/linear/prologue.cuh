// RMSNorm of x, folded into a linear for few tokens. With w the norm's weight plus its offset:
//
//   (x / rms * w) W^T = (1 / rms) ((x w) W^T)
//
// Before the products x is multiplied by w, and its squares are summed up; the epilogue multiplies by 1 / rms.
//
//   mma.sync   does both as it reads x from shared memory
//   wgmma      reads x where TMA wrote it. There the previous linear, which adds to the residual, has done both: its
//              epilogue stores the new residual times w (`scaled`) and partial sums of its squares (`squares`)
//
// In float16 w is divided by a power of two, and the epilogue multiplies by it again: norm_weight.cuh.
#pragma once
#include <type_traits>

#include "device/vec.cuh"
#include "norm_weight.cuh"
#include "ring.cuh"

namespace llmk::kernels::few_tokens {

// The power of two that the norm's weight is divided by.
template <typename T>
__device__ float norm_weight_scale(const Layout& layout) {
  if constexpr (!std::is_same_v<T, __half>) return 1.f;
  return kernels::norm_weight_scale<T>(shared_load_int(layout.norm_weight_max));
}

// Finds layout.norm_weight_max, the bits of the largest magnitude, for norm_weight_scale(). For all consumer threads.
template <typename T, int kThreads>
__device__ void find_norm_weight_max(const void* weight, int count, const Layout& layout, unsigned char* shared) {
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t largest = largest_of_weight(weight, count / 8, static_cast<int>(threadIdx.x), kThreads);
    largest = __reduce_max_sync(0xffffffffu, largest);
    auto* const of_all = reinterpret_cast<uint32_t*>(shared + (layout.norm_weight_max - layout.full));
    if (threadIdx.x % 32 == 0) atomicMax(of_all, largest);
    named_barrier(kConsumersBarrier, kThreads);
  }
}

// Loads the norm's weight, divided by its scale, to shared memory; zeros beyond K, as in the copies of x.
template <typename T, int kThreads>
__device__ void load_norm_weight(const Arguments& a, const Layout& layout, unsigned char* shared) {
  using V = Vec<T, 8>;
  find_norm_weight_max<T, kThreads>(a.norm_weight, a.k, layout, shared);
  const float factor = 1.f / norm_weight_scale<T>(layout);
  V* const target = reinterpret_cast<V*>(shared + (layout.norm_weight - layout.full));
  const int count = a.k / 8, padded = a.plan.k_tiles * a.plan.chunks * (kLinearChunk / 8);
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    V w = V::of([](int) { return 0.f; });
    if (i < count) w = V::load(static_cast<const T*>(a.norm_weight) + i * 8);
    target[i] = V::of([&](int e) { return w[e] * factor; });
  }
  named_barrier(kConsumersBarrier, kThreads);
}

// Two elements of x times the norm's weight (plus its offset, 0 or 1), rounded once.
template <typename T>
__device__ inline uint32_t apply_norm_weight(uint32_t x, uint32_t weight, bool offset) {
  using Two = typename Pair<T>::type;
  const Two a = reinterpret_cast<const Two&>(x), w = reinterpret_cast<const Two&>(weight);
  const Two product = offset ? __hfma2(a, w, a) : __hmul2_rn(a, w);
  return reinterpret_cast<const uint32_t&>(product);
}

// 1 / rms of a row, from the sum of its squares.
__device__ inline float rstd_of(const Arguments& a, float squares) {
  return kernels::rstd_of(squares, 1.f / static_cast<float>(a.k), a.eps);
}

// Adds up the partial sums of squares that the previous linear has left, and writes each token's 1 / rms times the
// weight's scale to shared memory, for the epilogue. For one warp.
__device__ inline void load_rstd(const Arguments& a, const Layout& layout, unsigned char* shared) {
  const int lane = threadIdx.x % 32;
  const int quads = a.m <= kLinearMaxTokens / 2 ? kLinearMaxTokens / 8 : kLinearMaxTokens / 4;  // of tokens
  const int quad = lane % quads, slices = 32 / quads;
  float sums[4] = {};
#pragma unroll 12
  for (int part = lane / quads; part < a.parts; part += slices) {
    const float4 v = reinterpret_cast<const float4*>(a.squares + part * kHandoffTokens)[quad];
    sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
  }
  const float norm_weight_scale = a.squares[a.parts * kHandoffTokens];
  for (int other = quads; other < 32; other *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], other);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = rstd_of(a, sums[i]) * norm_weight_scale;
  if (lane < quads) {
    reinterpret_cast<float4*>(shared + (layout.squares - layout.full))[quad] = {sums[0], sums[1], sums[2], sums[3]};
  }
}

}  // namespace llmk::kernels::few_tokens
