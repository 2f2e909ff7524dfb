// The launch plan of decode_attention: clusters of blocks, and the stages of their rings. It does not depend on the
// sequence lengths, which the kernel reads on the device (tile_scheduler.cuh). The constants were measured on an H200.
// Plain host code.
#pragma once
#include <algorithm>
#include <cstdint>

#include "dtype.h"
#include "host_device.h"
#include "kernels/device_info.h"
#include "shape.h"

namespace llmk::kernels {

// Elements between pages, tokens and heads of a cache.
struct KvStrides {
  int64_t page, token, head;
};

// What route and plan of decode_attention depend on.
struct DecodeProblem {
  int64_t batch, tokens, heads, kv_heads, head_dim;
  int64_t capacity, page_size, pages;  // of the cache, as in params/attention.h
  bool paged;
  KvStrides k, v;
  Dtype dtype;
  bool fused;           // the kernel rotates q and the new key, too, and writes the new key and value
  int64_t max_seqlen;   // as in params/attention.h
  bool aligned = true;  // every head of every tensor, and the tables of the rotation, to 16 bytes
};

// The kernel keeps all lengths in shared memory. It counts KV tiles in 32 bits, and pads those of a work tile to at
// most twice their number and kMaxSwitchTiles more. A launch may have this many sequences, even if all of them use
// their whole capacity.
constexpr int64_t kMaxSequences = 1024, kMaxKvTiles = int64_t{1} << 29, kMaxSwitchTiles = 4;
inline int64_t sequences_per_launch(const DecodeProblem& p) {
  const int64_t queries = p.heads / p.kv_heads * p.tokens, work_tiles = p.kv_heads * ((queries + 7) / 8);
  const int64_t kv_tile = kv_tile_of(static_cast<int>(p.head_dim));
  return std::min(kMaxSequences, kMaxKvTiles / (((p.capacity + kv_tile - 1) / kv_tile + kMaxSwitchTiles) * work_tiles));
}

struct DecodePlan {
  int sequences;        // of the launch
  int group;            // heads per kv head
  int query_mma_tiles;  // 8 queries each
  int query_tiles;      // per kv head
  int cluster;          // blocks: 1, 2, 4, 8 or 16
  int clusters;
  int min_tiles, switch_tiles;  // see plan_splits()
  int stages;                   // of the ring
  int pdl_tiles;     // KV tiles that a block has left when the next kernel may start; 0: it may from the beginning
  int box_keys;      // of one copy: 64, 32 or 16
  int log2_boxes;    // in a KV tile
  bool evict_first;  // L2 policy of the copies of keys and values

  LLMK_HOST_DEVICE int boxes() const { return 1 << log2_boxes; }
  Layout layout(int64_t head_dim) const {
    return {static_cast<int>(head_dim), 8 * query_mma_tiles, stages, cluster, sequences};
  }
};

// Keys of a copy: where a KV tile has more, copies without keys of the sequence are left out.
constexpr int kMaxBoxKeys = 64;
constexpr int kMaxBlocks = 288;  // two for each SM of the largest GPUs
constexpr int kDecodeAttentionCounters = kMaxBlocks;
// Shared memory of a block. Beside two of 64 KB a block of the next kernel can start; two of 92 KB keep more copies in
// flight. Blocks with more registers run alone on their SM.
constexpr size_t kSmallShared = 64 * 1024, kLessThanHalf = 92 * 1024, kHalfOfShared = 112 * 1024,
                 kMostOfShared = 200 * 1024;
// The next kernel may start when the blocks request their last kPdlTiles KV tiles: it then reads memory while this one
// merges. With clusters of one block it may start at once instead (0): if it started later, two of its blocks would run
// on an SM that is done early.
//
//   value | case                                                   | result
//   ------|--------------------------------------------------------|----------------
//   1     | clusters of several blocks, 67 MB of keys and values   | 5 to 8 % faster
//   1     | clusters of one block                                  | 15 % slower
constexpr int kPdlTiles = 1;

// Few KV tiles: each work tile has a cluster of its own. All its blocks have tiles, and their merge needs no workspace.
// More: the KV tiles are dealt out evenly to two blocks of each SM, of which one computes while the other waits, and
// behind a linear, whose blocks do not end together, no SM stays without. In us by graph replay, an H100; best of:
//
//   work tiles x KV tiles        | a cluster per work tile, of         | dealt out
//                                |     1      2      4      8     16   | one block, two blocks of an SM
//   -----------------------------|-------------------------------------|------------------------------
//      2 x 16 keys of 64         |                7.2    4.8    4.3    |   8.2       7.6
//     16 x 16                    |                7.2    6.7           |   8.5       8.0
//     40 x 16                    |               10.1                  |  12.0      12.1
//    128 x 16                    |  25.0                               |            24.3
//      4 x  5 keys of 128        |                4.6    3.9    4.1    |
//     20 x  5                    |         5.7    5.0                  |
//    128 x  5                    |  10.7                               |            10.5
//     40 x 32                    |  17.5         17.4                  |  20.6      17.0
//     64 x 128                   |                                     |  97.1      87.6
constexpr int kSwitchTiles = 2;  // of a block go by while it ends a work tile and begins the next
// KV tiles of a split, at least. us, one H200, sequences x keys, of 15 cases; the others within 2 %:
//
//   case                      | 4 or 5       | 6    | 8    | 10   | 12
//   --------------------------|--------------|------|------|------|-----
//    5 x 8192, 14 + 2 of 64   | 14.9 to 15.1 | 14.2 | 14.8 | 14.2 | 15.6
//   24 x 2048, 28 + 4 of 128  | 28.1         | 28.0 | 29.5 | 29.9 | 30.1
//    5 x 2048, 32 + 8 of 128  | 14.7         | 14.8 | 15.0 | 14.9 | 14.7
//    2 x 8192, 28 + 4 of 128  | 13.7         | 13.6 | 13.7 | 14.5 | 15.4
constexpr int kFewestOfSplit = 6;
constexpr int kFewTiles = 4;    // of a block, in a decode step or in a cluster
constexpr int kManyTiles = 32;  // of a work tile
// Outside of a decode step (not `fused`) no ring is filled before the previous kernel has ended. There blocks without a
// cluster take more tiles, and a larger ring helps where it holds what a block has, or where memory is at its limit
// anyway. One H200, graph replay, 565 cases of 1 to 64 sequences, 100 to 2048 keys, 8 + 4 to 64 + 8 heads; the time
// with kSmallShared in parts of that with kLessThanHalf:
//
//   a cluster for each work tile; KV tiles of a block  |    2 |    3 |    4 | more
//   ---------------------------------------------------|------|------|------|-------------
//   clusters of one block                              | 1.00 | 1.04 | 1.05 | 1.02 to 1.11
//   clusters of two                                    | 1.02 | 1.09 | 0.93 |
//   clusters of four                                   | 0.87 |      | 0.95 |
//   clusters of eight                                  | 0.90 |      | 0.94 |
//
//   dealt out; KV tiles of a block                     | 2 to 4 |    5 |            6 |      8 to 10 | more
//   ---------------------------------------------------|--------|------|--------------|--------------|-------------
//   192 work tiles, which leave blocks idle            |   1.00 |      | 0.92         | 0.92 to 0.98 | 0.99 to 1.00
//   256                                                |   0.90 | 0.99 | 1.02         | 1.03         | 0.99 to 1.03
//   384 to 2048                                        |   0.90 | 0.93 | 0.95 to 1.04 | 0.95 to 1.05 | 1.01 to 1.10
//
//   us; dealt out, 5 to 6 tiles of a block             | kLessThanHalf  | kSmallShared
//   ---------------------------------------------------|----------------|-------------
//   512 x 3 keys of 64                                 |           15.1 |         13.8
//   496 x 3 keys of 128                                |           15.5 |         14.7
//   704 x 2                                            |           16.8 |         15.6
//   720 x 2 keys of 64                                 |           17.9 |         16.0
//
//   us; work tiles x KV tiles                          | a cluster each | dealt out
//   ---------------------------------------------------|----------------|----------
//   128 x  5, clusters of one                          |            8.3 |       9.3
//   192 x  8                                           |           15.2 |      15.5
//   128 x 13                                           |           18.5 |      15.7
//    64 x 13, clusters of two                          |           11.3 |      11.0
constexpr int kFewTilesAlone = 8;   // of a block without a cluster
constexpr int kShortPartTiles = 5;  // of a block, on average; one more where work tiles have at most kShortWorkTiles
constexpr int kShortWorkTiles = 3;
// KV tiles of a block that is alone on its SM for which a ring of kSmallShared is enough. A larger one has all of few
// tiles under way before the previous kernel has ended, but leaves the linears before and behind less room to overlap.
// us per token, an H200, 512 tokens of context, "tiles" for each block at the capacity of the cache:
//
//   tiles            | kSmallShared | kLessThanHalf
//   -----------------|--------------|--------------
//   OLMo-2-7B:     4 |         3541 |          3496
//   Qwen3-8B:      2 |         3628 |          3636
//   Qwen2.5-7B:    1 |         3362 |          3382
constexpr int kSmallRingTiles = 2;

// As many stages as fit into `bytes`; a ring needs at least two.
inline void plan_ring(DecodePlan& plan, int64_t head_dim, size_t bytes) {
  plan.stages = 0;
  const size_t fixed = static_cast<size_t>(plan.layout(head_dim).bytes),
               stage = stage_bytes(static_cast<int>(head_dim));
  if (fixed < bytes) plan.stages = static_cast<int>(std::min<size_t>((bytes - fixed) / (stage + 16), 32));
}

// How many blocks run on an SM: as registers (Shape::kBlocks) and shared memory allow. An SM has 1 KB more of that than
// a block may take, and each block takes 1 KB more than it asks for.
inline int decode_blocks_per_sm(int64_t head_dim, int query_mma_tiles, size_t block_bytes, const DeviceInfo& device) {
  const bool by_registers = head_dim * query_mma_tiles <= 128;
  return by_registers && 2 * (block_bytes + 1024) <= device.shared_bytes + 1024 ? 2 : 1;
}

inline DecodePlan plan_decode_attention(const DecodeProblem& p, const DeviceInfo& device) {
  DecodePlan plan{};
  plan.sequences = static_cast<int>(std::min(p.batch, kMaxSequences));
  plan.group = static_cast<int>(p.heads / p.kv_heads);
  const int kv_tile = kv_tile_of(static_cast<int>(p.head_dim));
  const int64_t queries = plan.group * p.tokens;
  const int fewest_stages = device.compute_capability < 90 ? kCpAsyncStages : 2;
  const auto fits = [&](int mma_tiles) {
    const Layout layout(static_cast<int>(p.head_dim), 8 * mma_tiles, fewest_stages, 1, plan.sequences);
    return static_cast<size_t>(layout.bytes) <= device.shared_bytes;
  };
  // Where two do not fit, keys and values are read from the L2 cache once more for every 8 queries.
  plan.query_mma_tiles = queries <= 8 || !fits(2) ? 1 : 2;
  plan.query_tiles = static_cast<int>((queries + 8 * plan.query_mma_tiles - 1) / (8 * plan.query_mma_tiles));
  const int64_t work_tiles = p.batch * p.kv_heads * plan.query_tiles;
  if (device.compute_capability < 90) {
    plan.cluster = 1;
    plan.stages = kCpAsyncStages;
    const auto bytes = static_cast<size_t>(plan.layout(p.head_dim).bytes);
    plan.clusters = decode_blocks_per_sm(p.head_dim, plan.query_mma_tiles, bytes, device) * device.sm_count;
  } else {
    const int64_t max_seqlen = p.max_seqlen > 0 ? std::min(p.max_seqlen, p.capacity) : p.capacity;
    const int64_t tiles = (max_seqlen + kv_tile - 1) / kv_tile;
    const int blocks_per_sm = decode_blocks_per_sm(p.head_dim, plan.query_mma_tiles, kSmallShared, device);
    const bool is_small = blocks_per_sm == 2;
    // Clusters that run at the same time. One of 16 blocks needs nearly all SMs of a GPC, and soon waits for another's.
    const auto has_room = [&](int cluster) {
      const int blocks = cluster == 16 ? device.sm_count / 2 : is_small ? device.sm_count * 3 / 2 : device.sm_count;
      return work_tiles * cluster <= blocks && work_tiles <= int64_t{blocks_per_sm} * device.clusters[cluster];
    };
    plan.cluster = 1;
    while (plan.cluster < 16 && plan.cluster < tiles && has_room(2 * plan.cluster)) plan.cluster *= 2;
    size_t bytes = p.head_dim <= 128 ? kHalfOfShared : kMostOfShared;
    const int few_tiles = p.fused || plan.cluster > 1 ? kFewTiles * plan.cluster : kFewTilesAlone;
    if (tiles <= few_tiles && has_room(plan.cluster)) {
      plan.clusters = static_cast<int>(work_tiles);
      const int64_t of_block = (tiles + plan.cluster - 1) / plan.cluster;
      const bool is_alone = work_tiles * plan.cluster <= device.sm_count;
      const bool is_deep = p.fused             ? tiles > kSmallRingTiles * plan.cluster
                           : plan.cluster == 1 ? of_block > 2
                                               : plan.cluster == 2 && of_block == 3;
      if (is_small) bytes = is_alone && is_deep ? kLessThanHalf : kSmallShared;
    } else {
      plan.cluster = work_tiles <= int64_t{blocks_per_sm} * device.clusters[2] ? 2 : 1;
      plan.clusters = blocks_per_sm * device.clusters[plan.cluster];
      // fused: in a decode step, where the next linear's blocks are to start early.
      const int64_t blocks = int64_t{plan.clusters} * plan.cluster, part = work_tiles * tiles / blocks;
      const int short_part = tiles <= kShortWorkTiles ? kShortPartTiles + 1 : kShortPartTiles;
      const bool many = work_tiles > device.sm_count, is_short = part < short_part * (has_room(1) ? 2 : 1);
      const bool is_deep = many ? !p.fused && !is_short : tiles > kManyTiles;
      if (is_small) bytes = is_deep ? kLessThanHalf : kSmallShared;
    }
    plan.pdl_tiles = plan.cluster == 1 ? 0 : kPdlTiles;
    plan_ring(plan, p.head_dim, std::min(bytes, device.shared_bytes));
  }
  plan.clusters = std::clamp(plan.clusters, 1, kMaxBlocks / plan.cluster);
  plan.min_tiles = plan.cluster > 2 ? 4 * plan.cluster : kFewestOfSplit;
  plan.switch_tiles = std::min<int>(kSwitchTiles * plan.cluster, kMaxSwitchTiles);
  plan.box_keys = kMaxBoxKeys;
  while (p.paged && plan.box_keys > kMmaKeys && p.page_size % plan.box_keys != 0) plan.box_keys /= 2;
  while (plan.box_keys << plan.log2_boxes < kv_tile) ++plan.log2_boxes;
  plan.evict_first = plan.query_tiles == 1;  // else several blocks read the same keys
  return plan;
}

}  // namespace llmk::kernels
