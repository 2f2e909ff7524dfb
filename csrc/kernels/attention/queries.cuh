// How the queries of a pair, and in the fused form the new key and value, come to shared memory.
#pragma once
#include "device/vec.cuh"
#include "rotate.cuh"
#include "shape.h"
#include "work.cuh"

namespace llmk::kernels {

// Brings the queries of a pair to shared memory, rotated in the fused form; there also, if `owner`, the new key and
// value, and those to the cache. `before_data` is called by all threads between the loads that `prefetch_cache` speaks
// of and the others. By the warps that compute.
template <typename S, typename Wait>
__device__ void stage_queries(const DecodeAttentionParams& params, const Walk& walk, int chunks, int group, bool owner,
                              unsigned char* shared, const Layout& layout, const Wait& before_data) {
  using T = typename S::T;
  using V = Vec<T, 8>;
  constexpr int kHalf = S::kVectors / 2;
  const int tokens = static_cast<int>(params.tokens), queries = group * tokens;
  const int head = chunks == 1 ? walk.pair : divide(walk.pair, chunks), chunk = walk.pair - head * chunks;
  const int first = chunk * S::kQueries;
  // Each task is two vectors that are rotated together: of the queries, then of the key; and two of the value.
  const int tasks = S::kQueries * kHalf + (owner ? 2 * kHalf : 0);
  bool waited = false;
  for (int task = threadIdx.x; task < tasks || !waited; task += kThreads) {
    const int row = task / kHalf, low = task % kHalf * 8, high = low + S::D / 2;
    const bool is_query = row < S::kQueries, is_key = row == S::kQueries;
    const int query = first + row, t = tokens == 1 ? 0 : divide(query, group);
    const bool exists = task < tasks && (!is_query || query < queries);
    Angles<T, 8> angles;
    const bool rotated = params.positions && exists && (is_query || is_key);
    if (rotated) angles = Angles<T, 8>::load(params.rope, __ldcg(params.positions + walk.b), low, high);
    if (!waited) before_data();
    waited = true;
    if (task >= tasks) break;
    V a = V::of([](int) { return 0.f; }), b = a;
    if (exists) {
      const T* source;
      if (is_query) {
        source = static_cast<const T*>(params.q) + walk.b * params.q_batch + t * params.q_token +
                 (head * group + query - t * group) * params.q_head;
      } else if (is_key) {
        source = static_cast<const T*>(params.new_k) + walk.b * params.new_k_batch + head * params.new_k_head;
      } else {
        source = static_cast<const T*>(params.new_v) + walk.b * params.new_v_batch + head * params.new_v_head;
      }
      a = V::load(source + low);
      b = V::load(source + high);
    }
    if (rotated) rotate(a, b, angles);
    unsigned char* const target =
        shared + (is_query ? layout.q + row * S::kRow : layout.fresh + (is_key ? 0 : S::kRow)) + low * 2;
    *reinterpret_cast<V*>(target) = a;  // not store(), which is for global memory
    *reinterpret_cast<V*>(target + S::D) = b;
    if (is_query || chunk != 0) continue;
    const KvCache& cache = params.cache;
    int64_t page = walk.b;
    int in_page = walk.keys.fresh;
    if (cache.block_table) {
      const int index = divide(in_page, static_cast<int>(cache.page_size));
      page = __ldcg(cache.block_table + walk.b * cache.table_stride + index);
      in_page -= index * static_cast<int>(cache.page_size);
      if (page < 0 || page >= cache.pages) continue;
    }
    T* const kept =
        is_key ? static_cast<T*>(cache.k) + page * cache.k_page + in_page * cache.k_token + head * cache.k_head
               : static_cast<T*>(cache.v) + page * cache.v_page + in_page * cache.v_token + head * cache.v_head;
    a.store(kept + low);
    b.store(kept + high);
  }
}

// Puts the new key or value, which is not in memory yet, into its row of a slot. By one warp.
template <typename S>
__device__ void insert_fresh(unsigned char* slot, int row, const unsigned char* fresh) {
  const int lane = threadIdx.x % 32;
  if (lane < S::kVectors) {
    unsigned char* const target = slot + lane / 8 * kChunkBytes + row * 128 + (lane % 8 ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(fresh + lane * 16);
  }
}

}  // namespace llmk::kernels
