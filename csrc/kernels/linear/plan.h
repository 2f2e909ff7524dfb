// The launch plan of a linear for few tokens: how the product is tiled. Plain host code.
//
//   output tile   tile_rows rows of the weight for all tokens; owned by a cluster of blocks
//   split-K       over the blocks of the cluster, then over the K groups of a block; partial sums are added at the end
//   k tile        `chunks` chunks of 64 columns of K: one stage of the ring (ring.cuh)
//   consumers     of a block: row_consumers x k_consumers warps (mma.sync) or warpgroups (wgmma)
//   MMA tile      16 rows (mma.sync) or 64 rows (wgmma) of an output tile
//
// Larger clusters mean taller tiles, so that x is read fewer times, and a longer reduction of the partial sums.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmk::kernels {

constexpr int kLinearMaxTokens = 64, kLinearMaxMmaTokens = 16;
constexpr int kLinearWarps = 6;                // consumers with mma.sync, beside the producer warp
constexpr int kLinearWarpgroups = 2;           // consumers with wgmma, likewise
constexpr int kLinearMmaTilesPerConsumer = 3;  // of 16 or 64 rows each
constexpr int kLinearMaxStages = 56;
constexpr int kLinearChunk = 64;  // elements of K: one swizzled row of 128 bytes

struct LinearPlan {
  bool wgmma;
  int cluster;            // blocks that share an output tile
  int boxes;              // 1, or 2: a tall tile, or gate rows and up rows
  int box_rows;           // rows of the weight per box; for wgmma a multiple of 8
  int mma_tiles_per_box;  // mma.sync: of 16 rows
  int mma_tiles;          // of an output tile; those of wgmma, of 64 rows, may cross from one box to the next
  int tile_rows;          // columns of y per output tile
  int output_tiles;
  int row_consumers;  // row_consumers * k_consumers is the number of consumers
  int k_consumers;
  int chunks;     // per stage
  int k_tiles;    // of all of K
  int stages;     // in the ring; a multiple of k_consumers (see ring.cuh)
  int box_bytes;  // from box to box in a stage
  int x_rows;     // tokens in a stage; those beyond m are zeros
  int stage_bytes;
  int transfer_bytes;     // of the copies of a stage: what full[s] expects
  int norm_weight_bytes;  // 0 without a norm
  int box_pitch;          // of the partial sums: rows from box to box
  int pitch;              // of the partial sums: floats from token to token
  bool sums_alias_ring;   // the partial sums take the place of the ring
  size_t shared_bytes;
};

struct LinearShape {
  int64_t m, n, k;  // n: rows of the weight
  bool glu, normalize;
  int weight_bytes = 2;  // of an element
};

// The measured choices, see choose_tuning().
struct LinearTuning {
  bool wgmma;
  int cluster;              // 1, 2, 4 or 8
  int max_chunks;           // per stage
  size_t max_shared_bytes;  // half of an SM would let the next kernel start beside this one
  int max_tile_rows;
  int prefetch_chunks = kLinearMaxStages;  // in the ring for each K group, at most
};

constexpr size_t kLinearBarrierBytes = 1024;
// The barriers, then for each K group the sums of squares of the tokens of mma.sync, or 1 / rms of those of wgmma.
constexpr size_t kLinearHeaderBytes = 3 * 1024;

// Tokens that mma.sync computes, in tiles of 8.
inline int linear_token_tiles(int64_t m) { return m <= 8 ? 1 : 2; }
// Tokens that wgmma computes.
inline int linear_columns(int64_t m) { return m <= 32 ? 32 : m <= 48 ? 48 : 64; }

// clusters[n]: how many clusters of n blocks, one block per SM, run at the same time; n = 1, 2, 4, 8.
inline LinearPlan plan_linear(const LinearShape& shape, const int* clusters, const LinearTuning& tuning) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto round_up = [&](int64_t a, int64_t b) { return static_cast<int>(divide_up(a, b) * b); };
  const bool wgmma = tuning.wgmma;
  const int consumers = wgmma ? kLinearWarpgroups : kLinearWarps, mma_rows = wgmma ? 64 : 16;
  const int row_multiple = wgmma ? 8 : shape.m == 1 ? 1 : 4;  // of rows; 4 for results that are moved 4 at a time
  LinearPlan plan{};
  plan.wgmma = wgmma;
  // As many output tiles as clusters run at once, or (clusters of one) a multiple of that, all of the same height.
  const int64_t out = shape.glu ? shape.n / 2 : shape.n;
  const int64_t max_rows =
      std::min(tuning.max_tile_rows, consumers * kLinearMmaTilesPerConsumer * mma_rows) / (shape.glu ? 2 : 1);
  plan.cluster = tuning.cluster;
  while (plan.cluster > 1 && clusters[plan.cluster] * max_rows < out) plan.cluster /= 2;
  const int64_t rounds = divide_up(out, clusters[plan.cluster] * max_rows);
  const int rows = round_up(divide_up(out, clusters[plan.cluster] * rounds), row_multiple);
  plan.boxes = shape.glu || rows > 256 ? 2 : 1;
  plan.box_rows = !shape.glu && plan.boxes == 2 ? round_up(divide_up(rows, 2), row_multiple) : rows;
  plan.tile_rows = shape.glu ? plan.box_rows : plan.boxes * plan.box_rows;
  plan.output_tiles = static_cast<int>(divide_up(out, plan.tile_rows));
  plan.mma_tiles_per_box = static_cast<int>(divide_up(plan.box_rows, 16));
  plan.mma_tiles =
      wgmma ? static_cast<int>(divide_up(plan.boxes * plan.box_rows, 64)) : plan.boxes * plan.mma_tiles_per_box;
  if (wgmma) {
    plan.row_consumers = plan.mma_tiles > 1 ? 2 : 1;
  } else {
    for (const int warps : {6, 3, 2, 1}) {
      if (warps * kLinearMmaTilesPerConsumer >= plan.mma_tiles) plan.row_consumers = warps;
    }
  }
  plan.k_consumers = consumers / plan.row_consumers;

  const int64_t k_chunks = divide_up(shape.k, kLinearChunk);
  plan.x_rows = wgmma ? linear_columns(shape.m) : static_cast<int>(shape.m);
  plan.box_pitch = wgmma ? plan.box_rows : plan.mma_tiles_per_box * 16;
  plan.pitch = round_up(plan.boxes * plan.box_pitch, 32) + 4;
  const size_t partials = static_cast<size_t>(plan.k_consumers) * shape.m * plan.pitch * sizeof(float);
  // Partial sums with memory of their own let the copies of the next tile overlap the epilogue, if the ring stays large
  // enough.
  plan.sums_alias_ring = !wgmma ? partials > 20 * 1024
                                : plan.output_tiles <= clusters[plan.cluster] || 3 * partials > tuning.max_shared_bytes;
  // The last MMA tile reads beyond the rows that are there, of the weight and of x.
  const size_t slack = wgmma ? (plan.mma_tiles * 64 - plan.boxes * plan.box_rows) * 128
                             : 2048 + (linear_token_tiles(shape.m) * 8 - shape.m) * 128;
  int fitting = 0;  // stages in shared memory
  const auto lay_out = [&](int chunks) {
    plan.chunks = chunks;
    plan.k_tiles = static_cast<int>(divide_up(k_chunks, chunks));
    // The swizzle has a period of 1024 bytes: operands of wgmma must begin with it, and both boxes at the same place.
    plan.box_bytes = round_up(chunks * plan.box_rows * 128, wgmma || plan.boxes == 2 ? 1024 : 128);
    plan.stage_bytes = plan.boxes * plan.box_bytes + round_up(chunks * plan.x_rows * 128, wgmma ? 1024 : 128);
    plan.transfer_bytes = chunks * 128 * (plan.boxes * plan.box_rows + plan.x_rows);
    plan.norm_weight_bytes = shape.normalize ? plan.k_tiles * chunks * 128 : 0;
    const size_t fixed =
        kLinearHeaderBytes + plan.norm_weight_bytes + (plan.sums_alias_ring ? 0 : round_up(partials, 16)) + slack;
    fitting = static_cast<int>((tuning.max_shared_bytes - fixed) / plan.stage_bytes);
    // A block of one output tile has no use for more stages than k tiles; with fewer, the next kernel may start early.
    const bool one_tile = !wgmma && plan.output_tiles <= clusters[plan.cluster];
    const int useful = one_tile ? round_up(plan.k_tiles, plan.k_consumers) : kLinearMaxStages;
    const int prefetched = static_cast<int>(divide_up(tuning.prefetch_chunks, chunks)) * plan.k_consumers;
    plan.stages = std::min({fitting, useful, prefetched, kLinearMaxStages}) / plan.k_consumers * plan.k_consumers;
    const size_t ring = static_cast<size_t>(plan.stages) * plan.stage_bytes;
    plan.shared_bytes = fixed + std::max(ring, plan.sums_alias_ring ? partials : 0);
  };
  // An MMA tile of wgmma that crosses from box to box needs the boxes side by side.
  const bool one_chunk = shape.k % kLinearChunk || (wgmma && plan.boxes == 2);
  int chunks = one_chunk ? 1 : static_cast<int>(std::min<int64_t>(tuning.max_chunks, k_chunks));
  const int min_stages = wgmma ? 4 : 2 * plan.k_consumers;
  for (lay_out(chunks); fitting < min_stages && chunks > 1;) lay_out(--chunks);
  return plan;
}

// Linears without TMA (linear_sm80.cuh): in a step of a warp, each of four lanes has 16 bytes of a row of W, so a step
// is 32 columns of K with elements of two bytes. Registers hold `depth` steps. A block takes all registers of an SM:
// with three MMA tiles for each warp there is room for half as many warps.
constexpr int kLinearSm80MaxTiles = 3;
constexpr int linear_sm80_step(int weight_bytes) { return 64 / weight_bytes; }
constexpr int linear_sm80_warps(int mma_tiles, int weight_bytes) {
  return mma_tiles < (weight_bytes == 1 ? 2 : 3) ? 16 : 8;
}
constexpr int linear_sm80_depth(int mma_tiles, int token_tiles, int weight_bytes) {
  if (weight_bytes == 1) return mma_tiles == 1 ? (token_tiles == 1 ? 3 : 2) : mma_tiles == 2 ? 4 : 3;
  return mma_tiles == 1 ? (token_tiles == 1 ? 4 : 3) : mma_tiles == 2 ? 2 : 3;
}
// For device code, which may call no host function.
template <int kMmaTiles, int kWeightBytes>
constexpr int kLinearSm80Warps = linear_sm80_warps(kMmaTiles, kWeightBytes);
template <int kMmaTiles, int kTokenTiles, int kWeightBytes>
constexpr int kLinearSm80Depth = linear_sm80_depth(kMmaTiles, kTokenTiles, kWeightBytes);
template <int kWeightBytes>
constexpr int kLinearSm80Eights = linear_sm80_step(kWeightBytes) / 32;  // of columns, of a lane's 16 bytes of W

// Of the fields of LinearPlan, mma_tiles and k_tiles are here those of one warp: its MMA tiles, and its steps through
// K, a multiple of the depth.
inline LinearPlan plan_linear_sm80(const LinearShape& shape, int sm_count) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  LinearPlan plan{};
  plan.cluster = 1;
  plan.boxes = shape.glu ? 2 : 1;
  plan.x_rows = static_cast<int>(shape.m);
  // The SM with the most tiles decides. A tile's time is that of its rows of W, a fifth of that for each token, and its
  // epilogue; each split of the rows costs a hundredth. Within 2 % of the best of all tiles that were measured on an
  // H200, 512 x 4096 to 151936 x 896, 1 and 16 tokens; but 10 % at 1152 x 896.
  const int64_t out = shape.glu ? shape.n / 2 : shape.n;
  double least = 0;
  for (const int parts : {1, 2, 4}) {
    for (int rows = kLinearSm80MaxTiles / plan.boxes * 16; rows > 0; rows -= 4) {
      const int64_t tiles = divide_up(out, parts * rows);
      const double weight_rows = plan.boxes * parts * rows * (shape.weight_bytes / 2.0);
      const double bytes = (weight_rows + 0.2 * static_cast<double>(shape.m)) * 2 * shape.k + 2000;
      const double cost = static_cast<double>(divide_up(tiles, sm_count)) * bytes * (1 + 0.01 * (parts - 1));
      if (least > 0 && cost >= least) continue;
      least = cost, plan.row_consumers = parts, plan.box_rows = parts * rows;
      plan.output_tiles = static_cast<int>(tiles);
    }
  }
  plan.tile_rows = plan.box_rows;
  plan.mma_tiles_per_box = static_cast<int>(divide_up(plan.box_rows / plan.row_consumers, 16));
  plan.mma_tiles = plan.boxes * plan.mma_tiles_per_box;
  plan.k_consumers = linear_sm80_warps(plan.mma_tiles, shape.weight_bytes) / plan.row_consumers;
  const int depth = linear_sm80_depth(plan.mma_tiles, linear_token_tiles(shape.m), shape.weight_bytes);
  const int columns = linear_sm80_step(shape.weight_bytes) * plan.k_consumers;
  plan.k_tiles = static_cast<int>(divide_up(divide_up(shape.k, columns), depth)) * depth;
  plan.box_pitch = plan.box_rows;
  plan.pitch = static_cast<int>(divide_up(plan.boxes * plan.box_rows - 4, 8)) * 8 + 4;  // stores cover all banks
  plan.shared_bytes = kLinearHeaderBytes + static_cast<size_t>(plan.k_consumers) * shape.m * plan.pitch * sizeof(float);
  return plan;
}

// Shape classes of the tables below, by how many rows an SM gets.
inline bool linear_has_many_rows(int64_t n, const int* clusters) { return n > int64_t{128} * clusters[1]; }
// Whether the rows of two SMs fit one tile of wgmma.
inline bool linear_has_few_rows(int64_t n, const int* clusters) { return n <= int64_t{64} * clusters[2]; }
inline bool linear_has_very_few_rows(int64_t n, const int* clusters) { return n <= int64_t{32} * clusters[2]; }
inline bool linear_has_long_rows(int64_t k) { return k > 8192; }

// Up to 16 tokens take mma.sync, which folds the norm; more take wgmma. A gated activation keeps fewer bytes in flight,
// which leaves more to the kernels around it.
//
// Measured on an H200, weights of models of 0.5 to 8 billion parameters, 256 x 2048 to 152064 x 3584:
//
//   value                       | case                                   | result
//   ----------------------------|----------------------------------------|-----------------------------------------
//   mma.sync
//   max_tile_rows 96            | many rows                              | 2 to 5 % faster than the tallest that fit
//   chunks 2                    | not many rows                          | 11 to 27 % faster than 1
//   chunks 3, 2 stages per warp | not many rows                          | 1 to 5 % faster than chunks 2
//   chunks 3, 1 stage per warp  | not many rows                          | 10 to 20 % slower than 2 stages
//   chunks 3, 3 stages per warp | not many rows                          | up to 5 % slower than 2 stages
//   chunks 6                    | very few rows, long K: the producer    | 4 to 43 % faster than 3
//                               | takes 150 ns for each stage            |
//   chunks 6                    | very few rows, short K: too few stages | 4 to 12 % slower than 3
//   wgmma
//   cluster 2                   | few rows, and long K or few tokens:    | 5 % faster than 1
//                               | reads x half as often                  |
//   cluster 2                   | few rows, short K and many tokens      | slower than 1
//   cluster 4, 8                | all                                    | never best
//   max_shared_bytes less       | all; the next kernel could start early | never best
inline LinearTuning choose_tuning(const LinearShape& shape, const int* clusters) {
  constexpr size_t kLessShared = 160 * 1024, kShared = 200 * 1024, kMostShared = 225 * 1024;
  const bool many_rows = linear_has_many_rows(shape.n, clusters);
  if (shape.m <= kLinearMaxMmaTokens) {
    if (many_rows) return {false, 1, 2, shape.glu ? kLessShared : kShared, 96};
    const int chunks = shape.n <= int64_t{20} * clusters[1] && shape.k > 2048 ? 6 : 3;
    return {false, 1, chunks, kMostShared, 288, 2 * chunks};
  }
  if (many_rows) {
    if (shape.m > 32) return {true, 1, 1, kShared, 288};
    return {true, 1, 2, kMostShared, shape.glu ? 96 : 64};
  }
  const bool two_blocks = linear_has_few_rows(shape.n, clusters) && (linear_has_long_rows(shape.k) || shape.m <= 32);
  return {true, two_blocks ? 2 : 1, 2, kShared, 288};
}

}  // namespace llmk::kernels
