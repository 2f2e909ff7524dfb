// The tile scheduler of decode attention: which keys a cluster of blocks attends to.
//
//   work tile   (sequence, kv head, query tile): up to 16 queries of one kv head against all keys that they see
//   KV tile     64 or 128 keys of a work tile (shape.h): one stage of the ring for the keys, one for the values
//   split       the consecutive KV tiles of a work tile that one cluster processes (split-KV)
//
// All KV tiles form one line: sequence after sequence, in each work tile after work tile. Cluster i takes the KV tiles
// [i, i + 1) * SplitPlan::kv_tiles of it (stream-K). The plan is made on the device from the sequence lengths there, so
// every cluster gets an even part for any lengths, and a captured launch serves all of them. A work tile counts as some
// KV tiles more than it has, for what it takes to begin and to end one: `switch_tiles` on the line behind its last.
// Here it is 0:
//
//   KV tiles of 64 keys, 2 sequences of 150 and 100, 2 kv heads: 4 work tiles A to D of 10 KV tiles in all. 3 clusters
//   of 2 blocks:
//
//     sequence     0                       1
//     kv head      0           1           0       1
//     KV tile      A0  A1  A2  B0  B1  B2  C0  C1  D0  D1
//     cluster      0   0   0   0   1   1   1   1   2   2
//     its block    0   1   0   0   0   1   0   1   0   1        the tiles of a split in turn
//
//   In a block, warp w multiplies a fourth of each KV tile's keys. The merge of a work tile (merge.cuh):
//
//     4 warps          ->  block        by shared memory
//     blocks           ->  cluster      by distributed shared memory
//     clusters 0 and 1 ->  work tile B  by the workspace: the last to arrive merges, in order
//
//   With few work tiles the plan is `aligned` instead: each work tile begins with a cluster of its own.
//
//   With many of equally many KV tiles, each cluster first takes some that it has alone, and what is left is the line:
//   so fewer are shared. us on an H200, sequences x keys, heads of 128:
//
//   case                     | line alone | whole ones first
//   -------------------------|------------|-----------------
//   32 x 2048, 32 + 32 heads |      250.1 |            242.3
//   64 x 8192, 32 + 32 heads |       1926 |             1910
//   48 x 800, 32 + 32 heads  |      150.4 |            143.6
//   44 x 1000, 16 + 8 heads  |       45.7 |             44.0
//
// An even part of the line takes an even time only if all SMs read equally fast. On an H200, 24 of 132 SMs are done
// with theirs in four fifths of the time of the others. But pieces of the line, 3 to 14 % of it, left for whoever comes
// first, made no launch faster by more than 1 %: where many sequences are long, memory is at its limit anyway, and what
// one launch leaves idle the next one uses. us, 64 sequences, heads of 128:
//
//   case                     | even parts | pieces left
//   -------------------------|------------|-------------
//   8192 keys, 32 + 32 heads |       1868 | 1873 to 1883
//   8192 keys, 32 + 8 heads  |        470 |   477 to 479
//   2048 keys, 32 + 32 heads |        479 |   475 to 477
#pragma once
#include <algorithm>
#include <cstdint>

#include "device/divide.cuh"
#include "params/attention.h"
#include "shape.h"

namespace llmk::kernels {

struct SequenceInfo {
  int seqlen, leftpad;

  // Not from L1, which may hold what was there before the previous kernel ended.
  __device__ static SequenceInfo load(const DecodeAttentionParams& params, int b) {
    return {__ldcg(params.cache_seqlens + b), params.cache_leftpad ? __ldcg(params.cache_leftpad + b) : 0};
  }
  bool operator==(const SequenceInfo&) const = default;
};

__device__ inline int window_left_of(const DecodeAttentionParams& params) {
  return static_cast<int>(min(params.window_left, int64_t{1} << 30));  // as many as the largest capacity
}

// The keys [begin, end) of a sequence: from the first that any of its queries sees to the last.
template <typename S>
struct KeyRange {
  int begin, end;
  int tile_origin;  // of the first KV tile: a multiple of the tile, so that no box of one crosses the border of a page
  int new_key;      // fused form: the key that this launch writes, or -1

  KeyRange() = default;
  __device__ KeyRange(const DecodeAttentionParams& params, const SequenceInfo& info) {
    const int capacity = static_cast<int>(params.cache.capacity), tokens = static_cast<int>(params.tokens);
    const int window_left = window_left_of(params);
    end = max(min(info.seqlen, capacity), 0);
    begin = max(info.leftpad, 0);
    if (window_left >= 0) begin = max(begin, end - tokens - window_left);
    begin = min(begin, end);
    tile_origin = begin / S::kKvTile * S::kKvTile;
    new_key = params.new_k && info.seqlen == end ? end - 1 : -1;
  }
  // At least one, so that the work tile of a sequence without keys is processed, too.
  __device__ int kv_tiles() const { return max((end - tile_origin + S::kKvTile - 1) / S::kKvTile, 1); }
};

// All sequences' lengths and paddings, in shared memory, so that the scheduler reads those in device memory once and
// not four times in a row.
template <typename S>
class SequenceLengths {
 public:
  __device__ SequenceLengths(const DecodeAttentionParams& params, void* kept)
      : params_(params), kept_(static_cast<SequenceInfo*>(kept)) {}

  // The sequence of this thread, from device memory.
  __device__ SequenceInfo read() const {
    return SequenceInfo::load(params_, min(static_cast<int>(threadIdx.x), batch() - 1));
  }
  // Keeps this thread's sequence, and those of large batches that no thread has. Before a barrier of the block.
  __device__ void keep(const SequenceInfo& mine) {
    for (int b = threadIdx.x; b < batch(); b += blockDim.x)
      kept_[b] = b == threadIdx.x ? mine : SequenceInfo::load(params_, b);
  }
  __device__ bool is_kept(const SequenceInfo& mine) const {
    const int b = threadIdx.x;
    return b >= batch() || kept_[b] == mine;
  }
  __device__ int batch() const { return static_cast<int>(params_.batch); }

  __device__ KeyRange<S> keys(int b) const { return KeyRange<S>(params_, kept_[b]); }
  // The KV tiles per work tile of sequence first + lane; 0 beyond the batch.
  __device__ int kv_tiles(int first) const {
    const int b = first + threadIdx.x % 32;
    return b < batch() ? keys(b).kv_tiles() : 0;
  }

 private:
  const DecodeAttentionParams& params_;
  SequenceInfo* kept_;
};

__device__ inline int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
__device__ inline int warp_add(int x) { return __reduce_add_sync(0xffffffffu, x); }

struct SplitPlan {
  int kv_tiles;      // per cluster
  bool aligned;      // every work tile begins with a cluster of its own: it counts as a multiple of kv_tiles
  int switch_tiles;  // else: what a work tile counts more than its KV tiles
  int whole;         // work tiles before the line, a multiple of the clusters, each of which takes them by itself
  int clusters;

  __device__ int padded(int length) const {
    return aligned ? divide_up(length, kv_tiles) * kv_tiles : length + switch_tiles;
  }
};

// The work tiles of the line are at least a fourth of the clusters, so that it evens out what they have read so far.
// Short work tiles are all in the line: whole ones of 1 to 3 KV tiles took from 4 % less to 5 % more time.
constexpr int kLeastOfLine = 4, kLeastWhole = 4;

// For whole warps; `work_tiles` is per sequence. Aligned where there is a cluster for every work tile, and that takes
// at most `min_tiles` more KV tiles per cluster than an even split. Fewer than `min_tiles` are not split.
template <typename S>
__device__ SplitPlan plan_splits(const SequenceLengths<S>& seqlens, int work_tiles, int clusters, int min_tiles,
                                 int switch_tiles) {
  const int batch = seqlens.batch();
  int total = 0, longest = 0;
#pragma unroll 1
  for (int first = 0; first < batch; first += 32) {
    const int kv_tiles = seqlens.kv_tiles(first);
    total += kv_tiles;
    longest = max(longest, kv_tiles);
  }
  total = warp_add(total);
  longest = warp_max(longest);
  total *= work_tiles;  // below 2^31: see sequences_per_launch()
  const int all_work_tiles = batch * work_tiles, even_split = max(divide_up(total, clusters), 1);
  const bool equal = longest * all_work_tiles == total;
  if (all_work_tiles <= clusters) {
    // Either of the two bounds gives every work tile its clusters.
    int kv_tiles = divide_up(longest, divide(clusters, all_work_tiles));
    if (all_work_tiles < clusters) kv_tiles = min(kv_tiles, divide_up(total, clusters - all_work_tiles));
    kv_tiles = max(kv_tiles, min_tiles);
    if (kv_tiles <= max(even_split, min_tiles) + min_tiles) return {kv_tiles, true, 0, 0, clusters};
  }
  const int rounds =
      equal && longest >= kLeastWhole ? divide(max(all_work_tiles - clusters / kLeastOfLine, 0), clusters) : 0;
  const int whole = rounds * clusters, of_line = (all_work_tiles - whole) * switch_tiles + total - whole * longest;
  return {max(divide_up(of_line, clusters), 1), false, switch_tiles, whole, clusters};
}

// The work tiles of a cluster, one after another. Positions count KV tiles along the line; those before it are
// negative.
template <typename S>
struct TileScheduler {
  SplitPlan splits;
  int end;                     // of the cluster's part of the line, or of its whole work tile
  int b, work_tile;            // the sequence, and the work tile in it
  int kv_tiles, padded_tiles;  // per work tile of this sequence
  int work_tile_begin;         // the work tile's position
  int first_kv_tile;           // of the cluster's split, in the work tile
  KeyRange<S> keys;

  TileScheduler() = default;
  __device__ TileScheduler(const SequenceLengths<S>& seqlens, int work_tiles, SplitPlan plan, int cluster)
      : splits(plan), end((cluster + 1) * plan.kv_tiles), b(0), work_tile(0) {
    if (splits.whole > 0) {
      keys = seqlens.keys(0);
      count_tiles();
      const int begin = (cluster - splits.whole) * padded_tiles;
      go_to(seqlens, work_tiles, cluster, {begin, 0, begin + padded_tiles});
      return;
    }
    const int batch = seqlens.batch(), begin = cluster * splits.kv_tiles, lane = threadIdx.x % 32;
    int base = 0;  // the position of sequence b
    if (batch > 1) {
#pragma unroll 1
      for (int first = 0; first < batch; first += 32) {
        const int length = splits.padded(seqlens.kv_tiles(first)) * work_tiles;
        int until = length;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, until, offset);
          if (lane >= offset) until += other;
        }
        const unsigned beyond = __ballot_sync(0xffffffffu, base + until > begin);
        if (beyond != 0) {
          const int found = __ffs(beyond) - 1;
          b = first + found;
          base += __shfl_sync(0xffffffffu, until - length, found);
          break;
        }
        base += __shfl_sync(0xffffffffu, until, 31);
        b = batch;
      }
    }
    keys = seqlens.keys(min(b, batch - 1));
    count_tiles();
    work_tile = divide(begin - base, padded_tiles);
    work_tile_begin = base + work_tile * padded_tiles;
    first_kv_tile = begin - work_tile_begin;
    if (batch == 1 && work_tile >= work_tiles) b = 1;
    if (b < batch && first_kv_tile >= kv_tiles) next(seqlens, work_tiles);  // it begins behind the work tile's last one
  }

  __device__ bool done(int batch) const { return b >= batch || work_tile_begin + first_kv_tile >= end; }
  // Whether this is the cluster's last work tile.
  __device__ bool is_last(int batch, int work_tiles) const {
    if (is_whole()) {
      const Place after = after_whole();
      return after.begin + after.first_kv_tile >= min(after.end, (batch * work_tiles - splits.whole) * padded_tiles);
    }
    return work_tile_begin + padded_tiles >= end || (work_tile + 1 == work_tiles && b + 1 == batch);
  }
  __device__ void next(const SequenceLengths<S>& seqlens, int work_tiles) {
    if (is_whole()) {
      const Place after = after_whole();
      const int steps = divide(after.begin - work_tile_begin, padded_tiles);
      return go_to(seqlens, work_tiles, b * work_tiles + work_tile + steps, after);
    }
    work_tile_begin += padded_tiles;
    first_kv_tile = 0;
    if (++work_tile < work_tiles) return;
    work_tile = 0;
    if (++b < seqlens.batch()) {
      keys = seqlens.keys(b);
      count_tiles();
    }
  }

  // The keys of the split; those before keys.begin are masked.
  __device__ int first_key() const { return keys.tile_origin + first_kv_tile * S::kKvTile; }
  __device__ int end_key() const {
    return min(keys.end, keys.tile_origin + min(kv_tiles, end - work_tile_begin) * S::kKvTile);
  }
  // The clusters that share the work tile.
  __device__ int first_cluster() const { return is_whole() ? 0 : divide(work_tile_begin, splits.kv_tiles); }
  __device__ int last_cluster() const {
    return is_whole() ? 0 : divide(work_tile_begin + kv_tiles - 1, splits.kv_tiles);
  }

 private:
  struct Place {
    int begin, first_kv_tile, end;
  };

  // Whether this cluster has the work tile by itself, before the line.
  __device__ bool is_whole() const { return work_tile_begin < 0; }
  // Behind one of those: where the next one of the cluster is, or the first of its part of the line.
  __device__ Place after_whole() const {
    const int next_whole = work_tile_begin + splits.clusters * padded_tiles;
    if (next_whole < 0) return {next_whole, 0, next_whole + padded_tiles};
    const int cluster = divide(next_whole, padded_tiles), begin = cluster * splits.kv_tiles;
    const int end = begin + splits.kv_tiles, in_line = divide(begin, padded_tiles),
              first = begin - in_line * padded_tiles;
    if (first >= kv_tiles) return {(in_line + 1) * padded_tiles, 0, end};  // it begins behind the work tile's last one
    return {in_line * padded_tiles, first, end};
  }
  // To work tile `index` of all, where all have equally many KV tiles.
  __device__ void go_to(const SequenceLengths<S>& seqlens, int work_tiles, int index, const Place& place) {
    b = divide(index, work_tiles);
    work_tile = index - b * work_tiles;
    work_tile_begin = place.begin, first_kv_tile = place.first_kv_tile, end = place.end;
    if (b < seqlens.batch()) keys = seqlens.keys(b);
  }
  __device__ void count_tiles() {
    kv_tiles = keys.kv_tiles();
    padded_tiles = splits.padded(kv_tiles);
  }
};

// The KV tiles of a block, through all work tiles of its cluster. The blocks of a cluster take the tiles of a split in
// turn, so that even few tiles keep many SMs busy.
template <typename S>
struct KvTileIterator {
  TileScheduler<S> scheduler;
  int key;          // the first key of the KV tile
  int first, step;  // in keys: the block's first tile of a split, and the distance to the next
  bool done;

  KvTileIterator() = default;
  __device__ KvTileIterator(const TileScheduler<S>& start, int rank, int blocks)
      : scheduler(start),
        key(start.first_key() + rank * S::kKvTile),
        first(rank * S::kKvTile),
        step(blocks * S::kKvTile) {}

  // Moves on to the next work tile with a KV tile of this block, if this one has none left; to be called before each
  // tile is processed. Returns whether the work tile is still the same.
  __device__ bool skip_to_tile(const SequenceLengths<S>& seqlens, int work_tiles) {
    bool same = true;
#pragma unroll 1
    while (!(done = scheduler.done(seqlens.batch())) && key >= scheduler.end_key()) {
      scheduler.next(seqlens, work_tiles);
      key = scheduler.first_key() + first;
      same = false;
    }
    return same;
  }
  __device__ void advance() { key += step; }
  // Whether at most `pdl_tiles` tiles are left.
  __device__ bool is_near_end(int batch, int work_tiles, int pdl_tiles) const {
    return done || (key + pdl_tiles * step >= scheduler.end_key() && scheduler.is_last(batch, work_tiles));
  }
};

}  // namespace llmk::kernels
