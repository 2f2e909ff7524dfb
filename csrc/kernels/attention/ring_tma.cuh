// The ring of keys and values on sm_90 and later: a warp of its own asks for whole units by tensor maps, always as far
// ahead as there is room, through all pairs of the block. A tensor map is [pages, kv_heads, tokens, head_dim] and knows
// nothing of lengths, so a captured launch serves any. What lies beyond it (columns of the last chunk, tokens behind
// the capacity, pages that do not exist) comes as zeros.
#pragma once
#include "device/cluster.cuh"
#include "device/tma.cuh"
#include "launch_attention.h"
#include "plan.h"
#include "shape.h"
#include "work.cuh"

namespace llmk::kernels {

#if __CUDA_ARCH__ >= 900

// The side that copies. By all lanes of the last warp: a lane has one box of each half of a unit.
template <typename S>
class Producer {
 public:
  __device__ Producer(const DecodeAttentionParams& params, const DecodePlan& plan, const KvMaps& maps,
                      const Lengths& lengths, const Cluster& cluster, uint32_t shared, const Layout& layout)
      : params_(params),
        plan_(plan),
        maps_(maps),
        lengths_(lengths),
        cluster_(cluster),
        ring_(shared),
        full_(shared + layout.full),
        empty_(shared + layout.empty),
        parts_full_(shared + layout.parts_full),
        parts_free_(shared + layout.parts_free),
        pairs_(static_cast<int>(params.kv_heads) * plan.chunks),
        part_(lane() / S::kChunks) {}

  // Those of the ring and of the cluster's sums.
  __device__ void make_barriers() const {
    if (lane() == 0) {
      tensor_map_prefetch(maps_.k);
      tensor_map_prefetch(maps_.v);
      barrier_init(parts_full_, kWarps * cluster_.size);
      barrier_init(parts_free_, kWarps * cluster_.size);
    }
    init();
  }

  // Asks for the units of `walk`: for all of them, but unless `sure` only until the ring is full, and then goes on
  // where it was when called with `go_on`. Calls `wait` before anything is read; unless `sure` it brings the first
  // units to the L2 cache before that, which does no harm if they are not the right ones.
  template <typename Wait>
  __device__ void run(const Walk& walk, bool sure, bool go_on, const Wait& wait) {
#pragma unroll 1
    for (bool ahead = !sure;; ahead = false) {
      if (!go_on) begin(walk);
#pragma unroll 1
      while (true) {
        new_pair_ |= !feed_.seek(lengths_, pairs_);
        if (feed_.is_ending(lengths_.batch(), pairs_, plan_.last_units)) pdl_launch_dependents();
        if (!ahead) wait();
        if (feed_.done || (!sure && 2 * asked_ + 2 > plan_.slots)) break;
        look_up();
        request(ahead);
        feed_.take();
        ++asked_;
      }
      if (!ahead) return;
    }
  }

  // Waits for what was asked for, and makes the barriers anew. Nobody may be waiting yet.
  __device__ void forget() {
    const int used = reused_ ? slot_ : plan_.slots;
#pragma unroll 1
    for (int slot = 0; slot < used; ++slot) barrier_wait(full_ + 8 * slot, 0);
    __syncwarp();
#pragma unroll 1
    for (int slot = lane(); slot < plan_.slots; slot += 32) {
      barrier_invalidate(full_ + 8 * slot);
      barrier_invalidate(empty_ + 8 * slot);
    }
    init();
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void begin(const Walk& walk) {
    feed_ = Feed(walk, cluster_.rank, cluster_.size);
    asked_ = slot_ = 0;
    reused_ = 1;
    new_pair_ = true;
  }

  // A slot is filled by one announcement and all of its bytes, and empty when all warps say so.
  __device__ void init() const {
#pragma unroll 1
    for (int slot = lane(); slot < plan_.slots; slot += 32) {
      barrier_init(full_ + 8 * slot, 1);
      barrier_init(empty_ + 8 * slot, kWarps);
    }
    barrier_init_fence();
    __syncwarp();
  }

  // Of the next 32 parts of units, a lane for each: the page it lies in; and of the 32 behind them, ahead of time.
  __device__ void look_up() {
    if (!params_.cache.block_table) {
      page_ = feed_.walk.b;
      return;
    }
    const int ahead = 32 >> plan_.part_bits;
    if (new_pair_) {
      page_ = page_of(feed_.key);
    } else if (++taken_ == ahead) {
      page_ = pages_ahead_;
    } else {
      return;
    }
    taken_ = 0;
    new_pair_ = false;
    pages_ahead_ = page_of(feed_.key + ahead * feed_.step);
  }
  __device__ int page_of(int first) const {
    const int key = first + (lane() >> plan_.part_bits) * feed_.step + (lane() & (plan_.parts() - 1)) * plan_.box();
    if (key >= feed_.walk.end_key()) return -1;
    return __ldcg(params_.cache.block_table + feed_.walk.b * params_.cache.table_stride + divide(key, page_size()));
  }
  __device__ int page_size() const { return static_cast<int>(params_.cache.page_size); }

  // Asks for the keys of a unit, then for its values; `ahead`: for their way to the L2 cache alone.
  __device__ void request(bool ahead) {
    const Walk& walk = feed_.walk;
    const int box = plan_.box(), key = feed_.key + part_ * box;
    const bool mine = part_ < plan_.parts() && key < walk.end_key() && key + box > walk.keys.begin;
    const int bytes = __popc(__ballot_sync(0xffffffffu, mine)) * box * kChunkColumns * 2;
    int page = page_, in_page = key;
    if (params_.cache.block_table) {
      page = __shfl_sync(0xffffffffu, page_, (taken_ << plan_.part_bits) + part_);
      in_page = key - divide(key, page_size()) * page_size();
    }
    const int head = plan_.chunks == 1 ? walk.pair : divide(walk.pair, plan_.chunks), chunk = lane() % S::kChunks;
    const int at[4] = {chunk * kChunkColumns, in_page, head, page};
    // Several chunks of queries read the same keys.
    const uint64_t policy = plan_.evict_first ? kEvictFirst : kEvictNormal;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const CUtensorMap& map = half == 0 ? maps_.k : maps_.v;
      if (ahead) {
        if (mine) tensor_prefetch_l2(map, at);
        continue;
      }
      const uint32_t full = full_ + 8 * slot_;
      barrier_wait(empty_ + 8 * slot_, reused_);  // a slot that has not been used passes for empty
      if (lane() == 0) barrier_arrive_expecting(full, bytes);
      __syncwarp();
      if (mine) {
        tensor_load(ring_ + slot_ * S::kSlot + chunk * kChunkBytes + part_ * box * 128, map, at, full, policy);
      }
      if (++slot_ == plan_.slots) slot_ = 0, reused_ ^= 1;
    }
  }

  const DecodeAttentionParams& params_;
  const DecodePlan& plan_;
  const KvMaps& maps_;
  const Lengths& lengths_;
  const Cluster& cluster_;
  uint32_t ring_, full_, empty_, parts_full_, parts_free_;
  int pairs_;
  int part_;  // the lane's one of the boxes along the keys of a unit
  Feed feed_;
  int asked_;      // units so far
  bool new_pair_;  // whether nothing is known of the pages of this pair
  int slot_;
  uint32_t reused_;  // the parity of the phase whose end empties the slot
  int page_, pages_ahead_, taken_;
};

// The side of a warp that computes. All of them wait for all slots, or one might meet a barrier a phase too late.
template <typename S>
class Ring {
 public:
  __device__ Ring(const DecodePlan& plan, uint32_t shared, const Layout& layout)
      : ring_(shared), full_(shared + layout.full), empty_(shared + layout.empty), slots_(plan.slots) {}

  // Waits for the next slot; its offset in shared memory.
  __device__ int wait() {
    barrier_wait(full_ + 8 * slot_, phase_);
    return slot_ * S::kSlot;
  }
  // This warp has written to the slot, too.
  __device__ void written() { async_proxy_fence(); }
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty_ + 8 * slot_);
    if (++slot_ == slots_) slot_ = 0, phase_ ^= 1;
  }

 private:
  uint32_t ring_, full_, empty_;
  int slots_, slot_ = 0;
  uint32_t phase_ = 0;
};

#endif

}  // namespace llmk::kernels
