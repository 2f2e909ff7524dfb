// Plans of csrc/kernels/attention/plan.h for devices that this machine does not have: one line of JSON per line of
// standard input, "sm_count clusters2 clusters4 clusters8 clusters16 batch kv_heads group tokens capacity head_dim
// fused".
#include <cstdio>

#include "kernels/attention/plan.h"

int main() {
  using namespace llmk;
  using namespace llmk::kernels;
  DeviceInfo device{};
  device.compute_capability = 90;
  device.shared_bytes = 232448;
  DecodeProblem problem{};
  long long batch, kv_heads, group, tokens, capacity, head_dim, fused;
  while (std::scanf("%d %d %d %d %d %lld %lld %lld %lld %lld %lld %lld", &device.sm_count, &device.clusters[2],
                    &device.clusters[4], &device.clusters[8], &device.clusters[16], &batch, &kv_heads, &group, &tokens,
                    &capacity, &head_dim, &fused) == 12) {
    device.clusters[1] = device.sm_count;
    problem.batch = batch, problem.tokens = tokens, problem.kv_heads = kv_heads, problem.heads = kv_heads * group;
    problem.capacity = problem.page_size = capacity, problem.head_dim = head_dim, problem.fused = fused;
    const DecodePlan plan = plan_decode_attention(problem, device);
    const long long bytes = plan.layout(head_dim).bytes, sequences = sequences_per_launch(problem);
    std::printf(
        "{\"cluster\": %d, \"clusters\": %d, \"at_once\": %d, \"query_tiles\": %d, \"sequences\": %lld, \"bytes\": "
        "%lld}\n",
        plan.cluster, plan.clusters, device.clusters[plan.cluster], plan.query_tiles, sequences, bytes);
  }
}
