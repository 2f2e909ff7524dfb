// The ring of keys and values on sm_90 and later: a warp of its own asks for whole units by bulk copies, always as far
// ahead as there is room, through all pairs of the block. What a unit is copied by, a Source knows: tensor maps of any
// cache (here), or linear copies where all heads' keys are dense (decode_attention_dense.cu).
#pragma once
#include "device/cluster.cuh"
#include "device/tma.cuh"
#include "plan.h"
#include "shape.h"
#include "work.cuh"

namespace llmk::kernels {

struct KvMaps {
  CUtensorMap k, v;  // boxes of `box` keys and 64 columns
};

#if __CUDA_ARCH__ >= 900

// Where a ring lies: shared addresses of the slots and their barriers.
struct RingPlace {
  uint32_t ring, full, empty;
  int slot_bytes, slots;
};

// Units by tensor maps [pages, kv_heads, tokens, head_dim], which know nothing of lengths, so a captured launch serves
// any. What lies beyond them (columns of the last chunk, tokens behind the capacity, pages that do not exist) comes as
// zeros.
template <typename S>
struct MapSource {
  static constexpr int kLanes = S::kChunks;  // of the copying warp, that a box is copied by
  const DecodePlan& plan;
  const KvMaps& maps;
  int box;  // keys

  __device__ MapSource(const DecodePlan& given, const KvMaps& given_maps)
      : plan(given), maps(given_maps), box(given.box) {
    if (threadIdx.x % 32 == 0) {
      tensor_map_prefetch(maps.k);
      tensor_map_prefetch(maps.v);
    }
  }
  // What the lane brings of a box of which `keys` from its beginning count.
  __device__ int bytes(int, int) const { return box * kChunkColumns * 2; }
  __device__ void missing(uint32_t, int) const {}
  // Part `part` of a unit to its place in the slot.
  __device__ void load(uint32_t slot, bool is_value, int part, int, const Walk& walk, int page, int in_page,
                       uint32_t full) const {
    const int head = plan.chunks == 1 ? walk.pair : walk.pair / plan.chunks, chunk = threadIdx.x % 32 % kLanes;
    const int at[4] = {chunk * kChunkColumns, in_page, head, page};
    // Several chunks of queries read the same keys.
    tensor_load(slot + chunk * kChunkBytes + part * box * 128, is_value ? maps.v : maps.k, at, full,
                plan.evict_first ? kEvictFirst : kEvictNormal);
  }
};

// The side that copies. By all lanes of the last warp: a lane has one box of each half of a unit.
template <typename Source>
class Producer {
 public:
  // Makes the barriers: slots are filled by one announcement and all of its bytes, and empty when all `consumers`,
  // which are warps, say so.
  __device__ Producer(const DecodeAttentionParams& params, const Source& source, const RingPlace& place, int consumers,
                      const Cluster& cluster, const Walk& walk)
      : params_(params),
        source_(source),
        place_(place),
        cluster_(cluster),
        consumers_(consumers),
        parts_(walk.line.unit() / source.box),
        part_(lane() / Source::kLanes),
        feed_(params, walk, cluster) {
    init();
  }

  // Fills the ring with the first units.
  __device__ void begin(const Walk& walk) {
    feed_ = Feed(params_, walk, cluster_);
    slot_ = 0;
    reused_ = 1;
    if (!feed_.done) look_up();
    for (int used = 2; used <= place_.slots && !feed_.done; used += 2) request();
  }

  // Forgets what begin() asked for, once it is there: it was not what is wanted. Nobody may be waiting yet.
  __device__ void forget() {
    const int used = reused_ ? slot_ : place_.slots;
    for (int slot = 0; slot < used; ++slot) barrier_wait(place_.full + 8 * slot, 0);
    __syncwarp();
    for (int slot = lane(); slot < place_.slots; slot += 32) {
      barrier_invalidate(place_.full + 8 * slot);
      barrier_invalidate(place_.empty + 8 * slot);
    }
    init();
  }

  __device__ void run() {
    while (!feed_.done) request();
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void init() {
    for (int slot = lane(); slot < place_.slots; slot += 32) {
      barrier_init(place_.full + 8 * slot, 1);
      barrier_init(place_.empty + 8 * slot, consumers_);
    }
    barrier_init_fence();
    __syncwarp();
  }

  // Of the next 32 parts of units, a lane for each: the page it lies in; and of the 32 behind them, ahead of time.
  __device__ void look_up() {
    taken_ = 0;
    page_ = feed_.walk.b;
    if (!params_.cache.block_table) return;
    page_ = page_of(feed_.key);
    pages_ahead_ = page_of(feed_.key + 32 / parts_ * feed_.step);
  }
  __device__ int page_of(int first) const {
    const int key = first + lane() / parts_ * feed_.step + lane() % parts_ * source_.box;
    if (key >= feed_.walk.end_key()) return -1;
    return __ldcg(params_.cache.block_table + feed_.walk.b * params_.cache.table_stride + divide(key, page_size()));
  }
  __device__ int page_size() const { return static_cast<int>(params_.cache.page_size); }

  // Asks for the keys of a unit, then for its values.
  __device__ void request() {
    const Walk& walk = feed_.walk;
    const int key = feed_.key + part_ * source_.box, keys = min(walk.end_key() - key, source_.box);
    const bool mine = part_ < parts_ && keys > 0 && key + source_.box > walk.keys.begin;
    int page = page_, in_page = key;
    if (params_.cache.block_table) {
      page = __shfl_sync(0xffffffffu, page_, taken_ * parts_ + part_);
      in_page = key - divide(key, page_size()) * page_size();
    }
    const int lane_bytes = mine ? source_.bytes(page, keys) : 0, bytes = warp_add(lane_bytes);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t full = place_.full + 8 * slot_, slot = place_.ring + slot_ * place_.slot_bytes;
      barrier_wait(place_.empty + 8 * slot_, reused_);  // a slot that has not been used passes for empty
      if (mine && lane_bytes == 0) source_.missing(slot, part_);
      __syncwarp();
      if (lane() == 0) barrier_arrive_expecting(full, bytes);
      __syncwarp();
      if (lane_bytes > 0) source_.load(slot, half == 1, part_, lane_bytes, walk, page, in_page, full);
      if (++slot_ == place_.slots) slot_ = 0, reused_ ^= 1;
    }
    const bool same_pair = feed_.next(params_);
    if (feed_.done) return;
    if (!same_pair) {
      look_up();
    } else if (params_.cache.block_table && ++taken_ == 32 / parts_) {
      taken_ = 0;
      page_ = pages_ahead_;
      pages_ahead_ = page_of(feed_.key + 32 / parts_ * feed_.step);
    }
  }

  const DecodeAttentionParams& params_;
  const Source& source_;
  RingPlace place_;
  const Cluster& cluster_;
  int consumers_;
  int parts_, part_;  // of a unit: boxes along the keys, and the lane's one
  Feed feed_;
  int slot_;
  uint32_t reused_;  // the parity of the phase whose end empties the slot
  int page_, pages_ahead_, taken_;
};

// The side of a warp that computes. All of them wait for all slots, or one might meet a barrier a phase too late.
class Ring {
 public:
  __device__ explicit Ring(const RingPlace& place) : place_(place) {}

  // Waits for the next slot; its offset from the first one.
  __device__ int wait() {
    barrier_wait(place_.full + 8 * slot_, phase_);
    return slot_ * place_.slot_bytes;
  }
  // This warp has written to the slot, too.
  __device__ void written() { async_proxy_fence(); }
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(place_.empty + 8 * slot_);
    if (++slot_ == place_.slots) slot_ = 0, phase_ ^= 1;
  }

 private:
  RingPlace place_;
  int slot_ = 0;
  uint32_t phase_ = 0;
};

#endif

}  // namespace llmk::kernels
