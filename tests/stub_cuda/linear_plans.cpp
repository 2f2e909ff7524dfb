// Plans of linears without TMA, csrc/kernels/linear/plan.h: one line of JSON per line of standard input, "sm_count m n
// k glu normalize weight_bytes".
#include <cstdio>

#include "kernels/linear/plan.h"

int main() {
  using namespace llmk::kernels;
  int sm_count, glu, normalize, weight_bytes;
  long long m, n, k;
  while (std::scanf("%d %lld %lld %lld %d %d %d", &sm_count, &m, &n, &k, &glu, &normalize, &weight_bytes) == 7) {
    const LinearPlan plan = plan_linear_sm80({m, n, k, glu != 0, normalize != 0, weight_bytes}, sm_count);
    std::printf(
        "{\"rows\": %d, \"tiles\": %d, \"mma_tiles\": %d, \"parts\": %d, \"groups\": %d, \"steps\": %d, \"depth\": %d, "
        "\"warps\": %d, \"shared\": %zu}\n",
        plan.tile_rows, plan.output_tiles, plan.mma_tiles, plan.row_consumers, plan.k_consumers, plan.k_tiles,
        linear_sm80_depth(plan.mma_tiles, linear_token_tiles(m), weight_bytes),
        linear_sm80_warps(plan.mma_tiles, weight_bytes), plan.shared_bytes);
  }
}
