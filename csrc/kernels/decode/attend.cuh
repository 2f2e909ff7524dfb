// Attention of the one new token in decode_step: a block takes a stretch of the keys of one kv head, and the last block
// of the head to finish adds the stretches up, in their order.
//
// Keys and values go from memory straight into the operands of the tensor cores. That works because the order of the
// elements that a product sums over does not matter as long as both operands agree, and neither does the order of the
// columns of a result as long as one knows it: so a lane takes 16 contiguous bytes where the instruction speaks of
// pairs of elements.
#pragma once
#include <cuda_bf16.h>

#include "device/mma.cuh"
#include "device/tma.cuh"
#include "device/vec.cuh"
#include "exchange.cuh"
#include "kernels/attention/rotate.cuh"
#include "kernels/attention/softmax.cuh"
#include "plan.h"

namespace llmk::kernels {

constexpr int kStepTile = 16;                           // keys that a warp takes at once
constexpr int kStepBlockKeys = kStepTile * kStepWarps;  // fewer than these are not worth a second block

#if __CUDA_ARCH__ >= 900

// Where the step stands, the same in all layers: read once.
struct StepPosition {
  int length, start;
  const Angles<__nv_bfloat16, 8>* angles;  // in shared memory, by vectors of half a head

  template <int D>
  __device__ static StepPosition read(const DecodeStepParams& p, void* shared) {
    using A = Angles<__nv_bfloat16, 8>;
    static_assert(D / 2 / 8 * sizeof(A) <= kStepOwn - kStepAngles);
    A* const angles = static_cast<A*>(shared);
    const int low = static_cast<int>(threadIdx.x) * 8;
    if (low < D / 2) angles[threadIdx.x] = A::load(p.rope, *p.position, low, low + D / 2);
    return {*p.length, p.start ? max(*p.start, 0) : 0, angles};
  }
};

template <int D>
struct StepAttention {
  using T = __nv_bfloat16;
  using V = Vec<T, 8>;
  static constexpr int kRow = D + kStepQueryPad, kSumRow = D + 4;  // of queries, and of the sums of a warp
  static constexpr int kKeyChunks = D / 32, kValueChunks = D / 64;
  static constexpr int kHalf = D / 16;   // vectors of half a head
  static constexpr int kTiles = D / 16;  // of the result, 16 elements by 8 queries

  const DecodeStepParams& p;
  const DecodeLayer& layer;
  const StepPosition& position;
  int begin, end, fresh;       // the live keys; the new one, or -1 where it is not in the cache
  int kv_head, split, splits;  // this block's share
  int first, last;             // of the keys
  uint4 k[2][kKeyChunks], v[4][kValueChunks];

  __device__ StepAttention(const DecodeStepParams& params, const StepPlan& plan, const StepPosition& given, int index)
      : p(params), layer(params.layer[index]), position(given) {
    const int length = position.length, capacity = static_cast<int>(p.capacity);
    end = max(min(length, capacity), 0);
    begin = position.start;
    if (layer.window > 0) begin = max(begin, end - static_cast<int>(min(layer.window, int64_t{1} << 30)));
    begin = min(begin, end);
    fresh = length == end ? end - 1 : -1;
    const int kv_heads = static_cast<int>(p.kv_heads), origin = begin / kStepTile * kStepTile, keys = end - origin;
    splits = max(min(plan.splits, (keys + kStepBlockKeys - 1) / kStepBlockKeys), 1);
    const int share = (keys + splits * kStepTile - 1) / (splits * kStepTile) * kStepTile;
    kv_head = static_cast<int>(blockIdx.x) % kv_heads;
    split = static_cast<int>(blockIdx.x) / kv_heads;
    first = origin + split * share;
    last = min(first + share, end);
  }
  // Whether this block takes part. It may have no keys even so.
  __device__ bool active() const { return split < splits; }

  // Loads of a tile; keys that are not this block's are replaced by ones that are. The new key is not there yet.
  __device__ int clamped(int key) const { return min(max(key, begin), last - 1); }
  __device__ void load_keys(int tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const T* const base = static_cast<const T*>(layer.k) + kv_head * p.k_head + 8 * t;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const T* const key = base + clamped(tile + 8 * n + g) * p.k_token;
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j) k[n][j] = *reinterpret_cast<const uint4*>(key + 32 * j);
    }
  }
  __device__ void load_values(int tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const T* const base = static_cast<const T*>(layer.v) + kv_head * p.v_head + 8 * g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* const value = base + clamped(tile + value_of(i, t)) * p.v_token;
#pragma unroll
      for (int s = 0; s < kValueChunks; ++s) v[i][s] = *reinterpret_cast<const uint4*>(value + 64 * s);
    }
  }
  __device__ static int value_of(int i, int t) { return 2 * t + i % 2 + i / 2 * 8; }
  __device__ int tile_of(int i) const {
    return first + kStepTile * (static_cast<int>(threadIdx.x) / 32 + i * kStepWarps);
  }
  // Into the L2 cache, long before they are wanted: behind the weights that are under way, a load takes microseconds.
  __device__ void prefetch() const {
    constexpr int kLine = 64, kLines = D / kLine, kMost = 256;  // elements; of keys: those of all blocks fit the cache
    if (!active()) return;
    const int keys = min(last - first, kMost);
    for (int i = threadIdx.x; i < keys * kLines; i += 32 * kStepWarps) {
      const int64_t key = first + i / kLines;
      const int at = i % kLines * kLine;
      prefetch_l2(static_cast<const T*>(layer.k) + key * p.k_token + kv_head * p.k_head + at);
      prefetch_l2(static_cast<const T*>(layer.v) + key * p.v_token + kv_head * p.v_head + at);
    }
  }
  // What does not depend on the linear before.
  __device__ void load_ahead() {
    if (!active()) return;
    if (tile_of(0) >= last) return;
    load_keys(tile_of(0));
    load_values(tile_of(0));
  }
  // In place of what was loaded for the new token.
  __device__ void take_fresh(int tile, const T* new_k, const T* new_v) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (clamped(tile + 8 * n + g) != fresh) continue;
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j) k[n][j] = *reinterpret_cast<const uint4*>(new_k + 8 * t + 32 * j);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (clamped(tile + value_of(i, t)) != fresh) continue;
#pragma unroll
      for (int s = 0; s < kValueChunks; ++s) v[i][s] = *reinterpret_cast<const uint4*>(new_v + 8 * g + 64 * s);
    }
  }

  // From the packed q|k|v, as soon as it is there. All threads of a block that is active.
  __device__ void run(const Exchange& qkv, const Exchange& attended, unsigned char* shared, unsigned char* workspace,
                      const StepPlan& plan, unsigned* counter) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = static_cast<int>(p.heads / p.kv_heads);
    bool& is_last = *reinterpret_cast<bool*>(shared + kStepFlag);
    shared += kStepHeaderBytes;
    T* const q = reinterpret_cast<T*>(shared);
    T *const new_k = q + kStepQueries * kRow, *const new_v = new_k + kRow;
    float* const sums = reinterpret_cast<float*>(shared + (kStepQueries + 2) * kRow * 2);  // [warps][queries][kSumRow]
    float2* const softmaxes = reinterpret_cast<float2*>(sums + kStepWarps * kStepQueries * kSumRow);
    const bool owner = fresh >= first && fresh < last;
    stage(qkv, q, new_k, new_v, group, owner);
    named_barrier(1, 32 * kStepWarps);
    uint4 queries[kKeyChunks];
#pragma unroll
    for (int j = 0; j < kKeyChunks; ++j) queries[j] = *reinterpret_cast<const uint4*>(q + g * kRow + 8 * t + 32 * j);

    // The result, transposed: of the queries 2t and 2t + 1, elements 8 g + j, then those half of all tiles further on.
    float o[kTiles][4] = {};
    float maximum = -INFINITY, sum = 0.f;  // of query g; the sum over the keys of this lane
    const float scale = static_cast<float>(p.scale) * kLog2E;
    for (int i = 0, tile = tile_of(0); tile < last; tile = tile_of(++i)) {
      const int next = tile_of(i + 1);
      if (owner && tile + kStepTile >= last) take_fresh(tile, new_k, new_v);
      float s[2][4] = {};
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mma_16x8x16<T>(s[n], {queries[j].x, 0, queries[j].y, 0}, k[n][j].x, k[n][j].y);
          mma_16x8x16<T>(s[n], {queries[j].z, 0, queries[j].w, 0}, k[n][j].z, k[n][j].w);
        }
      }
      if (next < last) load_keys(next);
      float top = maximum;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = tile + 8 * n + 2 * t + e;
          s[n][e] = key >= begin && key < last ? s[n][e] * scale : -INFINITY;
          top = fmaxf(top, s[n][e]);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float base = finite(top), shrink = exp2_approximate(maximum - base);
      maximum = top;
      sum *= shrink;
      const float shrink_of[2] = {__shfl_sync(0xffffffffu, shrink, 8 * t), __shfl_sync(0xffffffffu, shrink, 8 * t + 4)};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[j][e] *= shrink_of[e % 2];
      }
      uint32_t weights[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float a = exp2_approximate(s[n][0] - base), b = exp2_approximate(s[n][1] - base);
        sum += a + b;
        const auto pair = Pair<T>::from_floats(a, b);
        weights[n] = *reinterpret_cast<const uint32_t*>(&pair);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        // Element `at` of this lane's part of the values i and i + 1.
        const auto pair = [&](int i, int at) {
          const uint32_t low = reinterpret_cast<const uint32_t*>(v[i])[at / 2];
          const uint32_t high = reinterpret_cast<const uint32_t*>(v[i + 1])[at / 2];
          return __byte_perm(low, high, at % 2 ? 0x7632 : 0x5410);
        };
        mma_16x8x16<T>(o[j], {pair(0, j), pair(0, j + kTiles), pair(2, j), pair(2, j + kTiles)}, weights[0],
                       weights[1]);
      }
      if (next < last) load_values(next);
    }

    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (t == 0) softmaxes[warp * kStepQueries + g] = make_float2(maximum, sum);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Of the lane's part of a row: D / 8 elements, 8 of each chunk of 64.
      float* const mine = sums + (warp * kStepQueries + 2 * t + e % 2) * kSumRow + 8 * g;
#pragma unroll
      for (int j = 0; j < kTiles; j += 4) {
        const int at = e / 2 * kTiles + j;
        *reinterpret_cast<float4*>(mine + at / 8 * 64 + at % 8) =
            make_float4(o[j][e], o[j + 1][e], o[j + 2][e], o[j + 3][e]);
      }
    }
    named_barrier(1, 32 * kStepWarps);
    float* const partials = reinterpret_cast<float*>(workspace + plan.partials);
    float2* const parts = reinterpret_cast<float2*>(workspace + plan.softmaxes);
    const auto finish = [&](int query, int vector, const float(&total)[8], float weight) {
      const float factor = weight == 0.f ? 0.f : reciprocal_approximate(weight);  // no key: zeros
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        attended.put((kv_head * group + query) * D + 8 * vector + i,
                     Pair<T>::from_floats(total[i] * factor, total[i + 1] * factor));
      }
    };
    const auto slot = [&](int of_split, int query) {
      return (kv_head * plan.splits + of_split) * kStepQueries + query;
    };
    const int query = static_cast<int>(threadIdx.x) / (D / 8), vector = static_cast<int>(threadIdx.x) % (D / 8);
    static_assert(kStepQueries * (D / 8) <= 32 * kStepWarps);
    if (query < group) {
      merge(
          kStepWarps, [&](int w) { return softmaxes[w * kStepQueries + query]; },
          [&](int w, int half) {
            return reinterpret_cast<const float4*>(sums + (w * kStepQueries + query) * kSumRow + 8 * vector)[half];
          },
          [&](const float(&total)[8], float2 softmax) {
            if (splits == 1) return finish(query, vector, total, softmax.y);
            float4* const kept = reinterpret_cast<float4*>(partials + slot(split, query) * D + 8 * vector);
            __stcg(kept, make_float4(total[0], total[1], total[2], total[3]));
            __stcg(kept + 1, make_float4(total[4], total[5], total[6], total[7]));
            if (vector == 0) __stcg(parts + slot(split, query), softmax);
          });
    }
    if (splits == 1) return named_barrier(1, 32 * kStepWarps);  // what lies in shared memory has been read
    __threadfence();                                            // what this thread has left is seen before the counter
    named_barrier(1, 32 * kStepWarps);
    if (threadIdx.x == 0) {
      is_last = atomicAdd(counter + kv_head, 1) == splits - 1;
      if (is_last) counter[kv_head] = 0;
      __threadfence();
    }
    named_barrier(1, 32 * kStepWarps);
    if (!is_last) return;
    if (query < group) {
      merge(
          splits, [&](int i) { return __ldcg(parts + slot(i, query)); },
          [&](int i, int half) {
            return __ldcg(reinterpret_cast<const float4*>(partials + slot(i, query) * D + 8 * vector) + half);
          },
          [&](const float(&total)[8], float2 softmax) { finish(query, vector, total, softmax.y); });
    }
  }

 private:
  // Rotated queries and the new key, and the new value, into shared memory; if `owner`, also into the cache.
  __device__ void stage(const Exchange& qkv, T* q, T* new_k, T* new_v, int group, bool owner) {
    const int heads = static_cast<int>(p.heads), kv_heads = static_cast<int>(p.kv_heads);
    static_assert((kStepQueries + 2) * kHalf <= 32 * kStepWarps);
    if (const int task = threadIdx.x; task < (kStepQueries + 2) * kHalf) {
      const int row = task / kHalf, low = task % kHalf * 8, high = low + D / 2;
      const bool is_query = row < kStepQueries, is_key = row == kStepQueries;
      V a = V::of([](int) { return 0.f; }), b = a;
      if (!is_query || row < group) {
        const int head = is_query ? kv_head * group + row : is_key ? heads + kv_head : heads + kv_heads + kv_head;
        const auto load = [&](int at) {
          const uint4 raw = qkv.take(head * D + at);
          return *reinterpret_cast<const V*>(&raw);
        };
        a = load(low);
        b = load(high);
        if (is_query || is_key) rotate(a, b, position.angles[task % kHalf]);
      }
      T* const target = is_query ? q + row * kRow : is_key ? new_k : new_v;
      *reinterpret_cast<V*>(target + low) = a;
      *reinterpret_cast<V*>(target + high) = b;
      if (is_query || !owner) return;
      T* const kept = is_key ? static_cast<T*>(layer.k) + fresh * p.k_token + kv_head * p.k_head
                             : static_cast<T*>(layer.v) + fresh * p.v_token + kv_head * p.v_head;
      a.store(kept + low);
      b.store(kept + high);
    }
  }

  // Adds up `count` unfinished softmaxes, (maximum, sum), and eight elements of what they weigh.
  template <typename SoftmaxOf, typename SumsOf, typename Finish>
  __device__ static void merge(int count, const SoftmaxOf& softmax_of, const SumsOf& sums_of, const Finish& finish) {
    constexpr int kAhead = 12;  // a round of loads takes as long as the memory's latency
    float maximum = -INFINITY, sum = 0.f, total[8] = {};
#pragma unroll 1
    for (int first = 0; first < count; first += kAhead) {
      float2 softmax[kAhead];
      float4 part[kAhead][2];
      float top = maximum;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = min(first + i, count - 1);
        softmax[i] = softmax_of(at);
        part[i][0] = sums_of(at, 0);
        part[i][1] = sums_of(at, 1);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) top = fmaxf(top, softmax[i].x);
      const float base = finite(top), shrink = exp2_approximate(maximum - base);
      maximum = top;
      sum *= shrink;
#pragma unroll
      for (int e = 0; e < 8; ++e) total[e] *= shrink;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float weight = first + i < count ? exp2_approximate(softmax[i].x - base) : 0.f;
        sum += weight * softmax[i].y;
#pragma unroll
        for (int e = 0; e < 8; ++e) total[e] += weight * reinterpret_cast<const float*>(part[i])[e];
      }
    }
    finish(total, make_float2(maximum, sum));
  }
};

#endif

}  // namespace llmk::kernels
