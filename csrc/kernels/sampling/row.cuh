// A row of logits, shared by the blocks of a cluster: warp w of block r has the w + r * kWarps -th part of it, and
// keeps as much of that part in shared memory as there is room for.
#pragma once
#include <type_traits>

#include "device/cluster.cuh"
#include "device/vec.cuh"
#include "params/sampling.h"
#include "sampling_arithmetic.h"

namespace llmk::kernels::sampling {

using namespace llmk::sampling;

// Elements moved by one access, of any type: longer vectors would leave most lanes idle at the end of a short part.
constexpr int kVector = 4;

constexpr int kThreads = 1024, kWarps = kThreads / 32, kMaxCluster = 16;

template <typename T>
__device__ T of_row(const PerRow<T>& parameter, int64_t row) {
  return parameter.values ? parameter.values[row] : parameter.value;
}

template <typename T>
class Part {
 public:
  static constexpr int N = kVector;
  using V = Vec<T, N>;
  using Raw = typename Word<sizeof(V)>::type;

  // `cache` has room for `cached` vectors of every warp.
  __device__ Part(const SamplingParams& params, int64_t row, bool is_vector, Raw* cache, int cached)
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

  // What this warp gets when all warps of the block share the part of warp `warp`, which has been loaded.
  __device__ Part share_of(int warp) const {
    Part share = *this;
    const int mine = threadIdx.x / 32, vectors = (vocab_ + N - 1) / N, size = (size_ + kWarps - 1) / kWarps;
    const int first = min(vectors, (cluster_rank() * kWarps + warp) * size_), last = min(vectors, first + size_);
    share.cache_ = cache_ + (warp - mine) * cached_;
    share.cache_begin_ = first;
    share.begin_ = min(last, first + mine * size);
    share.end_ = min(last, share.begin_ + size);
    return share;
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
        x[u] = sane_vector(x[u]);
        if (v - cache_begin_ < cached_) cache_[v - cache_begin_] = *reinterpret_cast<const Raw*>(&x[u]);
        visit_vector(x[u], v, visit);
      }
    }
  }

  // Calls visit(index, logit) for all logits of the part, made sane and penalised, and also for some -inf behind the
  // end of the row.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll 1
    for (int v = begin_ + threadIdx.x % 32; v < end_; v += 32) visit_vector(read(v), v, visit);
  }

  // Calls visit(index, logits) for 32 neighbouring vectors at a time, with all lanes, index being that of the first
  // logit of the lane; stops when it says so.
  template <typename Visit>
  __device__ void walk(const Visit& visit) const {
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
    return cached < cached_ ? V::load(reinterpret_cast<const T*>(cache_ + cached)) : sane_vector(fetch(v));
  }
  __device__ static V sane_vector(const V& x) {
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
      return V::of([&](int i) { return sane(x[i]); });
    }
  }
  // Not inlined, like all that need not be fast: a launch runs most instructions once, and they come from memory, too.
  // (Static, so that no object has to be in memory for it.)
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
  int begin_, end_, cache_begin_, size_;  // vectors; the size is that of every whole part
};

}  // namespace llmk::kernels::sampling
