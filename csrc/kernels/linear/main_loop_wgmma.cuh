// Main loop for up to 64 tokens: two consumer warpgroups, wgmma, float32 accumulators.
//
// W is the A operand (64 rows), and both operands stay in shared memory as TMA wrote them. MMA tiles of 64 rows follow
// one another across the boxes of W and beyond the last row. The sums of such extra rows are not used, and no row
// depends on another.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/wgmma.cuh"
#include "prologue.cuh"

namespace llmk::kernels::few_tokens {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Multiplies the k tiles of this warpgroup up to `end`, those of one output tile, and writes its partial sums to shared
// memory. kTiles: consumer.mma_tiles.
template <typename T, int kColumns, int kTiles, int kThreads>
__device__ void main_loop_wgmma(const Arguments& a, const Layout& layout, Consumer& consumer, int end,
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
  while (consumer.k_tile < end) {
    const uint32_t stage = layout.ring + consumer.stage * plan.stage_bytes;
    uint64_t w = wgmma_operand(stage + consumer.first_mma_tile * 8192);
    uint64_t x = wgmma_operand(stage + plan.boxes * plan.box_bytes);
    barrier_wait(layout.full + 8 * consumer.stage, consumer.phase);
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
    consumer.release(plan, layout);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) wgmma_pin(sums[i]);
  // Other warps may still read the previous tile's partial sums, or the ring where these go.
  named_barrier(kConsumersBarrier, kThreads);
  const int lane = threadIdx.x % 32, first = consumer.first_mma_tile * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int rows = plan.boxes * plan.box_rows;
  int token = lane % 4 * 2;
  float* to = reinterpret_cast<float*>(shared + (layout.partials - layout.full)) +
              (consumer.k_group * a.m + token) * plan.pitch + first;
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

// kColumns, the tokens rounded up, and kMaxTiles, the MMA tiles of a warpgroup, are template parameters because the
// accumulators are in registers.
template <typename T, int kColumns, int kMaxTiles>
struct Wgmma {
  using Element = T;
  static constexpr int kConsumerWarps = 4, kThreads = 128 * kLinearWarpgroups, kBlocksPerSm = 1;
  static constexpr bool kNormHandoff = true;  // `scaled` as input, or as output for the next linear
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr bool kCompiled = true;

  static __device__ void prologue(const Arguments& a, const Layout& layout, int64_t first, unsigned char* shared) {
    if (!a.scaled) return;
    const int64_t column = first + static_cast<int64_t>(threadIdx.x) * 64;
    if (column < min(first + a.plan.tile_rows, a.out)) prefetch_l2(static_cast<const T*>(a.next_norm_weight) + column);
    find_norm_weight_max<T, kThreads>(a.next_norm_weight, static_cast<int>(a.out), layout, shared);
  }
  static __device__ void main_loop(const Arguments& a, const Layout& layout, const KRange&, Consumer& consumer, int,
                                   int end, unsigned char* shared) {
    if (consumer.mma_tiles == 1) {
      main_loop_wgmma<T, kColumns, 1, kThreads>(a, layout, consumer, end, shared);
    } else if (consumer.mma_tiles == 2 || kMaxTiles == 2) {
      main_loop_wgmma<T, kColumns, 2, kThreads>(a, layout, consumer, end, shared);
    } else {
      main_loop_wgmma<T, kColumns, kMaxTiles, kThreads>(a, layout, consumer, end, shared);
    }
  }
#else
  static constexpr bool kCompiled = false;
#endif
};

}  // namespace llmk::kernels::few_tokens
