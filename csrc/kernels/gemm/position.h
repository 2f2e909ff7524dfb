// The order of the tiles of a linear for many tokens.
#pragma once
#include <cuda_runtime.h>

namespace llmk::kernels {

constexpr int kGemmGroup = 8;  // rows of tiles

// The position of a cluster's tile: in groups of rows, so that those which run together share both operands in the L2
// cache.
struct GemmPosition {
  int row, column;

  __host__ __device__ GemmPosition(int index, int row_tiles, int column_tiles) {
    const int group = index / (kGemmGroup * column_tiles), left = row_tiles - group * kGemmGroup;
    const int rows = left < kGemmGroup ? left : kGemmGroup, at = index - group * kGemmGroup * column_tiles;
    row = group * kGemmGroup + at % rows;
    column = at / rows;
  }
};

}  // namespace llmk::kernels
