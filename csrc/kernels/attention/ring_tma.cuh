// The ring of KV tiles on sm_90 and later. A producer warp fills its stages by TMA through all work tiles of the block,
// keys and values in turn; four consumer warps drain them.
//
//   full[s]    1 arrival (producer) and the bytes of the copies    consumers wait
//   empty[s]   kWarps arrivals                                     the producer waits
//
// The tensor map is [pages, kv_heads, tokens, head_dim] and does not depend on lengths, so a captured launch serves
// any. Elements beyond it (columns of the last chunk, tokens beyond the capacity, pages that do not exist) come as
// zeros.
#pragma once
#include "device/cluster.cuh"
#include "device/tma.cuh"
#include "launch_attention.h"
#include "plan.h"
#include "shape.h"
#include "tile_scheduler.cuh"

namespace llmk::kernels {

#if __CUDA_ARCH__ >= 900

// For all lanes of the last warp: a lane copies one box of the keys and one of the values of each KV tile.
template <typename S>
class Producer {
 public:
  __device__ Producer(const DecodeAttentionParams& params, const DecodePlan& plan, const KvMaps& maps,
                      const SequenceLengths<S>& seqlens, const Cluster& cluster, uint32_t shared, const Layout& layout)
      : params_(params),
        plan_(plan),
        maps_(maps),
        seqlens_(seqlens),
        cluster_(cluster),
        ring_(shared),
        full_(shared + layout.full),
        empty_(shared + layout.empty),
        partials_full_(shared + layout.partials_full),
        partials_empty_(shared + layout.partials_empty),
        work_tiles_(static_cast<int>(params.kv_heads) * plan.query_tiles),
        box_(lane() / S::kChunks) {}

  // The barriers of the ring and of the merge.
  __device__ void init_barriers() const {
    if (lane() == 0) {
      tensor_map_prefetch(maps_.k);
      tensor_map_prefetch(maps_.v);
      barrier_init(partials_full_, 1);
      barrier_init(partials_empty_, kWarps * cluster_.size);
    }
    init_stages();
  }

  // Copies the KV tiles of `scheduler`, after `wait`. Unless `confirmed`, first prefetches the first tiles to the L2
  // cache, before `wait`, and stops when the ring is full. `resume` goes on from there.
  template <typename Wait>
  __device__ void run(const TileScheduler<S>& scheduler, bool confirmed, bool resume, const Wait& wait) {
#pragma unroll 1
    for (bool prefetch = !confirmed;; prefetch = false) {
      if (!resume) start(scheduler);
#pragma unroll 1
      while (true) {
        new_work_tile_ |= !tiles_.skip_to_tile(seqlens_, work_tiles_);
        if (tiles_.is_near_end(seqlens_.batch(), work_tiles_, plan_.pdl_tiles)) pdl_launch_dependents();
        if (!prefetch) wait();
        if (tiles_.done || (!confirmed && 2 * tiles_copied_ + 2 > plan_.stages)) break;
        load_pages();
        copy_kv_tile(prefetch);
        tiles_.advance();
        ++tiles_copied_;
      }
      if (!prefetch) return;
    }
  }

  // Waits for the copies in flight, and initialises the barriers again. No consumer may be waiting.
  __device__ void reset() {
    const int filled = empty_phase_ ? stage_ : plan_.stages;
#pragma unroll 1
    for (int stage = 0; stage < filled; ++stage) barrier_wait(full_ + 8 * stage, 0);
    __syncwarp();
#pragma unroll 1
    for (int stage = lane(); stage < plan_.stages; stage += 32) {
      barrier_invalidate(full_ + 8 * stage);
      barrier_invalidate(empty_ + 8 * stage);
    }
    init_stages();
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void start(const TileScheduler<S>& scheduler) {
    tiles_ = KvTileIterator<S>(scheduler, cluster_.rank, cluster_.size);
    tiles_copied_ = stage_ = 0;
    empty_phase_ = 1;
    new_work_tile_ = true;
  }

  __device__ void init_stages() const {
#pragma unroll 1
    for (int stage = lane(); stage < plan_.stages; stage += 32) {
      barrier_init(full_ + 8 * stage, 1);
      barrier_init(empty_ + 8 * stage, kWarps);
    }
    barrier_init_fence();
    __syncwarp();
  }

  // Keeps the pages of the next 32 boxes, one per lane, and prefetches those of the 32 boxes after them.
  __device__ void load_pages() {
    if (!params_.cache.block_table) {
      page_ = tiles_.scheduler.b;
      return;
    }
    const int pages = 32 >> plan_.log2_boxes;
    if (new_work_tile_) {
      page_ = page_of(tiles_.key);
    } else if (++pages_used_ == pages) {
      page_ = next_pages_;
    } else {
      return;
    }
    pages_used_ = 0;
    new_work_tile_ = false;
    next_pages_ = page_of(tiles_.key + pages * tiles_.step);
  }
  __device__ int page_of(int first) const {
    const int key =
        first + (lane() >> plan_.log2_boxes) * tiles_.step + (lane() & (plan_.boxes() - 1)) * plan_.box_keys;
    if (key >= tiles_.scheduler.end_key()) return -1;
    return __ldcg(params_.cache.block_table + tiles_.scheduler.b * params_.cache.table_stride +
                  divide(key, page_size()));
  }
  __device__ int page_size() const { return static_cast<int>(params_.cache.page_size); }

  // Copies the keys of a KV tile, then its values; `prefetch`: only to the L2 cache.
  __device__ void copy_kv_tile(bool prefetch) {
    const TileScheduler<S>& scheduler = tiles_.scheduler;
    const int box_keys = plan_.box_keys, key = tiles_.key + box_ * box_keys;
    const bool has_box = box_ < plan_.boxes() && key < scheduler.end_key() && key + box_keys > scheduler.keys.begin;
    const int bytes = __popc(__ballot_sync(0xffffffffu, has_box)) * box_keys * kChunkColumns * 2;
    int page = page_, in_page = key;
    if (params_.cache.block_table) {
      page = __shfl_sync(0xffffffffu, page_, (pages_used_ << plan_.log2_boxes) + box_);
      in_page = key - divide(key, page_size()) * page_size();
    }
    const int head = plan_.query_tiles == 1 ? scheduler.work_tile : divide(scheduler.work_tile, plan_.query_tiles),
              chunk = lane() % S::kChunks;
    const int at[4] = {chunk * kChunkColumns, in_page, head, page};
    // Several query tiles read the same keys.
    const uint64_t policy = plan_.evict_first ? kEvictFirst : kEvictNormal;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const CUtensorMap& map = half == 0 ? maps_.k : maps_.v;
      if (prefetch) {
        if (has_box) tensor_prefetch_l2(map, at);
        continue;
      }
      const uint32_t full = full_ + 8 * stage_;
      barrier_wait(empty_ + 8 * stage_, empty_phase_);  // passes for a stage that has not been used yet
      if (lane() == 0) barrier_arrive_expecting(full, bytes);
      __syncwarp();
      if (has_box) {
        tensor_load(ring_ + stage_ * S::kStageBytes + chunk * S::kChunkBytes + box_ * box_keys * 128, map, at, full,
                    policy);
      }
      if (++stage_ == plan_.stages) stage_ = 0, empty_phase_ ^= 1;
    }
  }

  const DecodeAttentionParams& params_;
  const DecodePlan& plan_;
  const KvMaps& maps_;
  const SequenceLengths<S>& seqlens_;
  const Cluster& cluster_;
  uint32_t ring_, full_, empty_, partials_full_, partials_empty_;
  int work_tiles_;
  int box_;  // this lane's box along the keys of a KV tile
  KvTileIterator<S> tiles_;
  int tiles_copied_;
  bool new_work_tile_;  // none of its pages are loaded yet
  int stage_;
  uint32_t empty_phase_;  // the parity to wait for at empty[stage_]
  int page_, next_pages_, pages_used_;
};

// The ring as a consumer warp sees it. All warps wait for all stages, even without keys in them: a warp that skipped
// one could fall two phases behind its barrier.
template <typename S>
class Ring {
 public:
  __device__ Ring(const DecodePlan& plan, uint32_t shared, const Layout& layout)
      : ring_(shared), full_(shared + layout.full), empty_(shared + layout.empty), stages_(plan.stages) {}

  // Waits for the next stage; returns its offset in shared memory.
  __device__ int wait() {
    barrier_wait(full_ + 8 * stage_, phase_);
    return stage_ * S::kStageBytes;
  }
  // After ordinary writes to the stage, before it is released to TMA.
  __device__ void fence_writes() { async_proxy_fence(); }
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty_ + 8 * stage_);
    if (++stage_ == stages_) stage_ = 0, phase_ ^= 1;
  }

 private:
  uint32_t ring_, full_, empty_;
  int stages_, stage_ = 0;
  uint32_t phase_ = 0;
};

#endif

}  // namespace llmk::kernels
