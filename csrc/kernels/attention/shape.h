// Tile sizes and shared-memory layout of decode_attention. Plain host code, for kernels as well.
#pragma once
#include "host_device.h"

namespace llmk::kernels {

constexpr int kWarps = 4;  // consumers of a block; from sm_90 on there is a producer warp beside them
constexpr int kThreads = 32 * kWarps;
constexpr int kMmaKeys = 16;  // of one mma.sync

// The keys that a block multiplies at a time. A tile takes a warp a microsecond of latencies, whatever its size: short
// heads have more keys in it, so that a tile of any head has at least 16 KB of keys.
LLMK_HOST_DEVICE constexpr int kv_tile_of(int head_dim) { return head_dim <= 64 ? 128 : 64; }

// A stage of the ring holds the keys or the values of a KV tile: columns 0 to 63 of all keys, then columns 64 to 127,
// ...; rows of 128 bytes in TMA's 128-byte swizzle (16-byte vector v of row r lies at v ^ (r % 8)), so that eight rows
// cover all banks.
constexpr int kChunkColumns = 64;
LLMK_HOST_DEVICE constexpr int chunks_of_head(int head_dim) { return (head_dim + kChunkColumns - 1) / kChunkColumns; }
LLMK_HOST_DEVICE constexpr int stage_bytes(int head_dim) {
  return chunks_of_head(head_dim) * kv_tile_of(head_dim) * kChunkColumns * 2;
}

constexpr int kCpAsyncStages = 4;  // before sm_90, see ring_copy.cuh

// The template parameters of the kernel, on which its registers depend. kTiles: MMA tiles of 8 queries.
template <typename Element, int kHeadDim, int kTiles>
struct Shape {
  using T = Element;
  static constexpr int D = kHeadDim, kMmaTiles = kTiles, kQueries = 8 * kTiles;
  static constexpr int kKvTile = kv_tile_of(D), kWarpKeys = kKvTile / kWarps, kKeyTiles = kWarpKeys / kMmaKeys;
  static constexpr int kChunks = chunks_of_head(D), kStageBytes = stage_bytes(D), kChunkBytes = kStageBytes / kChunks;
  static constexpr int kVectors = D / 8;   // of 16 bytes, per row
  static constexpr int kRow = D * 2 + 16;  // bytes per query; 16 of padding against bank conflicts
  static constexpr int kSumRow = D + 4;    // floats per partial output; 4 of padding against bank conflicts
  static constexpr int kBlocks = D * kTiles <= 128 ? 2 : 1;  // per SM, limited by registers
};

// Offsets in bytes; the ring is at 0.
struct Layout {
  int q;                // the queries of a work tile
  int new_kv;           // the new key, then the new value
  int sums, softmaxes;  // partial outputs of each warp, by query
  int block_sums,
      block_softmaxes;  // partial outputs of each block of the cluster, for the queries that this one merges
  int full, empty;      // barriers of the stages
  int partials_full, partials_empty;  // barriers of block_sums
  int is_last;                        // Merger::is_last_cluster(), for all warps
  int seqlens;                        // of the launch's sequences: length and padding
  int bytes;

  LLMK_HOST_DEVICE constexpr Layout(int head_dim, int queries, int stages, int cluster, int sequences)
      : q(stages * stage_bytes(head_dim)),
        new_kv(q + queries * (head_dim * 2 + 16)),
        sums(new_kv + 2 * (head_dim * 2 + 16)),
        softmaxes(sums + kWarps * queries * (head_dim + 4) * 4),
        block_sums(softmaxes + kWarps * queries * 8),
        block_softmaxes(block_sums + (cluster > queries ? cluster : queries) * (head_dim + 4) * 4),
        full(block_softmaxes + (cluster > queries ? cluster : queries) * 8),
        empty(full + stages * 8),
        partials_full(empty + stages * 8),
        partials_empty(partials_full + 8),
        is_last(partials_empty + 8),
        seqlens(is_last + 16),
        bytes(seqlens + sequences * 8) {}
};

}  // namespace llmk::kernels
