// The launch plan of decode_attention: clusters of blocks, and the stages of their rings. It does not depend on the
// sequence lengths, which the kernel reads on the device (tile_scheduler.cuh). The constants were measured on an H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/launch.h"
#include "params/attention.h"
#include "shape.h"

namespace llmk::kernels {

// The kernel counts KV tiles in 32 bits, and pads those of a work tile to at most twice their number. A launch may have
// this many sequences, even if all of them use their whole capacity.
constexpr int64_t kMaxKvTiles = int64_t{1} << 29;
inline int64_t sequences_per_launch(const DecodeAttentionParams& params) {
  const int64_t queries = params.heads / params.kv_heads * params.tokens,
                work_tiles = params.kv_heads * ((queries + 7) / 8);
  return kMaxKvTiles / (std::max<int64_t>((params.cache.capacity + kKvTile - 1) / kKvTile, 1) * work_tiles);
}

struct DecodePlan {
  int group;            // heads per kv head
  int query_mma_tiles;  // 8 queries each
  int query_tiles;      // per kv head
  int cluster;          // blocks: 1, 2, 4, 8 or 16
  int clusters;
  int min_tiles;     // see plan_splits()
  int stages;        // of the ring
  int pdl_tiles;     // KV tiles that a block has left when the next kernel may start; 0: it may from the beginning
  int log2_boxes;    // a copy is a box of kKvTile >> log2_boxes keys: 64, 32 or 16
  bool evict_first;  // L2 policy of the copies of keys and values

  __host__ __device__ int boxes() const { return 1 << log2_boxes; }
  __host__ __device__ int box_keys() const { return kKvTile >> log2_boxes; }
  Layout layout(int64_t head_dim) const { return {static_cast<int>(head_dim), 8 * query_mma_tiles, stages, cluster}; }
};

constexpr int kMaxBlocks = 288;  // two for each SM of the largest GPUs
// Sequence lengths up to which one cluster of 8, 4 or 16 blocks per work tile is as fast as more blocks.
constexpr int64_t kMaxSeqlenCluster8 = 512, kMaxSeqlenCluster4 = 768, kMaxSeqlenCluster16 = 2048;
// Shared memory of a block. With a half or a third of an SM's, blocks of the next kernel can start beside this one's.
constexpr size_t kSmallShared = 64 * 1024, kThirdOfShared = 76 * 1024, kLessThanHalf = 92 * 1024,
                 kHalfOfShared = 112 * 1024, kMostOfShared = 200 * 1024;
// The next kernel may start when the blocks request their last kPdlTiles KV tiles: it then reads memory while this one
// merges. With clusters of one block it may start at once instead (0): if it started later, two of its blocks would run
// on an SM that is done early.
//
//   value | case                                                   | result
//   ------|--------------------------------------------------------|----------------
//   1     | clusters of several blocks, 67 MB of keys and values   | 5 to 8 % faster
//   1     | clusters of one block                                  | 15 % slower
constexpr int kPdlTiles = 1;

// Two blocks for every SM where a kernel of one block per SM and half of its shared memory would be unbalanced: behind
// a linear, whose blocks do not end together, two of its blocks would start on an SM that is free early, and none on
// another. In us or ms, an H200; "step" is a decode step of Qwen2.5-7B:
//
//   case                               | one block | two blocks
//   -----------------------------------|-----------|-----------
//   step, 16 sequences of 8192 keys    |      5.81 |       5.31
//   step, 32 sequences of 32768 keys   |      19.8 |       17.3
//   step, 1 sequence of 32768 keys     |      3.98 |       3.90
//   step, 1 of 8192, 16 of 512         |           | up to 0.5 % slower: fewer than kManyKvTiles per SM
//   attention by itself, 32 of 4096    |      68.4 |       70.0
constexpr int64_t kManyKvTiles = 8;

// As many stages as fit into `bytes`; a ring needs at least two.
inline void plan_ring(DecodePlan& plan, int64_t head_dim, size_t bytes) {
  plan.stages = 0;
  const size_t fixed = static_cast<size_t>(plan.layout(head_dim).bytes),
               stage = stage_bytes(static_cast<int>(head_dim));
  if (fixed < bytes) plan.stages = static_cast<int>(std::min<size_t>((bytes - fixed) / (stage + 16), 32));
}

inline DecodePlan plan_decode_attention(const DecodeAttentionParams& params, const DeviceInfo& device) {
  DecodePlan plan{};
  plan.group = static_cast<int>(params.heads / params.kv_heads);
  const int64_t queries = plan.group * params.tokens;
  plan.query_mma_tiles = queries <= 8 ? 1 : 2;
  plan.query_tiles = static_cast<int>((queries + 8 * plan.query_mma_tiles - 1) / (8 * plan.query_mma_tiles));
  const int64_t work_tiles = params.batch * params.kv_heads * plan.query_tiles;
  if (device.compute_capability < 90) {
    plan.cluster = 1;
    plan.clusters = 2 * device.sm_count;
    plan.stages = kCpAsyncStages;
  } else {
    const int64_t max_seqlen =
        params.max_seqlen > 0 ? std::min(params.max_seqlen, params.cache.capacity) : params.cache.capacity;
    const bool is_small = params.head_dim * plan.query_mma_tiles <= 128;
    size_t bytes = params.head_dim <= 128 ? kHalfOfShared : kMostOfShared;
    int blocks = device.sm_count;
    // Only cluster sizes of which all clusters run at the same time; many devices have no clusters of 16 blocks.
    if (max_seqlen <= kMaxSeqlenCluster16 && work_tiles * 8 <= device.sm_count) {
      // A cluster per work tile: every block has work, and the merge needs no workspace.
      plan.cluster = max_seqlen <= kMaxSeqlenCluster8 ? 8 : 16;
      while (plan.cluster > 1 && work_tiles > device.clusters[plan.cluster]) plan.cluster /= 2;
      blocks = static_cast<int>(work_tiles) * plan.cluster;
    } else if (max_seqlen <= kMaxSeqlenCluster4 && is_small && work_tiles <= device.clusters[4]) {
      plan.cluster = 4;
      blocks = static_cast<int>(work_tiles) * plan.cluster;
      bytes = kThirdOfShared;
    } else {
      // new_k: what the linear before has just made.
      const bool unbalanced = params.new_k && work_tiles * (max_seqlen / kKvTile) >= kManyKvTiles * device.sm_count;
      const bool many = work_tiles > device.sm_count;
      plan.cluster = work_tiles <= device.clusters[2] ? 2 : 1;
      if (plan.cluster == 2) blocks = 2 * device.clusters[2];
      // With two blocks per SM one also computes while the other waits for its block table.
      if (is_small && (unbalanced || many || (params.cache.block_table && plan.cluster == 1))) {
        blocks *= 2;
        bytes = many ? kSmallShared : kLessThanHalf;
      }
    }
    plan.clusters = blocks / plan.cluster;
    plan.pdl_tiles = plan.cluster == 1 ? 0 : kPdlTiles;
    plan_ring(plan, params.head_dim, std::min(bytes, device.shared_bytes));
  }
  plan.clusters = std::clamp(plan.clusters, 1, kMaxBlocks / plan.cluster);
  plan.min_tiles = std::max(4 * plan.cluster, 8);
  while (params.cache.block_table && plan.box_keys() > kWarpKeys && params.cache.page_size % plan.box_keys() != 0)
    ++plan.log2_boxes;
  plan.evict_first = plan.query_tiles == 1;  // else several blocks read the same keys
  return plan;
}

}  // namespace llmk::kernels
