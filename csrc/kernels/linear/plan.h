// How a linear for few tokens is spread over the GPU. Plain host code.
//
// A cluster of blocks owns a tile of output rows (rows of the weight) and splits K between its blocks. Within a block
// the rows are split between workers, warps that use mma.sync or warpgroups that use wgmma; where there are more
// workers than rows for them, groups of workers take turns at the stages of a ring. More blocks per cluster mean taller
// tiles, so that x is read fewer times, and a longer reduction at the end.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmk::kernels {

constexpr int kLinearMaxTokens = 64, kLinearMaxMmaTokens = 16;
constexpr int kLinearWarps = 6;           // that compute with mma.sync; one more copies
constexpr int kLinearWarpgroups = 2;      // that compute with wgmma
constexpr int kLinearTilesPerWorker = 3;  // of 16 or 64 rows each
constexpr int kLinearMaxStages = 56;
constexpr int kLinearChunk = 64;  // elements of K: one swizzled row of 128 bytes

struct LinearPlan {
  bool wgmma;
  int cluster;        // blocks that share a tile
  int boxes;          // 1, or 2: a tall tile, or gate rows and up rows
  int box_rows;       // rows of the weight per box; for wgmma a multiple of 8
  int tiles_per_box;  // mma.sync: of 16 rows
  int row_tiles;      // in all; those of wgmma, of 64 rows, do not stop at a box's end
  int tile_rows;      // columns of y per tile of the output
  int tiles;          // of the output
  int row_workers;    // row_workers * k_workers is the number of workers
  int k_workers;
  int chunks;     // per stage
  int k_stages;   // that make up K
  int stages;     // in the ring; a multiple of k_workers, so that a slot always belongs to the same workers
  int box_bytes;  // from box to box in a stage
  int x_rows;     // tokens in a stage; those beyond m are zeros
  int stage_bytes;
  int transfer_bytes;     // what arrives in a stage
  int norm_weight_bytes;  // 0 without a norm
  int box_pitch;          // rows from box to box of the partial sums
  int pitch;              // floats between the tokens of the partial sums
  bool alias;             // the partial sums lie where the ring was
  size_t shared_bytes;
};

struct LinearShape {
  int64_t m, n, k;  // n: rows of the weight
  bool swiglu, normalize;
};

// What is chosen as it was measured, see choose_tuning().
struct LinearTuning {
  bool wgmma;
  int cluster;                   // 1, 2, 4 or 8
  int chunks;                    // at most
  size_t shared_bytes;           // at most; half of an SM lets the next kernel begin beside this one
  int rows;                      // of the weight in a tile, at most
  int ahead = kLinearMaxStages;  // chunks in the ring for each worker, at most
};

constexpr size_t kLinearBarrierBytes = 1024;
// Barriers, then sums of squares by warp and token.
constexpr size_t kLinearHeaderBytes = 3 * 1024;

// Tokens that mma.sync computes, in tiles of 8.
inline int linear_token_tiles(int64_t m) { return m <= 8 ? 1 : 2; }
// Tokens that wgmma computes.
inline int linear_columns(int64_t m) { return m <= 32 ? 32 : m <= 48 ? 48 : 64; }

// clusters[n]: of n blocks, each on an SM of its own, that run at the same time; n = 1, 2, 4, 8.
inline LinearPlan plan_linear(const LinearShape& shape, const int* clusters, const LinearTuning& tuning) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto round_up = [&](int64_t a, int64_t b) { return static_cast<int>(divide_up(a, b) * b); };
  const bool wgmma = tuning.wgmma;
  const int workers = wgmma ? kLinearWarpgroups : kLinearWarps, tile_height = wgmma ? 64 : 16;
  const int unit = wgmma ? 8 : shape.m == 1 ? 1 : 4;  // of rows; 4 for results that are moved 4 at a time
  LinearPlan plan{};
  plan.wgmma = wgmma;
  // As many tiles as clusters fit the GPU at once, or (clusters of one) a multiple of that, all of the same height.
  const int64_t out = shape.swiglu ? shape.n / 2 : shape.n;
  const int64_t most = std::min(tuning.rows, workers * kLinearTilesPerWorker * tile_height) / (shape.swiglu ? 2 : 1);
  plan.cluster = tuning.cluster;
  while (plan.cluster > 1 && clusters[plan.cluster] * most < out) plan.cluster /= 2;
  const int64_t rounds = divide_up(out, clusters[plan.cluster] * most);
  const int rows = round_up(divide_up(out, clusters[plan.cluster] * rounds), unit);
  plan.boxes = shape.swiglu || rows > 256 ? 2 : 1;
  plan.box_rows = !shape.swiglu && plan.boxes == 2 ? round_up(divide_up(rows, 2), unit) : rows;
  plan.tile_rows = shape.swiglu ? plan.box_rows : plan.boxes * plan.box_rows;
  plan.tiles = static_cast<int>(divide_up(out, plan.tile_rows));
  plan.tiles_per_box = static_cast<int>(divide_up(plan.box_rows, 16));
  plan.row_tiles =
      wgmma ? static_cast<int>(divide_up(plan.boxes * plan.box_rows, 64)) : plan.boxes * plan.tiles_per_box;
  if (wgmma) {
    plan.row_workers = plan.row_tiles > 1 ? 2 : 1;
  } else {
    for (const int warps : {6, 3, 2, 1}) {
      if (warps * kLinearTilesPerWorker >= plan.row_tiles) plan.row_workers = warps;
    }
  }
  plan.k_workers = workers / plan.row_workers;

  const int64_t k_chunks = divide_up(shape.k, kLinearChunk);
  plan.x_rows = wgmma ? linear_columns(shape.m) : static_cast<int>(shape.m);
  plan.box_pitch = wgmma ? plan.box_rows : plan.tiles_per_box * 16;
  plan.pitch = round_up(plan.boxes * plan.box_pitch, 32) + 4;
  const size_t partials = static_cast<size_t>(plan.k_workers) * shape.m * plan.pitch * sizeof(float);
  // Room of their own, so that the next tile's weights arrive meanwhile, if they leave enough to the ring.
  plan.alias =
      !wgmma ? partials > 20 * 1024 : plan.tiles <= clusters[plan.cluster] || 3 * partials > tuning.shared_bytes;
  // Operands extend beyond the rows that are there: of the weight to the last tile's end, of x to the last token
  // tile's.
  const size_t slack = wgmma ? (plan.row_tiles * 64 - plan.boxes * plan.box_rows) * 128
                             : 2048 + (linear_token_tiles(shape.m) * 8 - shape.m) * 128;
  int fitting = 0;  // stages in shared memory
  const auto lay_out = [&](int chunks) {
    plan.chunks = chunks;
    plan.k_stages = static_cast<int>(divide_up(k_chunks, chunks));
    // The swizzle repeats itself every 1024 bytes: the operands of wgmma begin with it, and the second of two boxes
    // where the first does.
    plan.box_bytes = round_up(chunks * plan.box_rows * 128, wgmma || plan.boxes == 2 ? 1024 : 128);
    plan.stage_bytes = plan.boxes * plan.box_bytes + round_up(chunks * plan.x_rows * 128, wgmma ? 1024 : 128);
    plan.transfer_bytes = chunks * 128 * (plan.boxes * plan.box_rows + plan.x_rows);
    plan.norm_weight_bytes = shape.normalize ? plan.k_stages * chunks * 128 : 0;
    const size_t fixed =
        kLinearHeaderBytes + plan.norm_weight_bytes + (plan.alias ? 0 : round_up(partials, 16)) + slack;
    fitting = static_cast<int>((tuning.shared_bytes - fixed) / plan.stage_bytes);
    // No more than there are, where a block has but one tile: then more blocks fit an SM, and the next kernel begins.
    const bool one_tile = !wgmma && plan.tiles <= clusters[plan.cluster];
    const int useful = one_tile ? round_up(plan.k_stages, plan.k_workers) : kLinearMaxStages;
    const int ahead = static_cast<int>(divide_up(tuning.ahead, chunks)) * plan.k_workers;
    plan.stages = std::min({fitting, useful, ahead, kLinearMaxStages}) / plan.k_workers * plan.k_workers;
    const size_t ring = static_cast<size_t>(plan.stages) * plan.stage_bytes;
    plan.shared_bytes = fixed + std::max(ring, plan.alias ? partials : 0);
  };
  // A tile of wgmma that begins in one box and ends in the other wants them next to each other.
  const bool one_chunk = shape.k % kLinearChunk || (wgmma && plan.boxes == 2);
  int chunks = one_chunk ? 1 : static_cast<int>(std::min<int64_t>(tuning.chunks, k_chunks));
  const int wanted = wgmma ? 4 : 2 * plan.k_workers;
  for (lay_out(chunks); fitting < wanted && chunks > 1;) lay_out(--chunks);
  return plan;
}

// The rest is as measured on an H200 with the weights of models of 0.5 to 8 billion parameters, 256 x 2048 to
// 152064 x 3584, in rules about the rows that an SM gets: up to 128, or more.
inline bool linear_has_many_rows(int64_t n, const int* clusters) { return n > int64_t{128} * clusters[1]; }
// Whether the rows of two SMs fit one tile of wgmma.
inline bool linear_has_few_rows(int64_t n, const int* clusters) { return n <= int64_t{64} * clusters[2]; }
inline bool linear_has_long_rows(int64_t k) { return k > 8192; }

// mma.sync up to 16 tokens, which folds the norm. Where there are many rows, tiles of 96 are 2 to 5 % faster than the
// tallest that fit; where there are few, stages of two chunks 11 to 27 % faster than of one, and two stages of three
// chunks for each warp another 1 to 5 %, while one is 10 to 20 % slower and three are up to 5 %. Twice as large they
// are another 4 to 43 % faster where rows are so few that the copying thread cannot keep up, 150 ns for each stage, but
// K is long; short K has too few of them for the warps then, 4 to 12 % slower. For SwiGLU less is under way at a time,
// which leaves more to the kernels around it.
//
// With wgmma and few rows, two SMs share a tile, which reads x half as often: 5 % if K is long or tokens are few, while
// short K and many tokens are done sooner alone. Larger clusters and less shared memory (so that the next kernel may
// begin beside this one) have never been best.
inline LinearTuning choose_tuning(const LinearShape& shape, const int* clusters) {
  constexpr size_t kLessShared = 160 * 1024, kShared = 200 * 1024, kMostShared = 225 * 1024;
  const bool many_rows = linear_has_many_rows(shape.n, clusters);
  if (shape.m <= kLinearMaxMmaTokens) {
    if (many_rows) return {false, 1, 2, shape.swiglu ? kLessShared : kShared, 96};
    const int chunks = shape.n <= int64_t{20} * clusters[1] && shape.k > 2048 ? 6 : 3;
    return {false, 1, chunks, kMostShared, 288, 2 * chunks};
  }
  if (many_rows) {
    if (shape.m > 32) return {true, 1, 1, kShared, 288};
    return {true, 1, 2, kMostShared, shape.swiglu ? 96 : 64};
  }
  const bool pairs = linear_has_few_rows(shape.n, clusters) && (linear_has_long_rows(shape.k) || shape.m <= 32);
  return {true, pairs ? 2 : 1, 2, kShared, 288};
}

}  // namespace llmk::kernels
