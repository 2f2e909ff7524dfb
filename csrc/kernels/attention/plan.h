// How decode_attention shares its work among blocks; measured on one H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/launch.h"
#include "params/attention.h"
#include "shape.h"

namespace llmk::kernels {

// The kernel counts the units of all its sequences in 32 bits, with lengths rounded up to at most twice as many. So a
// launch has few enough sequences for that, however much of their capacity they use.
constexpr int64_t kMostUnits = int64_t{1} << 29;
inline int64_t sequences_per_launch(const DecodeAttentionParams& params) {
  const int64_t queries = params.heads / params.kv_heads * params.tokens, pairs = params.kv_heads * ((queries + 7) / 8);
  return kMostUnits / (std::max<int64_t>((params.cache.capacity + kUnit - 1) / kUnit, 1) * pairs);
}

// None of it depends on how long the sequences are: that the kernel reads on the device.
struct DecodePlan {
  int group;         // heads per kv head
  int column_tiles;  // 8 queries each
  int chunks;        // of a kv head's queries
  int cluster;       // blocks that share a pair: 1, 2, 4, 8 or 16
  int clusters;
  int least;         // see plan_quota()
  int slots;         // of the ring
  int last_units;    // of a block, at which it lets the next kernel begin; or 0: at once
  int part_bits;     // a copy brings kUnit >> part_bits keys: 64, 32 or 16
  bool evict_first;  // whether keys and values are the first that the L2 cache may forget

  __host__ __device__ int parts() const { return 1 << part_bits; }
  __host__ __device__ int box() const { return kUnit >> part_bits; }
  Layout layout(int64_t head_dim) const { return {static_cast<int>(head_dim), 8 * column_tiles, slots, cluster}; }
};

constexpr int kMaxBlocks = 288;  // two for each SM of the largest GPUs
// Keys that one block, or one cluster of as many blocks as there are, gets through as soon as several do.
constexpr int64_t kVeryShortSequence = 512, kShortSequence = 768, kQuiteShortSequence = 2048;
// Of an SM: room for two blocks or three, so that the next launch can get ready while this one works.
constexpr size_t kSmallShared = 64 * 1024, kThirdOfShared = 76 * 1024, kLessThanHalf = 92 * 1024,
                 kHalfOfShared = 112 * 1024, kMostOfShared = 200 * 1024;
// The next kernel asks for memory as soon as it begins: if that is when a block asks for its last unit, memory does not
// rest while sums are merged (5 to 8 % on 67 MB of keys and values). Not where blocks are on their own: two of the next
// launch would find room on an SM where one has left, and none elsewhere (15 % slower).
constexpr int kLastUnits = 1;

// Fills in the ring: as many slots as fit into so many bytes. Fewer than two are no ring.
inline void plan_ring(DecodePlan& plan, int64_t head_dim, size_t bytes) {
  plan.slots = 0;
  const size_t fixed = static_cast<size_t>(plan.layout(head_dim).bytes), slot = slot_bytes(static_cast<int>(head_dim));
  if (fixed < bytes) plan.slots = static_cast<int>(std::min<size_t>((bytes - fixed) / (slot + 16), 32));
}

inline DecodePlan plan_decode_attention(const DecodeAttentionParams& params, const DeviceInfo& device) {
  DecodePlan plan{};
  plan.group = static_cast<int>(params.heads / params.kv_heads);
  const int64_t queries = plan.group * params.tokens;
  plan.column_tiles = queries <= 8 ? 1 : 2;
  plan.chunks = static_cast<int>((queries + 8 * plan.column_tiles - 1) / (8 * plan.column_tiles));
  const int64_t pairs = params.batch * params.kv_heads * plan.chunks;
  if (device.compute_capability < 90) {
    plan.cluster = 1;
    plan.clusters = 2 * device.sm_count;
    plan.slots = kCopySlots;
  } else {
    const int64_t longest =
        params.longest > 0 ? std::min(params.longest, params.cache.capacity) : params.cache.capacity;
    const bool is_small = params.head_dim * plan.column_tiles <= 128;
    size_t bytes = params.head_dim <= 128 ? kHalfOfShared : kMostOfShared;
    int blocks = device.sm_count;
    // Only clusters of which there is room for all at once: none of 16 blocks on many devices, fewer on a part of one.
    if (longest <= kQuiteShortSequence && pairs * 8 <= device.sm_count) {
      // A cluster for each pair: no block without work, and no sums through memory.
      plan.cluster = longest <= kVeryShortSequence ? 8 : 16;
      while (plan.cluster > 1 && pairs > device.clusters[plan.cluster]) plan.cluster /= 2;
      blocks = static_cast<int>(pairs) * plan.cluster;
    } else if (longest <= kShortSequence && is_small && pairs <= device.clusters[4]) {
      plan.cluster = 4;
      blocks = static_cast<int>(pairs) * plan.cluster;
      bytes = kThirdOfShared;
    } else if (pairs <= device.clusters[2]) {
      plan.cluster = 2;
      blocks = 2 * device.clusters[2];
    } else {
      plan.cluster = 1;
      const bool many = pairs > device.sm_count;
      // Of two blocks one is at work while the other looks up pages.
      if (is_small && (many || params.cache.block_table)) {
        blocks *= 2;
        bytes = many ? kSmallShared : kLessThanHalf;
      }
    }
    plan.clusters = blocks / plan.cluster;
    plan.last_units = plan.cluster == 1 ? 0 : kLastUnits;
    plan_ring(plan, params.head_dim, std::min(bytes, device.shared_bytes));
  }
  plan.clusters = std::clamp(plan.clusters, 1, kMaxBlocks / plan.cluster);
  plan.least = std::max(4 * plan.cluster, 8);
  while (params.cache.block_table && plan.box() > kTile && params.cache.page_size % plan.box() != 0) ++plan.part_bits;
  plan.evict_first = plan.chunks == 1;  // else several blocks read the same keys
  return plan;
}

}  // namespace llmk::kernels
