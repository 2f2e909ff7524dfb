// How decode_attention shares its work among blocks; measured on one H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/launch.h"
#include "params/attention.h"

namespace llmk::kernels {

// None of it depends on how long the sequences are: that the kernel reads on the device.
struct DecodePlan {
  int column_tiles;  // 8 queries each
  int chunks;        // of a kv head's queries
  int cluster;       // blocks that share a unit of work
  int clusters;
  int least, slack;  // see plan_quota()
};

constexpr int kMaxClusters = 288;         // two for each SM of the largest GPUs
constexpr int64_t kShortSequence = 2048;  // keys that one cluster of 8 blocks gets through as soon as several do

inline DecodePlan plan_decode_attention(const DecodeAttentionParams& params, const DeviceInfo& device) {
  const int64_t queries = params.heads / params.kv_heads * params.tokens;
  DecodePlan plan{};
  plan.column_tiles = queries <= 8 ? 1 : 2;
  plan.chunks = static_cast<int>((queries + 8 * plan.column_tiles - 1) / (8 * plan.column_tiles));
  const int64_t pairs = params.batch * params.kv_heads * plan.chunks;
  const int64_t longest = params.longest > 0 ? std::min(params.longest, params.cache.capacity) : params.cache.capacity;
  const bool has_clusters = device.compute_capability >= 90;
  if (has_clusters && longest <= kShortSequence && pairs * 8 <= device.sm_count) {
    plan.cluster = 8;  // no block without work, and no sums through memory
    plan.clusters = static_cast<int>(pairs);
  } else if (has_clusters && pairs <= device.sm_count) {
    plan.cluster = 2;
    plan.clusters = 2 * pairs <= device.sm_count ? device.sm_count / 2 : device.sm_count;
  } else {
    plan.cluster = 1;
    plan.clusters = 2 * device.sm_count;
  }
  plan.clusters = std::clamp(plan.clusters, 1, kMaxClusters);
  plan.least = plan.slack = 8;
  return plan;
}

}  // namespace llmk::kernels
