// How a linear for few tokens is spread over the GPU. Plain host code.
//
// A cluster of blocks owns a tile of output rows (rows of the weight) and splits K between its blocks; within a block,
// `k_warps` groups of warps take turns at the stages of a ring. More blocks per cluster mean taller tiles, so that x is
// read fewer times, and a longer reduction at the end. More warps along the rows mean fewer along K.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmk::kernels {

constexpr int kLinearMaxTokens = 64;
constexpr int kLinearWarps = 6;         // that compute; one more copies
constexpr int kLinearTilesPerWarp = 3;  // of 16 rows each
constexpr int kLinearChunk = 64;        // elements of K: one swizzled row of 128 bytes

struct LinearPlan {
  int cluster;        // blocks that share a tile
  int boxes;          // 1, or 2: a tall tile, or gate rows and up rows
  int box_rows;       // rows of the weight per box, a multiple of 4
  int tiles_per_box;  // of 16 rows
  int tile_rows;      // columns of y per tile
  int tiles;          // in all
  int row_warps;      // row_warps * k_warps == kLinearWarps
  int k_warps;
  int chunks;     // per stage
  int k_stages;   // that make up K
  int stages;     // in the ring; a multiple of k_warps, so that a slot always belongs to the same warps
  int box_bytes;  // from box to box in a stage
  int x_bytes;    // of x in a stage
  int stage_bytes;
  int transfer_bytes;     // what arrives in a stage
  int norm_weight_bytes;  // 0 without a norm
  int pitch;              // floats between the tokens of the partial sums
  bool alias;             // the partial sums lie where the ring was
  size_t shared_bytes;
};

struct LinearShape {
  int64_t m, n, k;  // n: rows of the weight
  bool swiglu, normalize;
};

// What a measurement may want to vary.
struct LinearTuning {
  int cluster;
  int chunks;           // at most
  size_t shared_bytes;  // at most; half of an SM lets the next kernel begin beside this one
  int rows;             // of the weight in a tile, at most
};

constexpr size_t kLinearBarrierBytes = 1024;
constexpr int kLinearMaxStages = 56;
// Barriers, then sums of squares by warp and token, then 1 / rms by token.
constexpr size_t kLinearHeaderBytes = 3 * 1024;

// Tokens that the kernel computes, in tiles of 8: a power of two tiles.
inline int linear_token_tiles(int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8; }

inline LinearPlan plan_linear(const LinearShape& shape, int sm_count, const LinearTuning& tuning) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const auto round_up = [&](int64_t a, int64_t b) { return static_cast<int>(divide_up(a, b) * b); };
  constexpr int kMaxRows = 16 * kLinearWarps * kLinearTilesPerWarp;
  LinearPlan plan{};
  // As many tiles as clusters fit the GPU at once, or (clusters of one) a multiple of that, all of the same height.
  const int64_t out = shape.swiglu ? shape.n / 2 : shape.n;
  const int64_t most = std::min(tuning.rows, kMaxRows) / (shape.swiglu ? 2 : 1);
  plan.cluster = tuning.cluster;
  while (plan.cluster > 1 && sm_count / plan.cluster * most < out) plan.cluster /= 2;
  const int64_t clusters = sm_count / plan.cluster, rounds = divide_up(out, clusters * most);
  const int rows = round_up(divide_up(out, clusters * rounds), 4);
  plan.boxes = shape.swiglu || rows > 256 ? 2 : 1;
  plan.box_rows = !shape.swiglu && plan.boxes == 2 ? round_up(divide_up(rows, 2), 4) : rows;
  plan.tiles_per_box = static_cast<int>(divide_up(plan.box_rows, 16));
  plan.tile_rows = shape.swiglu ? plan.box_rows : plan.boxes * plan.box_rows;
  plan.tiles = static_cast<int>(divide_up(out, plan.tile_rows));
  const int row_tiles = plan.boxes * plan.tiles_per_box;
  for (const int warps : {6, 3, 2, 1}) {
    if (warps * kLinearTilesPerWarp >= row_tiles) plan.row_warps = warps;
  }
  plan.k_warps = kLinearWarps / plan.row_warps;

  const int64_t k_chunks = divide_up(shape.k, kLinearChunk);
  plan.pitch = round_up(row_tiles * 16, 32) + 4;
  const size_t partials = static_cast<size_t>(plan.k_warps) * shape.m * plan.pitch * sizeof(float);
  plan.alias = partials > 20 * 1024;
  // Fragments read past the rows that are there, of the weight up to 15 and of x up to the last token tile.
  const size_t slack = 2048 + (linear_token_tiles(shape.m) * 8 - shape.m) * 128;
  const auto lay_out = [&](int chunks) {
    plan.chunks = chunks;
    plan.k_stages = static_cast<int>(divide_up(k_chunks, chunks));
    plan.box_bytes = round_up(chunks * plan.box_rows * 128, 1024);
    plan.x_bytes = round_up(chunks * shape.m * 128, 1024);
    plan.stage_bytes = plan.boxes * plan.box_bytes + plan.x_bytes;
    plan.transfer_bytes = static_cast<int>(chunks * 128 * (plan.boxes * plan.box_rows + shape.m));
    plan.norm_weight_bytes = shape.normalize ? plan.k_stages * chunks * 128 : 0;
    const size_t fixed =
        kLinearHeaderBytes + plan.norm_weight_bytes + (plan.alias ? 0 : round_up(partials, 16)) + slack;
    const int fitting = static_cast<int>((tuning.shared_bytes - fixed) / plan.stage_bytes);
    plan.stages = std::min(fitting, kLinearMaxStages) / plan.k_warps * plan.k_warps;
    const size_t ring = static_cast<size_t>(plan.stages) * plan.stage_bytes;
    plan.shared_bytes = fixed + std::max(ring, plan.alias ? partials : 0);
  };
  int chunks = shape.k % kLinearChunk ? 1 : static_cast<int>(std::min<int64_t>(tuning.chunks, k_chunks));
  for (lay_out(chunks); plan.stages < std::min(4, 2 * plan.k_warps) && chunks > 1;) lay_out(--chunks);
  return plan;
}

// Measured on an H200. Few stages of tall tiles where there are many rows, for W is then read in the longest stretches;
// tiles of 96 rows where x would otherwise fill the ring.
inline LinearTuning choose_tuning(const LinearShape& shape) {
  constexpr size_t kShared = 200 * 1024;
  const bool many_rows = shape.n > 16384;
  return {1, many_rows ? 1 : 2, kShared, many_rows && shape.swiglu && shape.m > 4 ? 96 : 288};
}

}  // namespace llmk::kernels
