// Plans of csrc/kernels/gemm/plan.h: one line of JSON per line of standard input, "clusters1 clusters2 clusters4
// clusters8 m n k glu code"; the plan with tiles of that code, or with 0 the one that is chosen.
#include <cstdio>
#include <set>
#include <utility>

#define __host__
#define __device__
#include "kernels/gemm/plan.h"
#include "kernels/gemm/position.h"

int main() {
  using namespace llmk::kernels;
  int clusters[17] = {}, glu, code;
  long long m, n, k;
  while (std::scanf("%d %d %d %d %lld %lld %lld %d %d", &clusters[1], &clusters[2], &clusters[4], &clusters[8], &m, &n,
                    &k, &glu, &code) == 9) {
    const GemmShape shape{m, n, k, glu != 0};
    const GemmPlan plan = code ? plan_gemm(shape, gemm_tile(code), clusters) : choose_gemm(shape, clusters);
    std::set<std::pair<int, int>> tiles;
    for (int index = 0; index < plan.row_tiles * plan.column_tiles; ++index) {
      const GemmPosition at(index, plan.row_tiles, plan.column_tiles);
      if (at.row < plan.row_tiles && at.column < plan.column_tiles) tiles.insert({at.row, at.column});
    }
    std::printf(
        "{\"columns\": %d, \"schedule\": %d, \"pair\": %d, \"splits\": %d, \"shares_weight\": %d, \"half_rows\": %d, "
        "\"row_tiles\": %d, \"column_tiles\": %d, \"tiles\": %d, \"faster\": %d}\n",
        plan.tile.columns, static_cast<int>(plan.tile.schedule), plan.pair, plan.splits, plan.shares_weight,
        plan.half_rows, plan.row_tiles, plan.column_tiles, static_cast<int>(tiles.size()),
        gemm_is_faster_than_library(shape, clusters));
  }
}
