// The ring of KV tiles before sm_90, filled by cp.async. Each warp is its own producer and consumer: it copies the rows
// that it will multiply, and refills a stage as soon as it has read it. So the ring needs no barriers between warps.
#pragma once
#include "device/mma.cuh"
#include "plan.h"
#include "shape.h"
#include "tile_scheduler.cuh"

namespace llmk::kernels {

#if __CUDA_ARCH__ < 900

// The rows of one warp; the four warps' rows make a KV tile.
template <typename S>
class Ring {
 public:
  // Prologue: fills the ring with the first tiles.
  __device__ Ring(const DecodeAttentionParams& params, const DecodePlan& plan, const SequenceLengths<S>& seqlens,
                  const KvTileIterator<S>& first_tile, uint32_t shared)
      : params_(params), seqlens_(seqlens), query_tiles_(plan.query_tiles), ring_(shared), tiles_(first_tile) {
#pragma unroll 1
    for (stage_ = 0; stage_ < kCpAsyncStages; ++stage_) load();
    stage_ = 0;
  }

  // Waits for the next stage; returns its offset in shared memory.
  __device__ int wait() {
    cp_async_wait<kCpAsyncStages - 1>();
    __syncwarp();
    return stage_ * S::kStageBytes;
  }
  __device__ void fence_writes() {}
  __device__ void release() {
    __syncwarp();
    load();
    if (++stage_ == kCpAsyncStages) stage_ = 0;
  }

 private:
  // Copies keys to even stages, values to odd ones; zeros for masked keys and for pages that do not exist.
  __device__ void load() {
    tiles_.skip_to_tile(seqlens_, static_cast<int>(params_.kv_heads) * query_tiles_);
    if (!tiles_.done) {
      const bool is_value = stage_ % 2;
      const KvCache& cache = params_.cache;
      const TileScheduler<S>& scheduler = tiles_.scheduler;
      const int lane = threadIdx.x % 32, head = scheduler.work_tile / query_tiles_,
                token = static_cast<int>(is_value ? cache.v_token : cache.k_token);
      // A page holds a multiple of kMmaKeys keys: so many at a time are in one page.
#pragma unroll
      for (int keys = 0; keys < S::kKeyTiles; ++keys) {
        const int first_row = threadIdx.x / 32 * S::kWarpKeys + keys * kMmaKeys, key = tiles_.key + first_row;
        int page = scheduler.b, in_page = key;
        if (cache.block_table) {
          const int page_size = static_cast<int>(cache.page_size), index = key / page_size;
          page = key < scheduler.end_key() ? __ldcg(cache.block_table + scheduler.b * cache.table_stride + index) : -1;
          in_page = key - index * page_size;
        }
        const bool exists = page >= 0 && page < cache.pages;
        const typename S::T* from = static_cast<const typename S::T*>(is_value ? cache.v : cache.k);
        if (exists) {
          from += is_value ? page * cache.v_page + in_page * cache.v_token + head * cache.v_head
                           : page * cache.k_page + in_page * cache.k_token + head * cache.k_head;
        }
#pragma unroll
        for (int i = 0; i < kMmaKeys * S::kVectors / 32; ++i) {
          const int vector = lane + 32 * i, row = vector / S::kVectors, column = vector % S::kVectors;
          const bool is_live = exists && key + row >= scheduler.keys.begin && key + row < scheduler.end_key();
          cp_async_16_or_zero(ring_ + stage_ * S::kStageBytes + column / 8 * S::kChunkBytes + (first_row + row) * 128 +
                                  (column % 8 ^ row % 8) * 16,
                              is_live ? from + (row * token + column * 8) : from, is_live);
        }
      }
      if (is_value) tiles_.advance();
    }
    cp_async_commit();  // also when empty, so that cp_async_wait() counts stages
  }

  const DecodeAttentionParams& params_;
  const SequenceLengths<S>& seqlens_;
  int query_tiles_;
  uint32_t ring_;
  KvTileIterator<S> tiles_;
  int stage_;
};

#endif

}  // namespace llmk::kernels
