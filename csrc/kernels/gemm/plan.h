// The launch plan of a linear for many tokens: how wide the tiles are, and what the two blocks of a cluster share.
// Plain host code.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace llmk::kernels {

constexpr int kGemmRows = 128, kGemmDepth = 64;  // tokens of a tile; elements of K in a stage

// A tile's rows of W, and whether the warpgroups of a block alternate (gemm_sm90.cuh).
struct GemmTile {
  int columns;
  bool alternates;
};
constexpr GemmTile kGemmTiles[] = {{256, false}, {224, false}, {192, true}, {144, true}, {128, true}};

struct GemmPlan {
  GemmTile tile{};
  int cluster = 1;             // blocks
  bool shares_weight = false;  // the blocks of a cluster have the same rows of W, and not the same tokens
  int row_tiles = 0;           // of a cluster's height
  int column_tiles = 0;        // of a cluster's width
  double cycles = 0;           // of the tensor cores, by the model below
};

// The ring of a block: stages, and all of its shared memory in bytes. As gemm_sm90.cuh lays it out.
constexpr int gemm_stage_bytes(int columns) { return (kGemmRows + columns) * kGemmDepth * kHalfBytes; }
constexpr int kGemmStoreBytes = 16 * 1024;  // of the warps' results on their way to memory
constexpr int gemm_stages(int columns) { return (226 * 1024 - kGemmStoreBytes - 128) / gemm_stage_bytes(columns); }
constexpr size_t gemm_shared_bytes(int columns) {
  return gemm_stages(columns) * (gemm_stage_bytes(columns) + 16) + kGemmStoreBytes + 1024;
}

struct GemmShape {
  int64_t m, n, k;  // n: rows of W
  bool glu;
};

// The plan with such tiles, on a GPU where clusters[c] clusters of c blocks run at the same time.
inline GemmPlan plan_gemm(const GemmShape& shape, GemmTile tile, const int* clusters) {
  const auto divide_up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  const int rows = divide_up(shape.m, kGemmRows);
  const int wide = divide_up(shape.glu ? shape.n / 2 : shape.n, shape.glu ? tile.columns / 2 : tile.columns);
  GemmPlan plan{.tile = tile};
  plan.cluster = clusters[2] > 0 && rows * wide > 1 ? 2 : 1;
  plan.shares_weight = plan.cluster == 2 && (rows % 2 == 0 || (wide % 2 == 1 && rows > wide));
  plan.row_tiles = plan.shares_weight ? divide_up(rows, 2) : rows;
  plan.column_tiles = plan.shares_weight ? wide : divide_up(wide, plan.cluster);
  // The products of a tile: 8 instructions of columns / 2 cycles for each stage. Where the warpgroups alternate these
  // take a little longer, since the tiles are narrower; else the tensor cores wait for the epilogue. One H200:
  //
  //   tile                 | products of a tile | epilogue
  //   ---------------------|--------------------|-------------
  //   256, 224             | 1                  | 3 to 7 us
  //   192, 144, alternates | 1.04               | in the last
  //   128, alternates      | 1.12               | in the last
  const int waves = divide_up(int64_t{plan.row_tiles} * plan.column_tiles, std::max(clusters[plan.cluster], 1));
  const double products = divide_up(shape.k, kGemmDepth) * 4.0 * tile.columns;
  const double epilogue = 5000, slower = !tile.alternates ? 1 : tile.columns > 128 ? 1.04 : 1.12;
  plan.cycles = waves * products * slower + (tile.alternates ? 1 : waves) * epilogue;
  return plan;
}

// The one that takes the fewest cycles; without tiles of `not_columns`.
inline GemmPlan choose_gemm(const GemmShape& shape, const int* clusters, int not_columns = 0) {
  GemmPlan best;
  for (const GemmTile& tile : kGemmTiles) {
    if (tile.columns == not_columns) continue;
    const GemmPlan plan = plan_gemm(shape, tile, clusters);
    if (best.tile.columns == 0 || plan.cycles < best.cycles) best = plan;
  }
  return best;
}

constexpr int64_t kGemmLibraryTokens = 10 * kGemmRows;  // up to so many cuBLAS is faster, without a gated activation

// Whether the kernel is faster than cuBLAS, and than cuBLAS and the kernel of the activation. One H200, us:
//
//   m, n, k             | ours | cuBLAS     because
//   --------------------|------|-------     ------------------------------------------------------------------
//   2048, 37888, 3584   |  814 |  871 glu   [gate | up] is not written and read
//    512, 37888, 3584   |  206 |  234 glu
//    128, 37888, 3584   |   72 |   77 glu
//     65, 37888, 3584   |   83 |   74 glu   half of the tokens of a tile are not there
//   2048, 3584, 18944   |  378 |  433       tiles of 224 columns fill the GPU, those of other widths do not
//   2048, 3584, 3584    |   75 |   85
//   2048, 37888, 3584   |  809 |  801
//   2048, 4608, 3584    |   98 |   95
inline bool gemm_is_faster_than_library(const GemmShape& shape, const int* clusters) {
  const double tiles = shape.m / static_cast<double>(kGemmRows) * shape.n / std::max(clusters[1], 1);
  const double ideal = tiles * 4.0 * shape.k / kGemmDepth;  // cycles
  const GemmPlan plan = choose_gemm(shape, clusters);
  if (shape.glu) return ideal > 0.7 * plan.cycles;
  return shape.m > kGemmLibraryTokens && plan.cycles < 0.9 * choose_gemm(shape, clusters, 224).cycles;
}

}  // namespace llmk::kernels
