// The launch plan of a linear for many tokens: how wide the tiles are, what the two blocks of a pair share, and whether
// K is split. Plain host code.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "params/epilogue.h"

namespace llmk::kernels {

constexpr int kGemmRows = 128, kGemmDepth = 64;  // tokens of a tile; elements of K in a stage

enum class GemmSchedule { kTogether, kAlternate, kSplit };  // of the warpgroups of a block: see gemm_sm90.cuh

// A tile's rows of W.
struct GemmTile {
  int columns;
  GemmSchedule schedule;
};
// kSplit is for linears without a gated activation.
constexpr GemmTile kGemmTiles[] = {
    {256, GemmSchedule::kTogether},  {224, GemmSchedule::kTogether},  {192, GemmSchedule::kAlternate},
    {144, GemmSchedule::kAlternate}, {128, GemmSchedule::kAlternate}, {192, GemmSchedule::kSplit},
    {144, GemmSchedule::kSplit},     {128, GemmSchedule::kSplit},     {80, GemmSchedule::kSplit}};
constexpr int kGemmMaxSplits = 4;

// A tile as one number, for llmk_force_gemm and for choices that were measured (linear/tuned.h): its columns, and 1000
// for kAlternate, 2000 for kSplit.
constexpr GemmTile gemm_tile(int code) { return {code % 1000, static_cast<GemmSchedule>(code / 1000)}; }

struct GemmPlan {
  GemmTile tile{};
  int pair = 1;                // blocks that share an operand: 1 or 2
  bool shares_weight = false;  // which have the same rows of W, and not the same tokens
  int splits = 1;              // of K
  int half_rows = 0;           // tokens of one half of a tile: multiples of 8, at most 64
  int row_tiles = 0;           // of a pair's height
  int column_tiles = 0;        // of a pair's width
  double cycles = 0;           // by the models below

  int cluster() const { return pair * splits; }
  int64_t clusters() const { return int64_t{row_tiles} * column_tiles; }
  // Of the sums of squares that a block of each column tile leaves, of up to 128 tokens.
  int parts() const { return column_tiles * pair; }
};

// The ring of a block: stages, and all of its shared memory in bytes. As gemm_sm90.cuh lays it out.
constexpr int gemm_stage_bytes(int columns) { return (kGemmRows + columns) * kGemmDepth * kHalfBytes; }
constexpr int gemm_store_bytes(GemmSchedule schedule) {  // of the warps' results on their way to memory
  return schedule == GemmSchedule::kSplit ? 0 : 16 * 1024;
}
// Of the norm hand-off: a barrier, sums of squares of each warp, and the largest weights (norm_handoff.cuh).
constexpr int kGemmHelpers = 3;  // warps
constexpr int kGemmHandoffBytes = 8 + kGemmHelpers * kHandoffTokens * 4 + 16;
constexpr int gemm_stages(const GemmTile& tile) {
  return (226 * 1024 - gemm_store_bytes(tile.schedule) - kGemmHandoffBytes - 128) / gemm_stage_bytes(tile.columns);
}
constexpr size_t gemm_shared_bytes(const GemmTile& tile) {
  return gemm_stages(tile) * (gemm_stage_bytes(tile.columns) + 16) + gemm_store_bytes(tile.schedule) + 8 +
         kGemmHandoffBytes + 1024;
}

struct GemmShape {
  int64_t m, n, k;  // n: rows of W
  bool glu;
  // The linear makes or takes a norm hand-off (params/linear.h), which saves a launch. Then K is split however short.
  bool handoff = false;
};

namespace gemm_planning {

constexpr int divide_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// The plan of so many blocks in a pair, 1 or 2.
inline GemmPlan lay_out(const GemmShape& shape, GemmTile tile, int pair) {
  const int rows = divide_up(shape.m, kGemmRows);
  const int wide = divide_up(shape.glu ? shape.n / 2 : shape.n, shape.glu ? tile.columns / 2 : tile.columns);
  GemmPlan plan{.tile = tile, .pair = rows * wide > 1 ? pair : 1};
  plan.shares_weight = plan.pair == 2 && (rows % 2 == 0 || (wide % 2 == 1 && rows > wide));
  plan.half_rows = 8 * divide_up(shape.m, int64_t{16} * rows);  // tiles of the same height
  plan.row_tiles = plan.shares_weight ? divide_up(rows, 2) : rows;
  plan.column_tiles = plan.shares_weight ? wide : divide_up(wide, plan.pair);
  return plan;
}

// Pairs and splits with which the most blocks run at the same time: memory is the limit, since tiles that are too few
// are those of few tokens. One H200, in cycles: a stage takes 100, and those of its bytes of W in all blocks, or of its
// products; a tile takes 2000 more, and 46 for each column, which are those of the exchange of the sums, or 41 with
// four splits, of which each finishes fewer tokens.
inline GemmPlan plan_split(const GemmShape& shape, GemmTile tile, const int* clusters) {
  constexpr double kBytesPerCycle = 2450;
  const int stages = divide_up(shape.k, kGemmDepth);
  GemmPlan best;
  int64_t most = 0;
  for (int pair = clusters[2] > 0 ? 2 : 1; pair >= 1; --pair) {
    GemmPlan plan = lay_out(shape, tile, pair);
    for (plan.splits = 1; plan.splits <= std::min(kGemmMaxSplits, stages); plan.splits *= 2) {
      if (plan.splits > 1 && plan.clusters() > clusters[plan.cluster()]) break;
      if (const int64_t blocks = plan.clusters() * plan.cluster(); blocks > most) best = plan, most = blocks;
    }
  }
  const double products = 4.0 * tile.columns;
  const double bytes = static_cast<double>(most) * tile.columns * kGemmDepth * kHalfBytes / kBytesPerCycle;
  const double exchange = 2000 + (best.splits > 2 ? 41.0 : 46.0) * tile.columns;
  best.cycles = divide_up(stages, best.splits) * (100 + std::max(products, bytes)) + exchange;
  return best;
}

}  // namespace gemm_planning

// The plan with such tiles, on a GPU where clusters[c] clusters of c blocks run at the same time.
inline GemmPlan plan_gemm(const GemmShape& shape, GemmTile tile, const int* clusters) {
  using gemm_planning::divide_up;
  if (tile.schedule == GemmSchedule::kSplit) return gemm_planning::plan_split(shape, tile, clusters);
  GemmPlan plan = gemm_planning::lay_out(shape, tile, clusters[2] > 0 ? 2 : 1);
  // The products of a tile: 8 instructions of columns / 2 cycles for each stage. Where the warpgroups alternate these
  // take a little longer, since the tiles are narrower; else the tensor cores wait for the epilogue. One H200:
  //
  //   tile                 | products of a tile | epilogue
  //   ---------------------|--------------------|-------------
  //   256, 224             | 1                  | 3 to 7 us
  //   192, 144, alternates | 1.04               | in the last
  //   128, alternates      | 1.12               | in the last
  const bool alternates = tile.schedule == GemmSchedule::kAlternate;
  const int waves = divide_up(plan.clusters(), std::max(clusters[plan.pair], 1));
  const double products = divide_up(shape.k, kGemmDepth) * 4.0 * tile.columns;
  const double epilogue = 5000, slower = !alternates ? 1 : tile.columns > 128 ? 1.04 : 1.12;
  plan.cycles = waves * products * slower + (alternates ? 1 : waves) * epilogue;
  return plan;
}

constexpr int64_t kGemmLongK = 8192;  // beyond which it is split

// Whether K is split: where W is read once, and its rows are too few to fill the GPU but long.
inline bool gemm_splits(const GemmShape& shape, const int* clusters) {
  return !shape.glu && shape.m <= kGemmRows && shape.n <= int64_t{kGemmRows} * clusters[1] &&
         (shape.k > kGemmLongK || shape.handoff);
}

// The one that takes the fewest cycles; without tiles of `not_columns`.
inline GemmPlan choose_gemm(const GemmShape& shape, const int* clusters, int not_columns = 0) {
  const bool splits = gemm_splits(shape, clusters);
  GemmPlan best;
  for (const GemmTile& tile : kGemmTiles) {
    if (tile.columns == not_columns || (tile.schedule == GemmSchedule::kSplit) != splits) continue;
    const GemmPlan plan = plan_gemm(shape, tile, clusters);
    if (best.tile.columns == 0 || plan.cycles < best.cycles) best = plan;
  }
  return best;
}

constexpr int64_t kGemmLibraryTokens = 10 * kGemmRows;  // beyond 128 and up to so many cuBLAS is faster, but for gates

// Whether the kernel is faster than cuBLAS, and than cuBLAS and the kernel of the activation. One H200, us:
//
//   m, n, k             | ours | cuBLAS     because
//   --------------------|------|-------     ------------------------------------------------------------------
//    128, 37888, 3584   |   68 |   72       W is read once, and the tiles fill the GPU
//    128, 152064, 3584  |  287 |  275
//     65, 37888, 3584   |   68 |   72 glu   [gate | up] is not written and read, either
//    128, 16384, 2048   | 20.7 | 21.4 glu
//    128, 3584, 18944   | 39.0 | 44.6       K is split
//    128, 3072, 9216    | 20.4 | 22.5
//    128, 1536, 8960    | 15.2 | 13.1       too few blocks
//    128, 4608, 3584    | 14.2 | 12.1       too few stages, so that the exchange of the sums is not made up for
//   2048, 37888, 3584   |  814 |  871 glu
//    512, 37888, 3584   |  206 |  234 glu
//   2048, 3584, 18944   |  378 |  433       tiles of 224 columns fill the GPU, those of other widths do not
//   2048, 3584, 3584    |   75 |   85
//   2048, 37888, 3584   |  809 |  801
//   2048, 4608, 3584    |   98 |   95
inline bool gemm_is_faster_than_library(const GemmShape& shape, const int* clusters) {
  const GemmPlan plan = choose_gemm(shape, clusters);
  const int64_t sms = std::max(clusters[1], 1);
  if (gemm_splits(shape, clusters)) return 10 * plan.clusters() * plan.cluster() >= 7 * sms;
  const double tiles = shape.m / static_cast<double>(kGemmRows) * shape.n / static_cast<double>(sms);
  const double ideal = tiles * 4.0 * shape.k / kGemmDepth;  // cycles
  if (shape.glu) return ideal > 0.7 * plan.cycles || (shape.m <= kGemmRows && shape.n > 96 * sms);
  if (shape.m <= kGemmRows) return shape.n > kGemmRows * sms && shape.n <= 4 * kGemmRows * sms;
  return shape.m > kGemmLibraryTokens && plan.cycles < 0.9 * choose_gemm(shape, clusters, 224).cycles;
}

}  // namespace llmk::kernels
