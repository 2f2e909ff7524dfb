// Main loop for up to 16 tokens: six consumer warps, mma.sync, float32 accumulators.
//
// W is the A operand (16 rows) and x the B operand (8 tokens), so 8 tokens cost no more than one. Both operands are
// read by ldmatrix from rows of 128 bytes in TMA's 128-byte swizzle: 16-byte vector v of row r lies at v ^ (r % 8), so
// that a read covers every bank once.
#pragma once
#include "device/mma.cuh"
#include "prologue.cuh"

namespace llmk::kernels::few_tokens {

// Adds the squares of 8 tokens: the diagonal of x x^T. A lane gets two elements of row lane / 4, as of any product.
template <typename T>
__device__ inline void mma_squares(float (&d)[2], uint32_t low, uint32_t high) {
  float all[4] = {d[0], d[1], 0.f, 0.f};
  mma_16x8x16<T>(all, {low, 0, high, 0}, low, high);
  d[0] = all[0], d[1] = all[1];
}

// The address of 16-byte vector `vector` of the swizzled row at `row`.
__device__ inline uint32_t swizzled(uint32_t row, int vector) { return row + (vector ^ (row / 128 % 8)) * 16; }

// The sums of a warp: kTiles MMA tiles of 16 rows of W for kTokenTiles tiles of 8 tokens, and the tokens' squares.
template <typename T, int kTokenTiles, int kTiles>
struct Products {
  float sums[kTiles][kTokenTiles][4], squares[kTokenTiles][2];

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      squares[n][0] = squares[n][1] = 0.f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) sums[i][n][0] = sums[i][n][1] = sums[i][n][2] = sums[i][n][3] = 0.f;
    }
  }

  // A chunk of 64 columns of K. Addresses of this lane for ldmatrix, which loads four 8 x 8 matrices: w_row(i, flip) of
  // MMA tile i, 16 rows by two vectors of 8 columns; x of the first 8 tokens by four vectors; norm_weight(flip) returns
  // four vectors of the norm's weight. `flip`: what the address is to be XORed with. owns_squares(n): whether this warp
  // sums up the squares of token tile n.
  template <typename RowOf, typename NormWeight, typename Owns>
  __device__ void add_chunk(const RowOf& w_row, uint32_t x, bool fold_norm, bool norm_offset,
                            const NormWeight& norm_weight, const Owns& owns_squares) {
#pragma unroll
    for (int half = 0; half < 128; half += 64) {
      uint32_t rows[2][kTiles][4], scales[4], b[kTokenTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        load_matrices(rows[0][i], w_row(i, half));
        load_matrices(rows[1][i], w_row(i, half ^ 32));
      }
      if (fold_norm) norm_weight(scales, half);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) load_matrices(b[n], (x ^ half) + n * 1024);
      if (fold_norm) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          if (owns_squares(n)) {
            mma_squares<T>(squares[n], b[n][0], b[n][1]);
            mma_squares<T>(squares[n], b[n][2], b[n][3]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) b[n][i] = apply_norm_weight<T>(b[n][i], scales[i], norm_offset);
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

  // Writes the sums of the K group's `m` tokens to shared memory, those of row `row` of MMA tile `i` to at(i, row); a
  // negative one: nowhere.
  template <typename At, typename Owns>
  __device__ void store(const Arguments& a, const Layout& layout, int k_group, unsigned char* shared, const At& at,
                        const Owns& owns_squares) const {
    const LinearPlan& plan = a.plan;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, m = a.m;
    const uint32_t base = layout.full;
    float* const partials = reinterpret_cast<float*>(shared + (layout.partials - base)) + k_group * m * plan.pitch;
    float* const squares_of =
        reinterpret_cast<float*>(shared + (layout.squares - base)) + k_group * kLinearMaxMmaTokens;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      if (a.fold_norm && owns_squares(n) && t == g / 2) squares_of[n * 8 + g] = g % 2 ? squares[n][1] : squares[n][0];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = n * 8 + 2 * t + e % 2, to = at(i, g + e / 2 * 8);
          if (token < m && to >= 0) partials[token * plan.pitch + to] = sums[i][n][e];
        }
      }
    }
  }
};

#if __CUDA_ARCH__ >= 900

// Multiplies the k tiles of this warp in [begin, end), those of one output tile, and writes its partial sums to shared
// memory. kTiles: consumer.mma_tiles.
template <typename T, int kTokenTiles, int kTiles, int kThreads>
__device__ void main_loop_mma(const Arguments& a, const Layout& layout, const KRange& k_range, Consumer& consumer,
                              int begin, int end, unsigned char* shared) {
  const LinearPlan& plan = a.plan;
  const int lane = threadIdx.x % 32, m = a.m, chunks = plan.chunks;
  const uint32_t chunk_bytes = plan.box_rows * 128;
  const int w_vector = lane / 16, x_vector = lane / 8;
  // Each of the (at most two) token tiles has one row consumer that sums up its squares.
  const auto owns_squares = [&](int n) { return (n < plan.row_consumers ? n : 0) == consumer.row_consumer; };
  uint32_t offset[kTiles];
  Products<T, kTokenTiles, kTiles> products;
  products.clear();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int tile = consumer.first_mma_tile + i, box = tile >= plan.mma_tiles_per_box;
    offset[i] = box * plan.box_bytes + (tile - box * plan.mma_tiles_per_box) * 2048;
  }
  while (consumer.k_tile < end) {
    const uint32_t w = layout.ring + consumer.stage * plan.stage_bytes, x = w + plan.boxes * plan.box_bytes;
    uint32_t w_row = w + lane % 16 * 128, x_row = x + lane % 8 * 128;
    uint32_t norm_weight =
        layout.norm_weight + (k_range.begin + consumer.k_tile - begin) * chunks * 128 + x_vector * 16;
    barrier_wait(layout.full + 8 * consumer.stage, consumer.phase);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, w_row += chunk_bytes, x_row += m * 128, norm_weight += 128) {
      const uint32_t w_lane = swizzled(w_row, w_vector), x_lane = swizzled(x_row, x_vector);
      products.add_chunk(
          [&](int i, int flip) { return offset[i] + (w_lane ^ flip); }, x_lane, a.fold_norm, a.norm_offset,
          [&](uint32_t(&scales)[4], int flip) { load_matrices(scales, norm_weight + flip); }, owns_squares);
    }
    consumer.release(plan, layout);
  }
  // Other warps may still read the previous tile's partial sums, or the ring where these go.
  named_barrier(kConsumersBarrier, kThreads);
  const auto at = [&](int i, int row) { return (consumer.first_mma_tile + i) * 16 + row; };
  products.store(a, layout, consumer.k_group, shared, at, owns_squares);
}

#endif

// Up to kTokenTiles * 8 tokens; a template parameter because the accumulators are in registers.
template <typename T, int kTokenTiles>
struct MmaSync {
  using Element = T;
  static constexpr int kConsumerWarps = 1, kThreads = 32 * kLinearWarps, kBlocksPerSm = 2;
  static constexpr bool kNormHandoff = false;
#if __CUDA_ARCH__ >= 900
  static constexpr bool kCompiled = true;

  static __device__ void prologue(const Arguments& a, const Layout& layout, int64_t, unsigned char* shared) {
    if (a.fold_norm) load_norm_weight<T, kThreads>(a, layout, shared);
  }
  static __device__ void main_loop(const Arguments& a, const Layout& layout, const KRange& k_range, Consumer& consumer,
                                   int begin, int end, unsigned char* shared) {
    switch (consumer.mma_tiles) {
      case 1: main_loop_mma<T, kTokenTiles, 1, kThreads>(a, layout, k_range, consumer, begin, end, shared); break;
      case 2: main_loop_mma<T, kTokenTiles, 2, kThreads>(a, layout, k_range, consumer, begin, end, shared); break;
      default: main_loop_mma<T, kTokenTiles, 3, kThreads>(a, layout, k_range, consumer, begin, end, shared); break;
    }
  }
#else
  static constexpr bool kCompiled = false;
#endif
};

}  // namespace llmk::kernels::few_tokens
