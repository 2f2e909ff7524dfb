// Attention of a few query tokens per sequence against a KV cache (Dao et al. 2022; split over the keys as in
// Flash-Decoding, Dao et al. 2023; the queries of a kv head side by side, Ainslie et al. 2023):
//
//   s[j] = softmax_scale q . k[j]  (softcap tanh(s / softcap))     y = sum_j softmax(s)[j] v[j]
//
// over the keys j in [leftpad, seqlen - tokens + t] of query token t, the last window_left + 1 of them. fp16 and bf16;
// scores, softmax and sums in fp32, the probabilities rounded to the dtype for the second product, the result rounded
// once. The fused form rotates q on its way in, rotates the new key, and writes it and the new value to the cache.
//
// Reads every live key and value once, so memory is the limit: a ring in shared memory is kept full by tensor-map
// copies of 64 keys of one kv head (ring_tma.cuh; before sm_90 by every warp for itself, ring_copy.cuh), and of each 64
// four warps multiply 16 (tile.cuh).
//
// Work (work.cuh) is dealt out to clusters of blocks, within a cluster by units of 64 keys. The sums of their warps
// meet in merge.cuh.
//
// Overlap with the predecessor (programmatic dependent launch): nothing may be read before pdl_wait() but what was
// complete before the predecessor could begin. The predecessor P may itself have begun before its own predecessor
// ended, so "everything before P" is not enough: it must lie behind a launch that did not overlap, such as the first
// one of a CUDA graph. A caller that knows this of the cache, the lengths, tables and positions (not of q and the new
// key and value) says `prefetch_cache`: then the first units are on their way before q is there. The tokens that other
// launches of this step write are none of those units: each writes its own layer's cache, and reads only what earlier
// steps wrote. Without `prefetch_cache` the sharing of the work begins early, with the lengths there are then, and the
// first units are brought to the L2 cache, which may be in vain but not wrong. What it asks for, once the predecessor
// has ended, is mostly right; a look at the lengths meanwhile tells, and if they have changed all begins again.
//
// The successor is let in when memory begins to rest (plan.h). Blocks live for microseconds, so instructions that are
// executed once count, and so does fetching them: there is one copy of everything, and no integer division.
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
#include "work.cuh"

namespace llmk::kernels {

template <typename S>
__global__ void __launch_bounds__(kThreads + 32, S::kBlocks)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams params,
                            const __grid_constant__ DecodePlan plan,
                            [[maybe_unused]] const __grid_constant__ KvMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Layout layout(S::D, S::kQueries, plan.slots, plan.cluster);
  const Cluster cluster = Cluster::of(plan.cluster, plan.clusters);
  const int warp = threadIdx.x / 32;
  const int chunks = plan.chunks, pairs = static_cast<int>(params.kv_heads) * chunks, group = plan.group;
  const int tokens = static_cast<int>(params.tokens), batch = static_cast<int>(params.batch);
  if (plan.last_units == 0) pdl_launch_dependents();
  bool waiting = true;
  const auto wait = [&] {
    if (waiting) pdl_wait();
    waiting = false;
  };
#if __CUDA_ARCH__ >= 900
  // The fused form writes, and of many sequences a warp does not keep what it has found the work by: no guesses.
  const bool guesses = !params.prefetch_cache && !params.new_k && batch <= 32;
  if (!params.prefetch_cache && !guesses) wait();
  const bool copies = warp == kWarps;
  Lengths lengths(params);
  Producer<S> producer(params, plan, maps, lengths, cluster, shared_address(shared), layout);
  if (copies) producer.make_barriers();
  cluster.arrive();  // the barriers of this block are there
  __syncthreads();
#else
  constexpr bool guesses = false, copies = false;  // nothing overlaps
  Lengths lengths(params);
#endif
  Merger<S> merger(params, plan, cluster, shared, layout);
  const Scoring scoring(params);

  // By a guess the work begins, up to where a warp would wait for another; then all look whether it was right.
  Walk walk;
  bool sure = !guesses, find = true, staged = false;
#pragma unroll 1
  while (true) {
    if (find) walk = Walk(lengths, pairs, plan_quota(lengths, pairs, cluster.count, plan.least), cluster.index);
    Live now;
    const auto look = [&] {
      if (!params.prefetch_cache) wait();
      if (!sure) now = lengths.look();
    };
    if (copies) {
#if __CUDA_ARCH__ >= 900
      producer.run(walk, sure, !find, look);
#endif
    } else {
#if __CUDA_ARCH__ >= 900
      Ring<S> ring(plan, shared_address(shared), layout);
#else
      Ring<S> ring(params, plan, lengths, Feed(walk, cluster.rank, cluster.size), shared_address(shared));
#endif
      look();
      while (!walk.done(batch) && walk.pair < pairs) {
        const int first_key = walk.first_key(), end_key = walk.end_key(), fresh = walk.keys.fresh;
        if (!staged) {
          const int unit = fresh >= first_key && fresh < end_key ? (fresh - first_key) / kUnit : -1;
          const bool owner = unit >= 0 && (unit & (cluster.size - 1)) == cluster.rank;
          stage_queries<S>(params, walk, chunks, group, owner, shared, layout, wait);
        }
        staged = !sure;
        if (!sure) break;
        consumers_barrier();
        const int first_query = chunks == 1 ? 0 : (walk.pair - divide(walk.pair, chunks) * chunks) * S::kQueries;
        const Sight<S> sight(params, walk, first_query, group);
        const Queries<S> q(shared_address(shared) + layout.q);
        Accumulator<S> accumulator;
        for (int unit = first_key + cluster.rank * kUnit; unit < end_key; unit += cluster.size * kUnit) {
          const int key = unit + warp * kTile, begin = walk.keys.begin - key, end = end_key - key;
          const bool mine = begin < kTile && end > 0;
          const bool has_fresh = mine && fresh >= key && fresh < min(key + kTile, end_key);
          // Waits for keys or values of the unit; the warp's rows of them.
          const auto arrived = [&](bool is_value) {
            const int slot = ring.wait();
            if (has_fresh) {
              insert_fresh<S>(shared + slot, fresh - unit, shared + layout.fresh + is_value * S::kRow);
              ring.written();
              __syncwarp();
            }
            return shared_address(shared) + slot + warp * kTile * 128;
          };
          const uint32_t keys = arrived(false);
          float s[S::kTilesOfColumns][4];
          if (mine) multiply<S>(s, keys, q);
          ring.release();
          if (mine) {
            scoring.apply<S>(s, key, sight);
            accumulator.weigh(s);
          }
          const uint32_t values = arrived(true);
          if (mine) accumulator.add(values, begin, end);
          ring.release();
        }
        accumulator.store(shared, layout, warp);
        const bool last = walk.is_last(batch, pairs);
        merger.finish(walk, first_query, min(group * tokens - first_query, S::kQueries), last);
        if (last) break;
        walk.next(lengths, pairs);
      }
    }
    if (sure) break;
    sure = true;
    find = !__syncthreads_and(lengths.update(now));  // one warp may have seen lengths that another has not
    if (find) {
#if __CUDA_ARCH__ >= 900
      if (copies) producer.forget();
#endif
      staged = false;
      __syncthreads();
    }
  }
  wait();  // also where there was nothing to do: the successor takes our end for that of our predecessor
  if (copies) {
    cluster.wait();
  } else {
    merger.meet();
  }
}

template <typename T>
cudaError_t launch_decode_attention(const DecodeAttentionParams& params, const DecodePlan& plan, const KvMaps& maps,
                                    const LaunchShape& shape, cudaStream_t stream) {
  return dispatch_int<64, 96, 128, 256>(static_cast<int>(params.head_dim), [&](auto dim) {
    return dispatch_int<1, 2>(plan.column_tiles, [&](auto columns) {
      using S = Shape<T, decltype(dim)::value, decltype(columns)::value>;
      return launch(decode_attention_kernel<S>, shape, stream, params, plan, maps);
    });
  });
}

}  // namespace llmk::kernels
