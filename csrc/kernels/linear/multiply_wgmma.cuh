// The products for up to 64 tokens: two warpgroups multiply with wgmma, W as the 64-row operand, both operands where
// the copies put them. The rows are cut into tiles of 64 without regard to where boxes, or the rows that were copied,
// end: the sums of a row depend on nothing else, and what other bytes are taken for rows is not used.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/wgmma.cuh"
#include "prologue.cuh"

namespace llmk::kernels::few_tokens {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Sums up the stages of this warpgroup up to `end`, counted from the first tile on, and writes the partial sums of the
// tile. kTiles: worker.tiles.
template <typename T, int kColumns, int kTiles, int kThreads>
__device__ void multiply_wgmma(const Arguments& a, const Layout& layout, Worker& worker, int end,
                               unsigned char* shared) {
  const LinearPlan& plan = a.plan;
  const uint32_t w_chunk = plan.box_rows * 128 / 16, x_chunk = kColumns * 128 / 16;
  float sums[kTiles][kColumns / 2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) sums[i][j] = 0.f;
    wgmma_pin(sums[i]);
  }
  while (worker.stage < end) {
    const uint32_t stage = layout.ring + worker.slot * plan.stage_bytes;
    uint64_t w = wgmma_operand(stage + worker.first_tile * 8192);
    uint64_t x = wgmma_operand(stage + plan.boxes * plan.box_bytes);
    barrier_wait(layout.full + 8 * worker.slot, worker.phase);
#pragma unroll 1
    for (int c = 0; c < plan.chunks; ++c, w += w_chunk, x += x_chunk) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kLinearChunk / 16; ++k) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) wgmma<T>(sums[i], w + i * (8192 / 16) + k * 2, x + k * 2);
      }
      wgmma_commit();
    }
    wgmma_wait<0>();  // the other warpgroup keeps the tensor cores busy
    worker.release(plan, layout);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) wgmma_pin(sums[i]);
  // Others may still read the tile before this one, or the ring where the partial sums go.
  named_barrier(kConsumers, kThreads);
  const int lane = threadIdx.x % 32, first = worker.first_tile * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int rows = plan.boxes * plan.box_rows;
  int token = lane % 4 * 2;
  float* to = reinterpret_cast<float*>(shared + (layout.partials - layout.full)) +
              (worker.group * a.m + token) * plan.pitch + first;
#pragma unroll
  for (int j = 0; j < kColumns / 2; j += 4, token += 8, to += 8 * plan.pitch) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = i * 64 + e / 2 * 8;
        if (token + e % 2 < a.m && first + row < rows) to[e % 2 * plan.pitch + row] = sums[i][j + e];
      }
    }
  }
}

#endif

// kColumns, the tokens with those that fill up, and kMaxTiles, of a warpgroup, are template parameters because the sums
// are in registers.
template <typename T, int kColumns, int kMaxTiles>
struct Wgmma {
  using Element = T;
  static constexpr int kWorkerWarps = 4, kThreads = 128 * kLinearWarpgroups, kBlocksPerSm = 1;
  static constexpr bool kScaled = true;  // x may be scaled already, or the result is to be
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr bool kHere = true;

  static __device__ void prepare(const Arguments& a, const Layout& layout, int64_t first, unsigned char* shared) {
    if (!a.scaled) return;
    const int64_t column = first + static_cast<int64_t>(threadIdx.x) * 64;
    if (column < min(first + a.plan.tile_rows, a.out)) prefetch_l2(static_cast<const T*>(a.next_norm_weight) + column);
    find_largest<T, kThreads>(a.next_norm_weight, static_cast<int>(a.out), layout, shared);
  }
  static __device__ void multiply(const Arguments& a, const Layout& layout, const Slice&, Worker& worker, int, int end,
                                  unsigned char* shared) {
    if (worker.tiles == 1) {
      multiply_wgmma<T, kColumns, 1, kThreads>(a, layout, worker, end, shared);
    } else if (worker.tiles == 2 || kMaxTiles == 2) {
      multiply_wgmma<T, kColumns, 2, kThreads>(a, layout, worker, end, shared);
    } else {
      multiply_wgmma<T, kColumns, kMaxTiles, kThreads>(a, layout, worker, end, shared);
    }
  }
#else
  static constexpr bool kHere = false;
#endif
};

}  // namespace llmk::kernels::few_tokens
