// Decode attention: a few query tokens per sequence against a KV cache.
//
//   s[j] = softmax_scale q . k[j]  (softcap tanh(s / softcap))     y = sum_j softmax(s)[j] v[j]
//
// over the keys j in [leftpad, seqlen - tokens + t] of query token t, the last window_left + 1 of them.
// q and y [batch, tokens, heads, head_dim], cache paged or contiguous (params/attention.h); fp16 and bf16. Scores,
// softmax and sums in fp32; the probabilities are rounded to the dtype for the second product, and the result once. The
// fused form rotates q as it is loaded, rotates the new key, and writes it and the new value to the cache; before the
// rotation it normalizes q and the key, each head or all heads together, if there are weights for that.
// Reads every key and value in range once: memory is the limit.
//
//   tile_scheduler.cuh  split-KV: which keys a cluster of blocks attends to
//   ring_tma.cuh        the producer warp and the ring of KV tiles (sm_90; ring_copy.cuh: cp.async before)
//   queries.cuh         the queries, and the new key and value, to shared memory (qk_norm.cuh, rotate.cuh)
//   tile.cuh            the main loop's body: a warp's keys of a KV tile, online softmax
//   merge.cuh           the reduction of the partial sums
//   plan.h              clusters and stages, with the measured choices
//
// Programmatic dependent launch (ptx.cuh says what may be read before pdl_wait()):
//
//   prefetch_cache   The caller promises that the cache, the lengths, tables, positions and weights, not q and the new
//                    key and value, may be read early: the ring is filled before the previous kernel has ended. Other
//                    launches of the same step write other layers' caches, and each reads only keys that earlier steps
//                    wrote.
//   else             Speculation. Before pdl_wait() the work is scheduled from the lengths that are in memory then, and
//                    the first KV tiles are prefetched to the L2 cache: wrong ones do no harm. After pdl_wait() the
//                    lengths are read again while the first copies run. If they have changed, the block starts over.
//
// The next kernel may start when the blocks request their last KV tiles (kPdlTiles in plan.h). A block runs for
// microseconds, so code that runs once counts, and so does fetching its instructions: no code twice, no integer
// division.
//
// Sources: FlashAttention (Dao et al. 2022), Flash-Decoding (Dao et al. 2023), GQA packing (Ainslie et al. 2023).
#pragma once
#include "device/cluster.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "launch_attention.h"
#include "merge.cuh"
#include "plan.h"
#include "queries.cuh"
#include "ring_copy.cuh"
#include "ring_tma.cuh"
#include "tile.cuh"
#include "tile_scheduler.cuh"

namespace llmk::kernels {

// kNorm: see load_queries(). A template parameter, since code that is skipped would still be fetched.
template <typename S, bool kNorm>
__global__ void __launch_bounds__(kThreads + 32, S::kBlocks)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams params,
                            const __grid_constant__ DecodePlan plan,
                            [[maybe_unused]] const __grid_constant__ KvMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Layout layout(S::D, S::kQueries, plan.stages, plan.cluster, plan.sequences);
  const Cluster cluster = Cluster::of(plan.cluster, plan.clusters);
  const int warp = threadIdx.x / 32;
  const int query_tiles = plan.query_tiles, work_tiles = static_cast<int>(params.kv_heads) * query_tiles,
            group = plan.group;
  const int tokens = static_cast<int>(params.tokens), batch = static_cast<int>(params.batch);
  if (plan.pdl_tiles == 0) pdl_launch_dependents();
  bool waiting = true;
  const auto wait = [&] {
    if (waiting) pdl_wait();
    waiting = false;
  };
#if __CUDA_ARCH__ >= 900
  // No speculation in the fused form, which writes to the cache, or for a batch of more sequences than threads.
  const bool speculative = !params.prefetch_cache && !params.new_k && batch <= static_cast<int>(blockDim.x);
  if (!params.prefetch_cache && !speculative) wait();
  const bool is_producer = warp == kWarps;
  SequenceLengths<S> seqlens(params, shared + layout.seqlens);
  SequenceInfo info = seqlens.read();
  Producer<S> producer(params, plan, maps, seqlens, cluster, shared_address(shared), layout);
  if (is_producer) producer.init_barriers();
  cluster.arrive_relaxed();  // this block's barriers are initialised, and fenced
#else
  constexpr bool speculative = false, is_producer = false;  // no programmatic dependent launch
  SequenceLengths<S> seqlens(params, shared + layout.seqlens);
  SequenceInfo info = seqlens.read();
#endif
  seqlens.keep(info);
  __syncthreads();
  Merger<S> merger(params, plan, cluster, shared, layout);
  const ScoreMod score_mod(params);

  // Without speculation there is one pass, `confirmed`. With it there are two:
  //
  //   pass         producer                             consumers               at its end
  //   speculative  prefetches to L2, waits for the      loads the first         compares the lengths; changed: resets
  //                previous kernel, fills the ring      queries, then stops     the barriers and reschedules
  //   confirmed    the rest, or all if rescheduled      all work tiles
  TileScheduler<S> scheduler;
  bool confirmed = !speculative, reschedule = true, queries_loaded = false;
#pragma unroll 1
  while (true) {
    if (reschedule)
      scheduler = TileScheduler<S>(seqlens, work_tiles,
                                   plan_splits(seqlens, work_tiles, cluster.count, plan.min_tiles, plan.switch_tiles),
                                   cluster.index);
    const auto read_seqlens = [&] {
      if (!params.prefetch_cache) wait();
      if (!confirmed) info = seqlens.read();
    };
    if (is_producer) {
#if __CUDA_ARCH__ >= 900
      producer.run(scheduler, confirmed, !reschedule, read_seqlens);
#endif
    } else {
#if __CUDA_ARCH__ >= 900
      Ring<S> ring(plan, shared_address(shared), layout);
#else
      Ring<S> ring(params, plan, seqlens, KvTileIterator<S>(scheduler, cluster.rank, cluster.size),
                   shared_address(shared));
#endif
      read_seqlens();
      while (!scheduler.done(batch) && scheduler.work_tile < work_tiles) {
        const int first_key = scheduler.first_key(), end_key = scheduler.end_key(), new_key = scheduler.keys.new_key;
        if (!queries_loaded) {
          const int new_tile = new_key >= first_key && new_key < end_key ? (new_key - first_key) / S::kKvTile : -1;
          const bool writes_new_kv = new_tile >= 0 && (new_tile & (cluster.size - 1)) == cluster.rank;
          load_queries<S, kNorm>(params, scheduler, query_tiles, group, writes_new_kv, shared, layout, wait);
        }
        queries_loaded = !confirmed;
        if (!confirmed) break;
        consumers_barrier();
        const int first_query =
            query_tiles == 1
                ? 0
                : (scheduler.work_tile - divide(scheduler.work_tile, query_tiles) * query_tiles) * S::kQueries;
        const Mask<S> mask(params, scheduler, first_query, group);
        const QueryOperand<S> q(shared_address(shared) + layout.q);
        Accumulator<S> accumulator;
        for (int tile = first_key + cluster.rank * S::kKvTile; tile < end_key; tile += cluster.size * S::kKvTile) {
          const int key = tile + warp * S::kWarpKeys, begin = scheduler.keys.begin - key, end = end_key - key;
          const bool has_keys = begin < S::kWarpKeys && end > 0;
          const bool has_new_key = has_keys && new_key >= key && new_key < min(key + S::kWarpKeys, end_key);
          // Waits for the keys or values of the tile; returns the address of this warp's rows.
          const auto wait_stage = [&](bool is_value) {
            const int stage = ring.wait();
            if (has_new_key) {
              insert_new_row<S>(shared + stage, new_key - tile, shared + layout.new_kv + is_value * S::kRow);
              ring.fence_writes();
              __syncwarp();
            }
            return shared_address(shared) + stage + warp * S::kWarpKeys * 128;
          };
          const uint32_t k_rows = wait_stage(false);
          Scores<S> s;
          if (has_keys) multiply_queries<S>(s, k_rows, q);
          ring.release();
          if (has_keys) {
            score_mod.apply<S>(s, key, mask);
            accumulator.online_softmax(s);
          }
          const uint32_t v_rows = wait_stage(true);
          if (has_keys) accumulator.multiply_values(v_rows, begin, end);
          ring.release();
        }
        accumulator.store_partials(shared, layout, warp);
        const bool last = scheduler.is_last(batch, work_tiles);
        merger.merge(scheduler, first_query, min(group * tokens - first_query, S::kQueries), last);
        if (last) break;
        scheduler.next(seqlens, work_tiles);
      }
    }
    if (confirmed) break;
    confirmed = true;
    reschedule = !__syncthreads_and(seqlens.is_kept(info));
    if (reschedule) {
      seqlens.keep(info);
#if __CUDA_ARCH__ >= 900
      if (is_producer) producer.reset();
#endif
      queries_loaded = false;
      __syncthreads();
    }
  }
  wait();  // also without work: the end of this kernel must imply the end of the previous one
  if (is_producer) {
    cluster.wait();
  } else {
    merger.wait_for_cluster();
  }
}

template <typename T, bool kNorm>
cudaError_t launch_decode_attention(const DecodeAttentionParams& params, const DecodePlan& plan, const KvMaps& maps,
                                    const LaunchShape& shape, cudaStream_t stream) {
  return dispatch_int<64, 96, 128, 256>(static_cast<int>(params.head_dim), [&](auto dim) {
    return dispatch_int<1, 2>(plan.query_mma_tiles, [&](auto tiles) {
      using S = Shape<T, decltype(dim)::value, decltype(tiles)::value>;
      return launch(decode_attention_kernel<S, kNorm>, shape, stream, params, plan, maps);
    });
  });
}

}  // namespace llmk::kernels
