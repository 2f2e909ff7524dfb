// Attention of a few query tokens per sequence against a KV cache (Dao et al. 2022; split over the keys as in
// Flash-Decoding, Dao et al. 2023; the queries of a kv head side by side, Ainslie et al. 2023):
//
//   s[j] = scale q . k[j]  (softcap tanh(s / softcap))     y = sum_j softmax(s)[j] v[j]
//
// over the keys j in [starts, lengths - tokens + t] of query token t, the last `window` of them. fp16 and bf16; scores,
// softmax and sums in fp32, the probabilities rounded to the dtype for the second product, the result rounded once.
// The fused form rotates q on its way in, rotates the new key, and writes it and the new value to the cache.
//
// Reads every live key and value once, so memory is the limit: a warp streams tiles of 16 keys and values through a
// ring of its own by asynchronous copies, without a barrier between warps. Keys are the 16-row operand of the tensor
// cores and the queries the 8 columns (the 7 of a kv head cost what one would), so that scores come out transposed:
// a lane has two queries, in both products.
//
// Work (work.cuh) is dealt out to clusters of blocks, within a cluster by tiles to all of its warps. Their sums meet
// over distributed shared memory; the block of rank r finishes query r. Where several clusters share a pair they leave
// their sums in a workspace, and the last one to come, by a counter that it sets back, adds them up in the order of the
// clusters: so the result does not depend on who was last. No float is ever added atomically.
//
// Overlap with the predecessor (programmatic dependent launch): nothing may be read before pdl_wait() but what was
// complete before the predecessor could begin. The predecessor P may itself have begun before its own predecessor
// ended, so "everything before P" is not enough: it must lie behind a launch that did not overlap, such as the first
// one of a CUDA graph. A caller that knows this of the cache, the lengths, tables and positions (not of q and the new
// key and value) says `settled`: then the first tiles are on their way before q is there. The tokens that other
// launches of this step write are none of those tiles: each writes its own layer's cache, and reads only what earlier
// steps wrote. Without `settled` only the sharing of the work begins early, and is done again if the lengths have
// changed.
#include "decode_attention.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "decode_attention_any.h"
#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "plan.h"
#include "rotate.cuh"
#include "work.cuh"

namespace llmk::kernels {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// kColumns: tiles of 8 queries. All sizes of shared memory in bytes. Two stages: while a warp multiplies one tile, the
// next is on its way, and every half of a stage is filled again as soon as it is used. So two blocks fit on an SM.
template <typename Element, int kHeadDim, int kColumns, int kWarpCount = 4, int kStageCount = 2>
struct Shape {
  using T = Element;
  static constexpr int D = kHeadDim, kTilesOfColumns = kColumns, kQueries = 8 * kColumns;
  static constexpr int kWarps = kWarpCount, kThreads = 32 * kWarps, kStages = kStageCount;
  static constexpr int kVectors = D / 8;   // of 16 bytes, per row
  static constexpr int kRow = D * 2 + 16;  // an odd number of vectors, so that 8 rows meet 8 groups of banks
  static constexpr int kHalfStage = kTile * kRow;
  static constexpr int kSumRow = D + 4;                         // floats; 4 of padding, again for the banks
  static constexpr int kQ = kWarps * kStages * 2 * kHalfStage;  // behind the ring
  static constexpr int kNew = kQ + kQueries * kRow;
  static constexpr int kSums = kNew + 2 * kRow;
  static constexpr int kSoftmaxes = kSums + kWarps * kQueries * kSumRow * 4;  // of the warps, then of the block
  static constexpr int kBytes = kSoftmaxes + (kWarps + 1) * kQueries * 8;
};

// What an unfinished softmax is made of: the maximum of the scores (in units of log 2), and the sum of 2^(s - maximum).
struct alignas(8) Softmax {
  float maximum, sum;
};

// What is subtracted from scores: anything where there are none yet.
__device__ inline float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

template <typename S>
__device__ Softmax* softmaxes(unsigned char* shared) {
  return reinterpret_cast<Softmax*>(shared + S::kSoftmaxes);
}

// The tiles of a warp, one after another through all of its pairs.
template <typename S>
struct Loader {
  using T = typename S::T;
  Walk walk;
  int tile, step;  // in the keys of the pair, and to the warp's next one
  int page;        // of the tile: looked up when the one before was loaded, looked at when this one is
  int in_page;
  unsigned rows;  // bit i: key i of the tile is there and wanted
  bool done;

  __device__ Loader(const DecodeAttentionParams& params, const Walk& start, int first, int warps, int pairs)
      : walk(start), tile(first), step(warps), done(false) {
    find(params, pairs, first);
  }

  // Skips pairs without a tile of ours; looks up where the keys are.
  __device__ void find(const DecodeAttentionParams& params, int pairs, int first) {
    while (!walk.done(params) && walk.first_key() + tile * kTile >= walk.end_key()) {
      walk.next(params, pairs);
      tile = first;
    }
    done = walk.done(params);
    if (done) return;
    const int key = walk.first_key() + tile * kTile;
    rows = 0xffffu >> max(kTile - (walk.end_key() - key), 0);
    if (key < walk.keys.begin) rows &= 0xffffu << (walk.keys.begin - key);
    if (const int fresh = walk.keys.fresh - key; fresh >= 0 && fresh < kTile) rows &= ~(1u << fresh);
    page = walk.b;
    in_page = key;
    if (params.cache.block_table) {
      const int page_size = static_cast<int>(params.cache.page_size), index = key / page_size;
      page = __ldcg(params.cache.block_table + walk.b * params.cache.table_stride + index);
      in_page = key - index * page_size;
    }
  }
  __device__ void next(const DecodeAttentionParams& params, int pairs, int first) {
    tile += step;
    find(params, pairs, first);
  }

  // The first key or value of the tile.
  __device__ const T* source(const DecodeAttentionParams& params, int chunks, bool is_value) const {
    const KvCache& cache = params.cache;
    const int head = chunks == 1 ? walk.pair : walk.pair / chunks;
    const int64_t at = exists(params) ? page : 0;
    return is_value
               ? static_cast<const T*>(cache.v) + at * cache.v_page + in_page * cache.v_token + head * cache.v_head
               : static_cast<const T*>(cache.k) + at * cache.k_page + in_page * cache.k_token + head * cache.k_head;
  }
  __device__ bool exists(const DecodeAttentionParams& params) const { return page >= 0 && page < params.cache.pages; }

  // Brings the keys or the values of the tile to `target`, zeros where there are none: a weight of zero would not
  // silence what may lie there. All lanes.
  __device__ void load(const DecodeAttentionParams& params, int chunks, bool is_value, uint32_t target) const {
    if (!done) {
      const unsigned wanted = exists(params) ? rows : 0;
      const int token = static_cast<int>(is_value ? params.cache.v_token : params.cache.k_token);
      const T* const from = source(params, chunks, is_value);
#pragma unroll
      for (int i = 0; i < kTile * S::kVectors / 32; ++i) {
        const int vector = threadIdx.x % 32 + 32 * i, row = vector / S::kVectors, column = vector % S::kVectors;
        cp_async_16_or_zero(target + row * S::kRow + column * 16, from + (row * token + column * 8), wanted >> row & 1);
      }
    }
    cp_async_commit();  // of nothing, at the end, so that groups stay counted
  }
};

// Brings the queries of a pair to shared memory, rotated in the fused form; there also, if `owner`, the new key and
// value, and those to the cache. `before_data` is called by all threads between the loads that `settled` speaks of and
// the others.
template <typename S, typename Wait>
__device__ void stage_queries(const DecodeAttentionParams& params, const Walk& walk, int chunks, bool owner,
                              unsigned char* shared, const Wait& before_data) {
  using T = typename S::T;
  using V = Vec<T, 8>;
  constexpr int kHalf = S::kVectors / 2;
  const int group = static_cast<int>(params.heads / params.kv_heads), head = walk.pair / chunks;
  const int queries = group * static_cast<int>(params.tokens), first = walk.pair % chunks * S::kQueries;
  // Each task is two vectors that are rotated together: of the queries, then of the key; and two of the value.
  const int tasks = S::kQueries * kHalf + (owner ? 2 * kHalf : 0);
  bool waited = false;
  for (int task = threadIdx.x; task < tasks || !waited; task += S::kThreads) {
    const int row = task / kHalf, low = task % kHalf * 8, high = low + S::D / 2;
    const bool is_query = row < S::kQueries, is_key = row == S::kQueries;
    const int query = first + row, t = query / group;
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
        shared + (is_query ? S::kQ + row * S::kRow : S::kNew + (is_key ? 0 : S::kRow)) + low * 2;
    *reinterpret_cast<V*>(target) = a;  // not store(), which is for global memory
    *reinterpret_cast<V*>(target + S::D) = b;
    if (is_query || walk.pair % chunks != 0) continue;
    const KvCache& cache = params.cache;
    int64_t page = walk.b;
    int in_page = walk.keys.fresh;
    if (cache.block_table) {
      const int index = in_page / static_cast<int>(cache.page_size);
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

// The unfinished attention of a warp: two queries per lane and tile of columns, 2 (lane % 4) and the next; o holds for
// them, transposed, elements lane / 4 and that + 8 of every 16 of the head.
template <typename S>
struct Accumulator {
  static constexpr int kColumns = S::kTilesOfColumns, kSteps = S::D / 16;
  float o[kSteps][kColumns][4];
  float maximum[kColumns][2], sum[kColumns][2];

  __device__ Accumulator() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) maximum[n][i] = -INFINITY, sum[n][i] = 0.f;
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][n][i] = 0.f;
      }
    }
  }

  // Takes in a tile of scores and the values at values().
  template <typename Values>
  __device__ void add(float (&s)[kColumns][4], const Values& values) {
    using P = Pair<typename S::T>;
    const int lane = threadIdx.x % 32;
    uint32_t p[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = fmaxf(s[n][i], s[n][i + 2]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
        top = fmaxf(top, maximum[n][i]);
        const float base = finite(top);
        scale[i] = exp2_approximate(maximum[n][i] - base);
        maximum[n][i] = top;
        s[n][i] = exp2_approximate(s[n][i] - base);
        s[n][i + 2] = exp2_approximate(s[n][i + 2] - base);
        sum[n][i] = sum[n][i] * scale[i] + (s[n][i] + s[n][i + 2]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto pair = P::from_floats(s[n][2 * half], s[n][2 * half + 1]);
        p[n][half] = transpose_matrix(*reinterpret_cast<const uint32_t*>(&pair));
      }
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][n][i] *= scale[i % 2];
      }
    }
    const uint32_t row = values() + (lane % 8 + lane / 16 * 8) * S::kRow + lane / 8 % 2 * 16;
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
      uint32_t a[4];
      load_matrices_transposed(a, row + d * 32);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) mma_16x8x16<typename S::T>(o[d][n], a, p[n][0], p[n][1]);
    }
  }

  // Leaves the warp's sums in shared memory.
  __device__ void store(unsigned char* shared, int warp) {
    const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = 8 * n + lane % 4 * 2 + i;
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) sum[n][i] += __shfl_xor_sync(0xffffffffu, sum[n][i], offset);
        if (row == 0) softmaxes<S>(shared)[warp * S::kQueries + query] = {maximum[n][i], sum[n][i]};
        float* const sums =
            reinterpret_cast<float*>(shared + S::kSums) + (warp * S::kQueries + query) * S::kSumRow + row;
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          sums[16 * d] = o[d][n][i];
          sums[16 * d + 8] = o[d][n][i + 2];
        }
      }
    }
  }
};

// The queries as operands of the tensor cores: in registers where there is room for them.
template <typename S>
struct Queries {
  static constexpr int kSteps = S::D / 32;
  static constexpr bool kInRegisters = S::D * S::kTilesOfColumns <= 256;
  uint32_t row;
  uint32_t kept[kInRegisters ? S::kTilesOfColumns : 1][kInRegisters ? kSteps : 1][4];

  __device__ explicit Queries(uint32_t q) : row(q + threadIdx.x % 8 * S::kRow + threadIdx.x % 32 / 8 * 16) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int n = 0; n < S::kTilesOfColumns; ++n) {
#pragma unroll
        for (int d = 0; d < kSteps; ++d) load_matrices(kept[n][d], row + n * 8 * S::kRow + d * 64);
      }
    }
  }
  __device__ void get(uint32_t (&b)[4], int n, int d) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = kept[n][d][i];
    } else {
      load_matrices(b, row + n * 8 * S::kRow + d * 64);
    }
  }
};

// Scores of a tile of keys at `k` against the queries, before scaling.
template <typename S>
__device__ void multiply(float (&s)[S::kTilesOfColumns][4], uint32_t k, const Queries<S>& queries) {
  const int lane = threadIdx.x % 32;
  const uint32_t k_row = k + lane % 16 * S::kRow + lane / 16 * 16;
  float odd[S::kTilesOfColumns][4] = {};  // a second chain, since every product waits for the one before
#pragma unroll
  for (int n = 0; n < S::kTilesOfColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.f;
  }
#pragma unroll
  for (int d = 0; d < S::D / 16; d += 2) {
    uint32_t a[2][4];
    load_matrices(a[0], k_row + d * 32);
    load_matrices(a[1], k_row + d * 32 + 32);
#pragma unroll
    for (int n = 0; n < S::kTilesOfColumns; ++n) {
      uint32_t b[4];
      queries.get(b, n, d / 2);
      mma_16x8x16<typename S::T>(s[n], a[0], b[0], b[1]);
      mma_16x8x16<typename S::T>(odd[n], a[1], b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < S::kTilesOfColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
  }
}

__device__ inline void add_scaled(float4& sum, float weight, const float4& x) {
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

// Adds up what the warps of the block have stored; the result is in the place of the first one, its softmax behind
// those of the warps.
template <typename S>
__device__ void merge_warps(unsigned char* shared, int queries) {
  constexpr int kVectors = S::D / 4;
  for (int item = threadIdx.x; item < queries * kVectors; item += S::kThreads) {
    const int query = item / kVectors, vector = item % kVectors;
    Softmax parts[S::kWarps], total{-INFINITY, 0.f};
    float4 sums[S::kWarps], sum = make_float4(0.f, 0.f, 0.f, 0.f);
    float* const first = reinterpret_cast<float*>(shared + S::kSums) + query * S::kSumRow + vector * 4;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      parts[w] = softmaxes<S>(shared)[w * S::kQueries + query];
      sums[w] = *reinterpret_cast<const float4*>(first + w * S::kQueries * S::kSumRow);
      total.maximum = fmaxf(total.maximum, parts[w].maximum);
    }
    const float base = finite(total.maximum);
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      const float weight = exp2_approximate(parts[w].maximum - base);
      total.sum += weight * parts[w].sum;
      add_scaled(sum, weight, sums[w]);
    }
    *reinterpret_cast<float4*>(first) = sum;
    if (vector == 0) softmaxes<S>(shared)[S::kWarps * S::kQueries + query] = total;
  }
}

// The larger of any two lanes' numbers; by one instruction, on integers that are ordered alike.
__device__ inline float top_of_warp(float x) {
  const int bits = __float_as_int(x);
  const int top = __reduce_max_sync(0xffffffffu, bits < 0 ? bits ^ 0x7fffffff : bits);
  return __int_as_float(top < 0 ? top ^ 0x7fffffff : top);
}

// Adds up `count` unfinished attentions of one query: softmax_of(i), and four elements of their sums, sums_of(i,
// vector). finish(vector, sums, softmax) gets the total. A warp does it alone.
template <typename S, typename SoftmaxOf, typename SumsOf, typename Finish>
__device__ void merge(int count, const SoftmaxOf& softmax_of, const SumsOf& sums_of, const Finish& finish) {
  constexpr int kVectors = S::D / 4, kPerLane = (kVectors + 31) / 32, kAhead = 8;
  const int lane = threadIdx.x % 32;
  Softmax total{-INFINITY, 0.f};
  float4 sums[kPerLane] = {};
  for (int first = 0; first < count; first += kAhead) {
    float4 part[kAhead][kPerLane];
    const Softmax mine = softmax_of(min(first + lane % kAhead, count - 1));
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
#pragma unroll
      for (int v = 0; v < kPerLane; ++v) {
        part[j][v] = sums_of(min(first + j, count - 1), min(lane + 32 * v, kVectors - 1));
      }
    }
    const float top = fmaxf(total.maximum, top_of_warp(mine.maximum)), base = finite(top);
    const float shrink = exp2_approximate(total.maximum - base);
    const float weight = first + lane % kAhead < count ? exp2_approximate(mine.maximum - base) : 0.f;
    total = {top, total.sum * shrink};
#pragma unroll
    for (int v = 0; v < kPerLane; ++v) {
      sums[v].x *= shrink, sums[v].y *= shrink, sums[v].z *= shrink, sums[v].w *= shrink;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const float of_j = __shfl_sync(0xffffffffu, weight, j);
      total.sum += of_j * __shfl_sync(0xffffffffu, mine.sum, j);
#pragma unroll
      for (int v = 0; v < kPerLane; ++v) add_scaled(sums[v], of_j, part[j][v]);
    }
  }
#pragma unroll
  for (int v = 0; v < kPerLane; ++v) {
    if (lane + 32 * v < kVectors) finish(lane + 32 * v, sums[v], total);
  }
}

// The workspace: of every cluster the sums of the pair that its share begins in, and of the one it ends in.
template <typename S>
struct Workspace {
  float4* sums;
  float2* softmaxes;  // as pairs, for the instructions that bypass L1

  __device__ explicit Workspace(void* workspace, int clusters)
      : sums(static_cast<float4*>(workspace)),
        softmaxes(reinterpret_cast<float2*>(sums + clusters * 2 * S::kQueries * (S::D / 4))) {}
  static size_t bytes(int clusters) { return static_cast<size_t>(clusters) * 2 * S::kQueries * (S::D + 2) * 4; }

  __device__ static int slot(const Walk& walk, int cluster, int query) {
    const bool ends_in = walk.pair_begin > cluster * walk.quota.units;
    return (cluster * 2 + ends_in) * S::kQueries + query;
  }
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    decode_attention_kernel(const DecodeAttentionParams params, const DecodePlan plan) {
  using T = typename S::T;
  extern __shared__ __align__(128) unsigned char shared[];
  const Cluster cluster = Cluster::current();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = plan.chunks, pairs = static_cast<int>(params.kv_heads) * chunks;
  const int group = static_cast<int>(params.heads / params.kv_heads), tokens = static_cast<int>(params.tokens);
  // Neighbouring tiles go to different blocks, so that few of them are spread over many SMs.
  const int warps = cluster.size * S::kWarps, first_tile = warp * cluster.size + cluster.rank;
  const auto find_work = [&] {
    const Quota quota = plan_quota(params, pairs, cluster.count, plan.least, plan.slack);
    return Walk(params, pairs, quota, cluster.index);
  };
  pdl_launch_dependents();
  unsigned char* const ring = shared + warp * S::kStages * 2 * S::kHalfStage;
  bool waiting = true;
  const auto wait = [&] {
    if (waiting) pdl_wait();
    waiting = false;
  };
  Walk walk = find_work();
  if (!params.settled) {
    // What was found may rest on lengths that the predecessor changes; mostly it does not.
    const int batch = static_cast<int>(params.batch), b = min(lane, batch - 1);
    const Keys before(params, b);
    wait();
    const Keys after(params, b);
    const bool same = before.begin == after.begin && before.end == after.end && before.fresh == after.fresh;
    if (batch > 32 || !__all_sync(0xffffffffu, same)) walk = find_work();
  }
  Loader<S> loader(params, walk, first_tile, warps, pairs);
  const auto load = [&](int stage, bool is_value) {
    loader.load(params, chunks, is_value, shared_address(ring) + (stage * 2 + is_value) * S::kHalfStage);
    if (is_value && !loader.done) loader.next(params, pairs, first_tile);
  };
#pragma unroll 1
  for (int i = 0; i < 2 * S::kStages; ++i) load(i / 2, i % 2);
  int stage = 0;
  // Waits for keys or values; brings in the fresh one, which is not in memory yet.
  const auto arrived = [&](bool is_value, int fresh) {
    cp_async_wait<2 * S::kStages - 1>();
    __syncwarp();
    unsigned char* const half = ring + (stage * 2 + is_value) * S::kHalfStage;
    if (fresh >= 0) {
      if (lane < S::kVectors) {
        *reinterpret_cast<uint4*>(half + fresh * S::kRow + lane * 16) =
            *reinterpret_cast<const uint4*>(shared + S::kNew + is_value * S::kRow + lane * 16);
      }
      __syncwarp();
    }
    return shared_address(half);
  };

  const float scale = static_cast<float>(params.scale) * kLog2E;
  const float cap = static_cast<float>(params.softcap) * kLog2E;
  const float cap_scale = params.softcap > 0 ? static_cast<float>(params.scale / params.softcap) * 2 * kLog2E : 0.f;
  bool others_read = false;  // whether the cluster may still be reading our sums
  for (; !walk.done(params); walk.next(params, pairs)) {
    const int first_key = walk.first_key(), end_key = walk.end_key(), fresh = walk.keys.fresh;
    const int fresh_tile = fresh >= first_key && fresh < end_key ? (fresh - first_key) / kTile : -1;
    const bool owner = fresh_tile >= 0 && fresh_tile % cluster.size == cluster.rank;
    stage_queries<S>(params, walk, chunks, owner, shared, wait);
    __syncthreads();

    // Which keys the queries of this lane see.
    const int first_query = chunks == 1 ? 0 : walk.pair % chunks * S::kQueries;
    int lower[S::kTilesOfColumns][2], upper[S::kTilesOfColumns][2];
#pragma unroll
    for (int n = 0; n < S::kTilesOfColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = tokens == 1 ? 0 : (first_query + 8 * n + lane % 4 * 2 + i) / group;
        const int until = walk.keys.end - tokens + t + 1;
        upper[n][i] = min(until, end_key);
        lower[n][i] = params.window > 0 ? static_cast<int>(max(until - params.window, int64_t{walk.keys.begin}))
                                        : walk.keys.begin;
      }
    }
    const Queries<S> q(shared_address(shared + S::kQ));
    Accumulator<S> accumulator;
    for (int tile = first_tile; first_key + tile * kTile < end_key; tile += warps) {
      const int fresh_row = tile == fresh_tile ? (fresh - first_key) % kTile : -1;
      float s[S::kTilesOfColumns][4];
      multiply<S>(s, arrived(false, fresh_row), q);
      __syncwarp();  // all lanes have read the keys
      load(stage, false);
      const int key = first_key + tile * kTile + lane / 4;
#pragma unroll
      for (int n = 0; n < S::kTilesOfColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (params.softcap > 0) {  // tanh(x) = 1 - 2 / (1 + e^2x)
            s[n][i] = cap - 2 * cap * reciprocal_approximate(1.f + exp2_approximate(s[n][i] * cap_scale));
          } else {
            s[n][i] *= scale;
          }
          const int j = key + i / 2 * 8;
          if (j < lower[n][i % 2] || j >= upper[n][i % 2]) s[n][i] = -INFINITY;
        }
      }
      accumulator.add(s, [&] { return arrived(true, fresh_row); });
      __syncwarp();
      load(stage, true);
      if (++stage == S::kStages) stage = 0;
    }

    if (others_read) cluster.wait();
    accumulator.store(shared, warp);
    __syncthreads();
    const int queries = min(group * tokens - first_query, S::kQueries);
    merge_warps<S>(shared, queries);
    __syncwarp();
    cluster.arrive();
    cluster.wait();
    const int first_cluster = walk.first_cluster(), contributors = walk.last_cluster() - first_cluster + 1;
    const auto write_result = [&](int query, int vector, const float4& sums, const Softmax& softmax) {
      const float factor = softmax.sum == 0.f ? 0.f : reciprocal_approximate(softmax.sum);  // no key: zeros
      const float values[4] = {sums.x * factor, sums.y * factor, sums.z * factor, sums.w * factor};
      const int t = tokens == 1 ? 0 : (first_query + query) / group, g = first_query + query - t * group;
      const int64_t head = (static_cast<int64_t>(walk.b) * tokens + t) * params.heads +
                           (chunks == 1 ? walk.pair : walk.pair / chunks) * group + g;
      Vec<T, 4>::of([&](int i) { return values[i]; }).store(static_cast<T*>(params.out) + head * S::D + vector * 4);
    };
    const Workspace<S> workspace(params.workspace, cluster.count);
    const uint32_t sums = shared_address(shared + S::kSums);
    const uint32_t maxima = shared_address(shared + S::kSoftmaxes) + S::kWarps * S::kQueries * 8;
    for (int query = cluster.rank + warp * cluster.size; query < queries; query += warps) {
      merge<S>(
          cluster.size,
          [&](int rank) {
            const float2 part = Cluster::load2(maxima + query * 8, rank);
            return Softmax{part.x, part.y};
          },
          [&](int rank, int vector) { return Cluster::load4(sums + (query * S::kSumRow + vector * 4) * 4, rank); },
          [&](int vector, const float4& total, const Softmax& softmax) {
            if (contributors == 1) return write_result(query, vector, total, softmax);
            const int slot = workspace.slot(walk, cluster.index, query);
            __stcg(workspace.sums + slot * (S::D / 4) + vector, total);
            if (vector == 0) __stcg(workspace.softmaxes + slot, make_float2(softmax.maximum, softmax.sum));
          });
    }
    cluster.arrive();
    others_read = true;
    if (contributors == 1) continue;

    for (int query = cluster.rank + warp * cluster.size; query < queries; query += warps) {
      __threadfence();  // what this lane has left is seen before the counter
      __syncwarp();
      int before = 0;
      if (lane == 0) {
        int* const counter = params.counters + first_cluster * S::kQueries + query;
        before = atomicAdd(counter, 1);
        if (before == contributors - 1) *counter = 0;
      }
      if (__shfl_sync(0xffffffffu, before, 0) != contributors - 1) continue;
      __threadfence();  // and what the others have left, after it
      merge<S>(
          contributors,
          [&](int i) {
            const float2 part = __ldcg(workspace.softmaxes + workspace.slot(walk, first_cluster + i, query));
            return Softmax{part.x, part.y};
          },
          [&](int i, int vector) {
            return __ldcg(workspace.sums + workspace.slot(walk, first_cluster + i, query) * (S::D / 4) + vector);
          },
          [&](int vector, const float4& total, const Softmax& softmax) {
            write_result(query, vector, total, softmax);
          });
    }
  }
  if (others_read) cluster.wait();
  wait();  // also where there was nothing to do: the successor takes our end for that of our predecessor
}

// Calls body(Shape) for the dtype, head_dim and number of queries.
template <typename Body>
cudaError_t dispatch_shape(Dtype dtype, int64_t head_dim, int column_tiles, const Body& body) {
  return dispatch_int<64, 96, 128, 256>(static_cast<int>(head_dim), [&](auto dim) {
    return dispatch_int<1, 2>(column_tiles, [&](auto columns) {
      constexpr int D = decltype(dim)::value, kColumns = decltype(columns)::value;
      if (dtype == Dtype::kFloat16) return body(Shape<__half, D, kColumns>{});
      return body(Shape<__nv_bfloat16, D, kColumns>{});
    });
  });
}

}  // namespace

bool decode_attention_is_fast(const DecodeAttentionParams& p, Dtype dtype) {
  const auto multiples = [](std::initializer_list<int64_t> strides) {
    return std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % 8 == 0; });
  };
  const bool head_dim = p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256;
  if ((dtype != Dtype::kFloat16 && dtype != Dtype::kBFloat16) || !head_dim) return false;
  if (p.cache.capacity > 0x3fffffff || p.batch > 0xffff || p.kv_heads > 0xffff) return false;
  for (const void* pointer : {p.q, static_cast<const void*>(p.cache.k), static_cast<const void*>(p.cache.v),
                              static_cast<const void*>(p.out), p.new_k, p.new_v, p.rope.cos, p.rope.sin}) {
    if (!is_aligned(pointer, 16)) return false;
  }
  const KvCache& c = p.cache;
  if (c.block_table && c.page_size % kTile != 0) return false;
  if (c.k_token > (1 << 26) || c.v_token > (1 << 26)) return false;  // offsets in a tile have 32 bits
  return multiples({p.q_batch, p.q_token, p.q_head, c.k_page, c.k_token, c.k_head, c.v_page, c.v_token, c.v_head,
                    p.new_k_batch, p.new_k_head, p.new_v_batch, p.new_v_head, p.rope.cos_row, p.rope.sin_row});
}

cudaError_t decode_attention_workspace_bytes(const DecodeAttentionParams& params, size_t& bytes) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const DecodePlan plan = plan_decode_attention(params, device);
  bytes = static_cast<size_t>(plan.clusters) * 2 * 8 * plan.column_tiles * (params.head_dim + 2) * 4;
  return cudaSuccess;
}

// One set for each of so many streams, or captures: two that run at the same time must not share one. Streams are told
// apart by a hash of their identity.
constexpr int kCounterSets = 64;
static_assert(kDecodeAttentionCounters == kMaxClusters * 16);
__device__ int counter_sets[kCounterSets * kDecodeAttentionCounters];

cudaError_t decode_attention_counters(cudaStream_t stream, int*& counters) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaError_t status = cudaStreamGetCaptureInfo(stream, &capture, &id);
  if (status == cudaSuccess && capture != cudaStreamCaptureStatusActive) status = cudaStreamGetId(stream, &id);
  void* sets = nullptr;
  if (status == cudaSuccess) status = cudaGetSymbolAddress(&sets, counter_sets);
  if (status != cudaSuccess) return status;
  const int half = kCounterSets / 2, set = static_cast<int>(id % half) + (capture ? half : 0);
  counters = static_cast<int*>(sets) + set * kDecodeAttentionCounters;
  return cudaSuccess;
}

cudaError_t decode_attention(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.batch == 0 || params.tokens == 0 || params.heads == 0 || params.head_dim == 0) return cudaSuccess;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  if (!decode_attention_is_fast(params, dtype)) return decode_attention_any(params, dtype, stream);
  const DecodePlan plan = plan_decode_attention(params, device);
  return dispatch_shape(dtype, params.head_dim, plan.column_tiles, [&](auto shape) {
    using S = decltype(shape);
    if (S::kBytes > device.shared_bytes) return decode_attention_any(params, dtype, stream);
    LaunchShape launch_shape{plan.cluster * plan.clusters, dim3(S::kThreads), S::kBytes};
    launch_shape.cluster = plan.cluster;
    return launch(decode_attention_kernel<S>, launch_shape, stream, params, plan);
  });
}

}  // namespace llmk::kernels
