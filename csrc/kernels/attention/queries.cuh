// Loads the queries of a work tile, and in the fused form the new key and value, to shared memory.
#pragma once
#include "device/vec.cuh"
#include "merge.cuh"
#include "qk_norm.cuh"
#include "rotate.cuh"
#include "shape.h"
#include "tile_scheduler.cuh"

namespace llmk::kernels {

// Adds up the squares of all heads of q of sequence b, and with `has_key` those of its new key. Warp w writes its sums
// to of_warps[w * stride], and of the key behind that. For the consumer warps.
template <typename S>
__device__ void sum_rows(const DecodeAttentionParams& params, int b, bool has_key, float* of_warps, int stride) {
  using T = typename S::T;
  static_assert(kThreads == kRowThreads);
#pragma unroll 1
  for (int part = 0; part <= has_key; ++part) {  // a loop: no code twice
    const bool is_key = part == 1;
    const T* const row = is_key ? static_cast<const T*>(params.new_k) + b * params.new_k_batch
                                : static_cast<const T*>(params.q) + b * params.q_batch;
    const int64_t heads = is_key ? params.kv_heads : params.heads;
    const float squares =
        warp_squares<T, 8>(row, is_key ? params.new_k_head : params.q_head, static_cast<unsigned>(heads), S::D);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32 * stride + part] = squares;
  }
  consumers_barrier();
}

// Loads the queries of a work tile to shared memory, rotated in the fused form. With `writes_new_kv` also loads the new
// key, rotated, and the new value, and writes them to the cache. All threads call `wait` after the loads that
// `prefetch_cache` allows before the end of the previous kernel, and before all other loads. For the consumer warps.
// kNorm: what has a weight in params.norm is normalized before the rotation.
template <typename S, bool kNorm, typename Wait>
__device__ void load_queries(const DecodeAttentionParams& params, const TileScheduler<S>& scheduler, int query_tiles,
                             int group, bool writes_new_kv, unsigned char* shared, const Layout& layout,
                             const Wait& wait) {
  using T = typename S::T;
  using V = Vec<T, 8>;
  constexpr int kHalf = S::kVectors / 2;
  // Lanes per row: for the sum of its squares a power of two. Then whole warps stay in the loop, for the shuffles.
  constexpr int kLanes = !kNorm ? kHalf : kHalf <= 4 ? 4 : kHalf <= 8 ? 8 : 16;
  static_assert(kHalf <= 16);
  const int lane = kNorm ? threadIdx.x % 32 : 0;
  const int tokens = static_cast<int>(params.tokens), queries = group * tokens;
  const int head = query_tiles == 1 ? scheduler.work_tile : divide(scheduler.work_tile, query_tiles),
            query_tile = scheduler.work_tile - head * query_tiles;
  const int first = query_tile * S::kQueries;
  // A task is two vectors, of the queries, then of the key, which may be rotated together; then two of the value.
  const int tasks = S::kQueries * kLanes + (writes_new_kv ? 2 * kLanes : 0);
  // The sums of squares of rows lie in the padding of the first queries.
  [[maybe_unused]] float* const of_warps = reinterpret_cast<float*>(shared + layout.q + S::D * 2);
  constexpr int kStride = S::kRow / 4;
  static_assert(S::kRow - S::D * 2 >= 8 && S::kQueries >= kWarps);
  bool waited = false;
  for (int task = threadIdx.x; task - lane < tasks || !waited; task += kThreads) {
    const int row = task / kLanes, pair = task % kLanes * 8;
    const bool is_task = task < tasks && (kLanes == kHalf || pair < S::D / 2);
    const PairPlace at(pair, S::D, static_cast<int>(params.rope.rotary_dim));  // which is 0 but in the fused form
    const int low = at.low, high = at.high;
    const bool is_query = row < S::kQueries, is_key = row == S::kQueries;
    const int query = first + row, t = tokens == 1 ? 0 : divide(query, group);
    const bool exists = is_task && (!is_query || query < queries);
    Angles<T, 8> angles;
    const bool rotated = at.rotated && exists && (is_query || is_key);
    if (rotated) angles = Angles<T, 8>::load(params.rope, __ldcg(params.positions + scheduler.b), low, high);
    [[maybe_unused]] const T* weight = nullptr;
    [[maybe_unused]] V weight_low, weight_high;
    if constexpr (kNorm) {
      if (exists)
        weight = static_cast<const T*>(is_query ? params.norm.q_weight : is_key ? params.norm.k_weight : nullptr);
      if (weight && params.norm.row_wise) weight += (is_query ? head * group + query - t * group : head) * S::D;
      if (weight) weight_low = V::load(weight + low), weight_high = V::load(weight + high);
    }
    // Before the wait, which the address would else prolong.
    const T* source;
    if (is_query) {
      source = static_cast<const T*>(params.q) + scheduler.b * params.q_batch + t * params.q_token +
               (head * group + query - t * group) * params.q_head;
    } else if (is_key) {
      source = static_cast<const T*>(params.new_k) + scheduler.b * params.new_k_batch + head * params.new_k_head;
    } else {
      source = static_cast<const T*>(params.new_v) + scheduler.b * params.new_v_batch + head * params.new_v_head;
    }
    if (!waited) {
      wait();
      if constexpr (kNorm) {
        if (params.norm.row_wise) sum_rows<S>(params, scheduler.b, writes_new_kv, of_warps, kStride);
      }
    }
    waited = true;
    if (!kNorm && !is_task) break;
    V a = V::of([](int) { return 0.f; }), b = a;
    if (exists) {
      a = V::load(source + low);
      b = V::load(source + high);
    }
    if constexpr (kNorm) {
      float rstd;
      if (params.norm.row_wise) {
        const int heads = static_cast<int>(is_key ? params.kv_heads : params.heads);
        rstd = reciprocal_rms(row_squares(of_warps + is_key, kStride), heads * S::D, params.norm.options);
      } else {
        rstd = reciprocal_rms(warp_sum(add_squares(0.f, a, b), kLanes), S::D, params.norm.options);
      }
      if (weight) a = normalize(a, rstd, weight_low, params.norm.options);
      if (weight) b = normalize(b, rstd, weight_high, params.norm.options);
      if (!is_task) continue;
    }
    if (rotated) rotate(a, b, angles);
    unsigned char* const target =
        shared + (is_query ? layout.q + row * S::kRow : layout.new_kv + (is_key ? 0 : S::kRow)) + low * 2;
    *reinterpret_cast<V*>(target) = a;  // not store(), which is for global memory
    *reinterpret_cast<V*>(target + (high - low) * 2) = b;
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
    unsigned char* const target = stage + lane / 8 * S::kChunkBytes + row * 128 + (lane % 8 ^ row % 8) * 16;
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(new_row + lane * 16);
  }
}

}  // namespace llmk::kernels
