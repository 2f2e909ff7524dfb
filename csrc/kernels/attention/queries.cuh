// Loads the queries of a work tile, and in the fused form the new key and value, to shared memory.
#pragma once
#include "device/vec.cuh"
#include "rotate.cuh"
#include "shape.h"
#include "tile_scheduler.cuh"

namespace llmk::kernels {

// Loads the queries of a work tile to shared memory, rotated in the fused form. With `writes_new_kv` also loads the new
// key, rotated, and the new value, and writes them to the cache. All threads call `wait` after the loads that
// `prefetch_cache` allows before the end of the previous kernel, and before all other loads. For the consumer warps.
template <typename S, typename Wait>
__device__ void load_queries(const DecodeAttentionParams& params, const TileScheduler& scheduler, int query_tiles,
                             int group, bool writes_new_kv, unsigned char* shared, const Layout& layout,
                             const Wait& wait) {
  using T = typename S::T;
  using V = Vec<T, 8>;
  constexpr int kHalf = S::kVectors / 2;
  const int tokens = static_cast<int>(params.tokens), queries = group * tokens;
  const int head = query_tiles == 1 ? scheduler.work_tile : divide(scheduler.work_tile, query_tiles),
            query_tile = scheduler.work_tile - head * query_tiles;
  const int first = query_tile * S::kQueries;
  // A task is two vectors that are rotated together: of the queries, then of the key; then two of the value.
  const int tasks = S::kQueries * kHalf + (writes_new_kv ? 2 * kHalf : 0);
  bool waited = false;
  for (int task = threadIdx.x; task < tasks || !waited; task += kThreads) {
    const int row = task / kHalf, low = task % kHalf * 8, high = low + S::D / 2;
    const bool is_query = row < S::kQueries, is_key = row == S::kQueries;
    const int query = first + row, t = tokens == 1 ? 0 : divide(query, group);
    const bool exists = task < tasks && (!is_query || query < queries);
    Angles<T, 8> angles;
    const bool rotated = params.positions && exists && (is_query || is_key);
    if (rotated) angles = Angles<T, 8>::load(params.rope, __ldcg(params.positions + scheduler.b), low, high);
    if (!waited) wait();
    waited = true;
    if (task >= tasks) break;
    V a = V::of([](int) { return 0.f; }), b = a;
    if (exists) {
      const T* source;
      if (is_query) {
        source = static_cast<const T*>(params.q) + scheduler.b * params.q_batch + t * params.q_token +
                 (head * group + query - t * group) * params.q_head;
      } else if (is_key) {
        source = static_cast<const T*>(params.new_k) + scheduler.b * params.new_k_batch + head * params.new_k_head;
      } else {
        source = static_cast<const T*>(params.new_v) + scheduler.b * params.new_v_batch + head * params.new_v_head;
      }
      a = V::load(source + low);
      b = V::load(source + high);
    }
    if (rotated) rotate(a, b, angles);
    unsigned char* const target =
        shared + (is_query ? layout.q + row * S::kRow : layout.new_kv + (is_key ? 0 : S::kRow)) + low * 2;
    *reinterpret_cast<V*>(target) = a;  // not store(), which is for global memory
    *reinterpret_cast<V*>(target + S::D) = b;
    if (is_query || query_tile != 0) continue;
    const KvCache& cache = params.cache;
    int64_t page = scheduler.b;
    int in_page = scheduler.keys.new_key;
    if (cache.block_table) {
      const int index = divide(in_page, static_cast<int>(cache.page_size));
      page = __ldcg(cache.block_table + scheduler.b * cache.table_stride + index);
      in_page -= index * static_cast<int>(cache.page_size);
      if (page < 0 || page >= cache.pages) continue;
    }
    T* const cached =
        is_key ? static_cast<T*>(cache.k) + page * cache.k_page + in_page * cache.k_token + head * cache.k_head
               : static_cast<T*>(cache.v) + page * cache.v_page + in_page * cache.v_token + head * cache.v_head;
    a.store(cached + low);
    b.store(cached + high);
  }
}

// Copies the new key or value to its row of a stage: the producer may have copied the cache before this row was
// written. For one warp.
template <typename S>
__device__ void insert_new_row(unsigned char* stage, int row, const unsigned char* new_row) {
  const int lane = threadIdx.x % 32;
  if (lane < S::kVectors) {
    unsigned char* const target = stage + lane / 8 * kChunkBytes + row * 128 + (lane % 8 ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(new_row + lane * 16);
  }
}

}  // namespace llmk::kernels
