// The products for up to 16 tokens: six warps multiply with mma.sync, W as the 16-row operand, so that 8 tokens cost no
// more than one. Since the order of k does not matter where both operands agree, a lane takes 16 contiguous bytes as
// its part of two instructions; copies are swizzled (16-byte units exclusive-or the number of their 128 bytes), and
// lane t of a row takes the units 2t and 2t + 1, which touches every bank once.
#pragma once
#include "device/mma.cuh"
#include "prologue.cuh"

namespace llmk::kernels::few_tokens {

#if __CUDA_ARCH__ >= 900

// The diagonal of the upper half of x x^T: the sums of the squares of 8 tokens, of which this lane gets two elements
// of its row.
template <typename T>
__device__ inline void mma_squares(float (&d)[2], uint32_t low, uint32_t high) {
  float all[4] = {d[0], d[1], 0.f, 0.f};
  mma_16x8x16<T>(all, {low, 0, high, 0}, low, high);
  d[0] = all[0], d[1] = all[1];
}

// Where the 16 bytes `unit` of the 128 bytes at `row` are.
__device__ inline uint32_t swizzled(uint32_t row, int unit) { return row + (unit ^ (row / 128 % 8)) * 16; }

// Sums up the stages of this warp up to `end`, counted from the first tile on, and writes the partial sums of the tile.
// `begin` is where the tile began; kTiles: worker.tiles.
template <typename T, int kTokenTiles, int kTiles, int kThreads>
__device__ void multiply_mma(const Arguments& a, const Layout& layout, const Slice& slice, Worker& worker, int begin,
                             int end, unsigned char* shared) {
  const LinearPlan& plan = a.plan;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, m = a.m, chunks = plan.chunks;
  const uint32_t chunk_bytes = plan.box_rows * 128;
  // Of the 16 rows of W and two units of 8 elements that make an operand, and of the 8 tokens and four units that make
  // two.
  const int w_unit = lane / 16, x_unit = lane / 8;
  const bool fold = a.fold;
  // Of each token tile one row worker sums up the squares: the tile's number modulo the workers, of at most two tiles.
  const auto squares_are_mine = [&](int n) { return (n < plan.row_workers ? n : 0) == worker.row_worker; };
  uint32_t offset[kTiles];
  float sums[kTiles][kTokenTiles][4], squares[kTokenTiles][2];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) squares[n][0] = squares[n][1] = 0.f;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int tile = worker.first_tile + i, box = tile >= plan.tiles_per_box;
    offset[i] = box * plan.box_bytes + (tile - box * plan.tiles_per_box) * 2048;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) sums[i][n][0] = sums[i][n][1] = sums[i][n][2] = sums[i][n][3] = 0.f;
  }
  while (worker.stage < end) {
    const uint32_t w = layout.ring + worker.slot * plan.stage_bytes, x = w + plan.boxes * plan.box_bytes;
    uint32_t w_row = w + lane % 16 * 128, x_row = x + lane % 8 * 128;
    uint32_t norm_weight = layout.norm_weight + (slice.begin + worker.stage - begin) * chunks * 128 + x_unit * 16;
    barrier_wait(layout.full + 8 * worker.slot, worker.phase);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, w_row += chunk_bytes, x_row += m * 128, norm_weight += 128) {
      const uint32_t w_lane = swizzled(w_row, w_unit), x_lane = swizzled(x_row, x_unit);
#pragma unroll
      for (int half = 0; half < 128; half += 64) {
        uint32_t rows[2][kTiles][4], scales[4], b[kTokenTiles][4];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          load_matrices(rows[0][i], offset[i] + (w_lane ^ half));
          load_matrices(rows[1][i], offset[i] + (w_lane ^ half ^ 32));
        }
        if (fold) load_matrices(scales, norm_weight + half);
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) load_matrices(b[n], (x_lane ^ half) + n * 1024);
        if (fold) {
#pragma unroll
          for (int n = 0; n < kTokenTiles; ++n) {
            if (squares_are_mine(n)) {
              mma_squares<T>(squares[n], b[n][0], b[n][1]);
              mma_squares<T>(squares[n], b[n][2], b[n][3]);
            }
#pragma unroll
            for (int unit = 0; unit < 4; ++unit) b[n][unit] = scaled<T>(b[n][unit], scales[unit], a.norm_offset);
          }
        }
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) mma_16x8x16<T>(sums[i][n], rows[0][i], b[n][0], b[n][1]);
        }
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) mma_16x8x16<T>(sums[i][n], rows[1][i], b[n][2], b[n][3]);
        }
      }
    }
    worker.release(plan, layout);
  }
  // Others may still read the tile before this one, or the ring where the partial sums go.
  named_barrier(kConsumers, kThreads);
  const uint32_t base = layout.full;
  float* const partials = reinterpret_cast<float*>(shared + (layout.partials - base)) + worker.group * m * plan.pitch;
  float* const squares_of =
      reinterpret_cast<float*>(shared + (layout.squares - base)) + worker.group * kLinearMaxTokens;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    if (fold && squares_are_mine(n) && t == g / 2) squares_of[n * 8 + g] = g % 2 ? squares[n][1] : squares[n][0];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = n * 8 + 2 * t + e % 2, at = (worker.first_tile + i) * 16 + g + e / 2 * 8;
        if (token < m) partials[token * plan.pitch + at] = sums[i][n][e];
      }
    }
  }
}

#endif

// kTokenTiles, of 8, is a template parameter because the sums are in registers.
template <typename T, int kTokenTiles>
struct MmaSync {
  using Element = T;
  static constexpr int kWorkerWarps = 1, kThreads = 32 * kLinearWarps, kBlocksPerSm = 2;
  static constexpr bool kScaled = false;
#if __CUDA_ARCH__ >= 900
  static constexpr bool kHere = true;

  static __device__ void prepare(const Arguments& a, const Layout& layout, int64_t, unsigned char* shared) {
    if (a.fold) stage_norm_weight<T, kThreads>(a, layout, shared);
  }
  static __device__ void multiply(const Arguments& a, const Layout& layout, const Slice& slice, Worker& worker,
                                  int begin, int end, unsigned char* shared) {
    switch (worker.tiles) {
      case 1: multiply_mma<T, kTokenTiles, 1, kThreads>(a, layout, slice, worker, begin, end, shared); break;
      case 2: multiply_mma<T, kTokenTiles, 2, kThreads>(a, layout, slice, worker, begin, end, shared); break;
      default: multiply_mma<T, kTokenTiles, 3, kThreads>(a, layout, slice, worker, begin, end, shared); break;
    }
  }
#else
  static constexpr bool kHere = false;
#endif
};

}  // namespace llmk::kernels::few_tokens
