// A row of logits, split over the warps of a cluster of blocks: warp w of block r owns slice r * kWarps + w, and keeps
// as much of it in shared memory as there is room for.
#pragma once
#include <type_traits>

#include "device/cluster.cuh"
#include "device/vec.cuh"
#include "params/sampling.h"
#include "sampling_arithmetic.h"

namespace llmk::kernels::sampling {

using namespace llmk::sampling;

// Elements per access, of any type: longer vectors would leave most lanes idle at the end of a short slice.
constexpr int kVector = 4;

constexpr int kThreads = 1024, kWarps = kThreads / 32, kMaxCluster = 16;

template <typename T>
__device__ T of_row(const PerRow<T>& parameter, int64_t row) {
  return parameter.values ? parameter.values[row] : parameter.value;
}

template <typename T>
class RowSlice {
 public:
  static constexpr int N = kVector;
  using V = Vec<T, N>;
  using Raw = typename Word<sizeof(V)>::type;

  // `cache` has room for `cached` vectors of every warp.
  __device__ RowSlice(const SamplingParams& params, int64_t row, bool is_vector, Raw* cache, int cached)
      : logits_(static_cast<const T*>(params.logits) + row * params.logits_stride),
        vocab_(static_cast<int>(params.vocab)),
        is_vector_(is_vector),
        cached_(cached),
        cache_(cache + static_cast<int>(threadIdx.x / 32) * cached) {
    const float penalty = of_row(params.repetition_penalty, row);
    const bool penalises = params.seen && penalty > 0.f && penalty != 1.f;
    penalised_ = Penalty(penalty);
    seen_ = penalises ? params.seen + row * params.seen_stride : nullptr;
    const int vectors = (vocab_ + N - 1) / N, parts = cluster_size() * kWarps, size = (vectors + parts - 1) / parts;
    begin_ = min(vectors, (cluster_rank() * kWarps + static_cast<int>(threadIdx.x / 32)) * size);
    end_ = min(vectors, begin_ + size);
    cache_begin_ = begin_;
    size_ = size;
  }

  // This warp's sub-slice when all warps of the block split the slice of warp `warp`, which has been loaded.
  __device__ RowSlice split(int warp) const {
    RowSlice sub_slice = *this;
    const int this_warp = threadIdx.x / 32, vectors = (vocab_ + N - 1) / N, size = (size_ + kWarps - 1) / kWarps;
    const int first = min(vectors, (cluster_rank() * kWarps + warp) * size_), last = min(vectors, first + size_);
    sub_slice.cache_ = cache_ + (warp - this_warp) * cached_;
    sub_slice.cache_begin_ = first;
    sub_slice.begin_ = min(last, first + this_warp * size);
    sub_slice.end_ = min(last, sub_slice.begin_ + size);
    return sub_slice;
  }

  // Fills the cache. Calls visit(index, logit) as for_each does.
  template <typename Visit>
  __device__ void load(const Visit& visit) {
    constexpr int kUnroll = 4;  // loads in flight
    const int lane = threadIdx.x % 32;
    const bool is_plain = is_vector_ && end_ * N <= vocab_;
#pragma unroll 1
    for (int first = begin_ + lane; first < end_; first += 32 * kUnroll) {
      V x[kUnroll];
      if (is_plain) {  // no branch between the loads
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) x[u] = V::load(logits_ + min(first + 32 * u, end_ - 1) * N);
      } else {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) x[u] = fetch(min(first + 32 * u, end_ - 1));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int v = first + 32 * u;
        if (v >= end_) break;
        x[u] = sanitize_vector(x[u]);
        if (v - cache_begin_ < cached_) cache_[v - cache_begin_] = *reinterpret_cast<const Raw*>(&x[u]);
        visit_vector(x[u], v, visit);
      }
    }
  }

  // Calls visit(index, logit) for all logits of the slice, sanitized and penalised, and for some -inf beyond the end of
  // the row.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll 1
    for (int v = begin_ + threadIdx.x % 32; v < end_; v += 32) visit_vector(read(v), v, visit);
  }

  // The same in token order, a vector per lane: calls visit(index of the lane's first logit, its logits) with all
  // lanes, and stops when that returns true.
  template <typename Visit>
  __device__ void for_each_in_order(const Visit& visit) const {
#pragma unroll 1
    for (int first = begin_; first < end_; first += 32) {
      const int v = first + threadIdx.x % 32;
      float x[N];
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = -INFINITY;
      if (v < end_) {
        visit_vector(read(v), v, [&](int index, float value) { x[index - v * N] = value; });
      }
      if (visit(v * N, x)) return;
    }
  }

 private:
  __device__ V fetch(int v) const {
    if (is_vector_ && (v + 1) * N <= vocab_) return V::load(logits_ + v * N);
    return fetch_elements(logits_, v * N, vocab_);
  }
  __device__ static __noinline__ V fetch_elements(const T* logits, int index, int vocab) {
    V x;
#pragma unroll
    for (int i = 0; i < N; ++i) x.data[i] = index + i < vocab ? logits[index + i] : from_float<T>(-INFINITY);
    return x;
  }
  __device__ V read(int v) const {
    const int cached = v - cache_begin_;
    return cached < cached_ ? V::load(reinterpret_cast<const T*>(cache_ + cached)) : sanitize_vector(fetch(v));
  }
  __device__ static V sanitize_vector(const V& x) {
    if constexpr (V::kPaired) {
      using Two = typename Pair<T>::type;
      const float most = sizeof(T) == 2 && std::is_same_v<T, __half> ? 65504.f : 3.38953139e38f;
      const Two least = Pair<T>::from_floats(-INFINITY, -INFINITY), largest = Pair<T>::from_floats(most, most);
      const Two zero = Pair<T>::from_floats(0.f, 0.f);
      V result;
#pragma unroll
      for (int i = 0; i < N; i += 2) result.pair(i) = __hadd2_rn(__hmin2(__hmax2(x.pair(i), least), largest), zero);
      return result;
    } else {
      return V::of([&](int i) { return sanitize(x[i]); });
    }
  }
  // Not inlined, like all code that need not be fast: a launch runs most instructions once, and fetching them takes
  // time. Static, so that *this can stay in registers.
  __device__ static __noinline__ float4 penalise(float4 x, const uint8_t* seen, int count, Penalty penalised) {
    float values[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count && seen[i]) values[i] = penalised(values[i]);
    }
    return make_float4(values[0], values[1], values[2], values[3]);
  }
  template <typename Visit>
  __device__ void visit_vector(const V& x, int v, const Visit& visit) const {
    static_assert(N == 4);
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = x[i];
    if (seen_) {
      const float4 penalised =
          penalise(make_float4(values[0], values[1], values[2], values[3]), seen_ + v * N, vocab_ - v * N, penalised_);
      values[0] = penalised.x, values[1] = penalised.y, values[2] = penalised.z, values[3] = penalised.w;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) visit(v * N + i, values[i]);
  }

  const T* logits_;
  const uint8_t* seen_;  // null where nothing is penalised
  Penalty penalised_;
  int vocab_;
  bool is_vector_;
  int cached_;
  Raw* cache_;
  int begin_, end_, cache_begin_, size_;  // in vectors; size_: of every slice but the last ones
};

}  // namespace llmk::kernels::sampling
