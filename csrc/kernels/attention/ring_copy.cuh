// The ring of keys and values before sm_90: every warp copies the rows that it will multiply itself, by asynchronous
// copies of 16 bytes, and refills a slot as soon as it has used it. So warps do not wait for each other.
#pragma once
#include "device/mma.cuh"
#include "plan.h"
#include "shape.h"
#include "work.cuh"

namespace llmk::kernels {

#if __CUDA_ARCH__ < 900

// The four warps' rows make up a unit.
template <typename S>
class Ring {
 public:
  // Fills the ring with the first units of `feed`.
  __device__ Ring(const DecodeAttentionParams& params, const DecodePlan& plan, const Lengths& lengths, const Feed& feed,
                  uint32_t shared)
      : params_(params), lengths_(lengths), chunks_(plan.chunks), ring_(shared), feed_(feed) {
#pragma unroll 1
    for (slot_ = 0; slot_ < kCopySlots; ++slot_) load();
    slot_ = 0;
  }

  // Waits for the next slot; its offset in shared memory.
  __device__ int wait() {
    cp_async_wait<kCopySlots - 1>();
    __syncwarp();
    return slot_ * S::kSlot;
  }
  __device__ void written() {}
  __device__ void release() {
    __syncwarp();
    load();
    if (++slot_ == kCopySlots) slot_ = 0;
  }

 private:
  // Keys to even slots, values to odd ones; zeros where there are none, or no such page.
  __device__ void load() {
    feed_.seek(lengths_, static_cast<int>(params_.kv_heads) * chunks_);
    if (!feed_.done) {
      const bool is_value = slot_ % 2;
      const KvCache& cache = params_.cache;
      const Walk& walk = feed_.walk;
      const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * kTile, key = feed_.key + first_row;
      int page = walk.b, in_page = key;
      if (cache.block_table) {
        const int page_size = static_cast<int>(cache.page_size), index = key / page_size;
        page = key < walk.end_key() ? __ldcg(cache.block_table + walk.b * cache.table_stride + index) : -1;
        in_page = key - index * page_size;
      }
      const bool exists = page >= 0 && page < cache.pages;
      const int head = walk.pair / chunks_, token = static_cast<int>(is_value ? cache.v_token : cache.k_token);
      const typename S::T* from = static_cast<const typename S::T*>(is_value ? cache.v : cache.k);
      if (exists) {
        from += is_value ? page * cache.v_page + in_page * cache.v_token + head * cache.v_head
                         : page * cache.k_page + in_page * cache.k_token + head * cache.k_head;
      }
#pragma unroll
      for (int i = 0; i < kTile * S::kVectors / 32; ++i) {
        const int vector = lane + 32 * i, row = vector / S::kVectors, column = vector % S::kVectors;
        const bool wanted = exists && key + row >= walk.keys.begin && key + row < walk.end_key();
        cp_async_16_or_zero(
            ring_ + slot_ * S::kSlot + column / 8 * kChunkBytes + (first_row + row) * 128 + (column % 8 ^ row % 8) * 16,
            wanted ? from + (row * token + column * 8) : from, wanted);
      }
      if (is_value) feed_.take();
    }
    cp_async_commit();  // of nothing, at the end, so that groups stay counted
  }

  const DecodeAttentionParams& params_;
  const Lengths& lengths_;
  int chunks_;
  uint32_t ring_;
  Feed feed_;
  int slot_;
};

#endif

}  // namespace llmk::kernels
