// The launch plan of a linear for many tokens: how wide the tiles are, and what the two blocks of a cluster share.
// Plain host code.
#pragma once
#include <algorithm>
#include <cstdint>

namespace llmk::kernels {

constexpr int kGemmRows = 128, kGemmDepth = 64;            // tokens of a tile; elements of K in a stage
constexpr int kGemmColumns[] = {256, 224, 192, 144, 128};  // of a tile: rows of W

struct GemmPlan {
  int columns = 0;             // one of kGemmColumns
  int cluster = 1;             // blocks
  bool shares_weight = false;  // the blocks of a cluster have the same rows of W, and not the same tokens
  int row_tiles = 0;           // of a cluster's height
  int column_tiles = 0;        // of a cluster's width
  double cycles = 0;           // of the tensor cores, by the model below
};

struct GemmShape {
  int64_t m, n, k;  // n: rows of W
  bool glu;
};

// The plan with `columns`, on a GPU where clusters[c] clusters of c blocks run at the same time.
inline GemmPlan plan_gemm(const GemmShape& shape, int columns, const int* clusters) {
  const auto divide_up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  const int rows = divide_up(shape.m, kGemmRows);
  const int wide = divide_up(shape.glu ? shape.n / 2 : shape.n, shape.glu ? columns / 2 : columns);
  GemmPlan plan{.columns = columns};
  plan.cluster = clusters[2] > 0 && rows * wide > 1 ? 2 : 1;
  plan.shares_weight = plan.cluster == 2 && (rows % 2 == 0 || (wide % 2 == 1 && rows > wide));
  plan.row_tiles = plan.shares_weight ? divide_up(rows, 2) : rows;
  plan.column_tiles = plan.shares_weight ? wide : divide_up(wide, plan.cluster);
  // A tile takes the products, 8 instructions of columns / 2 cycles for each stage, and an epilogue while the tensor
  // cores wait.
  const int waves = divide_up(int64_t{plan.row_tiles} * plan.column_tiles, std::max(clusters[plan.cluster], 1));
  plan.cycles = waves * (divide_up(shape.k, kGemmDepth) * 4.0 * columns + 1000 + 8.0 * columns);
  return plan;
}

// The one that takes the fewest cycles.
inline GemmPlan choose_gemm(const GemmShape& shape, const int* clusters) {
  GemmPlan best;
  for (const int columns : kGemmColumns) {
    const GemmPlan plan = plan_gemm(shape, columns, clusters);
    if (best.columns == 0 || plan.cycles < best.cycles) best = plan;
  }
  return best;
}

}  // namespace llmk::kernels
