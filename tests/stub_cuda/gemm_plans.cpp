// Plans of csrc/kernels/gemm/plan.h: one line of JSON per line of standard input, "clusters1 clusters2 m n k glu".
#include <cstdio>
#include <set>
#include <utility>

#define __host__
#define __device__
#include "kernels/gemm/plan.h"
#include "kernels/gemm/position.h"

int main() {
  using namespace llmk::kernels;
  int clusters[3] = {}, glu;
  long long m, n, k;
  while (std::scanf("%d %d %lld %lld %lld %d", &clusters[1], &clusters[2], &m, &n, &k, &glu) == 6) {
    const GemmShape shape{m, n, k, glu != 0};
    const GemmPlan plan = choose_gemm(shape, clusters);
    std::set<std::pair<int, int>> tiles;
    for (int index = 0; index < plan.row_tiles * plan.column_tiles; ++index) {
      const GemmPosition at(index, plan.row_tiles, plan.column_tiles);
      if (at.row < plan.row_tiles && at.column < plan.column_tiles) tiles.insert({at.row, at.column});
    }
    std::printf(
        "{\"columns\": %d, \"alternates\": %d, \"cluster\": %d, \"shares_weight\": %d, \"row_tiles\": %d, "
        "\"column_tiles\": %d, \"tiles\": %d, \"faster\": %d}\n",
        plan.tile.columns, plan.tile.alternates, plan.cluster, plan.shares_weight, plan.row_tiles, plan.column_tiles,
        static_cast<int>(tiles.size()), gemm_is_faster_than_library(shape, clusters));
  }
}
