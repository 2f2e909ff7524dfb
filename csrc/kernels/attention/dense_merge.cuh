// How the sums of the warps of a kv head become one result. Everything stays in the layout of the tensor cores'
// results, so a lane only ever meets its own counterparts: the second warp of a head through shared memory, other
// blocks through a workspace, where the last warp to come, by a counter that it sets back, adds them up in the order of
// the blocks. So the result does not depend on who was last, and no barrier of the block is needed.
#pragma once
#include "dense_tile.cuh"
#include "device/tma.cuh"

namespace llmk::kernels {

// What a warp finishes: of queries 2 t and 2 t + 1 the elements from `at` worker * kElements on.
template <typename S>
struct DensePart {
  static constexpr int kElements = 2 * S::kSteps / S::kWorkers, kVectors = kElements / 2 + 1;
  float maximum[2], sum[2], o[2][kElements];

  __device__ DensePart() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      maximum[i] = -INFINITY, sum[i] = 0.f;
#pragma unroll
      for (int j = 0; j < kElements; ++j) o[i][j] = 0.f;
    }
  }
  // Of a warp's sums, which `softmax()` has completed, those that worker `worker` finishes.
  __device__ DensePart(const DenseAccumulator<S>& from, const float4& softmax, int worker)
      : maximum{softmax.x, softmax.y}, sum{softmax.z, softmax.w} {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        constexpr int kSteps = S::kSteps;
        const float first = from.o[j % kSteps][j / kSteps * 2 + i];
        if constexpr (S::kWorkers == 1) {
          o[i][j] = first;
        } else {
          o[i][j] = worker ? from.o[j][2 + i] : first;
        }
      }
    }
  }
  // The maxima of queries 2 t and 2 t + 1, then their sums.
  __device__ static float4 softmax(const DenseAccumulator<S>& from) {
    const int t = threadIdx.x % 4;
    float sum = from.sum;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const auto of = [&](float x, int i) { return __shfl_sync(0xffffffffu, x, 8 * t + 4 * i); };
    return make_float4(of(from.maximum, 0), of(from.maximum, 1), of(sum, 0), of(sum, 1));
  }

  __device__ void add(const DensePart& other) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = fmaxf(maximum[i], other.maximum[i]), base = finite(top);
      const float mine = exp2_approximate(maximum[i] - base), others = exp2_approximate(other.maximum[i] - base);
      maximum[i] = top;
      sum[i] = sum[i] * mine + other.sum[i] * others;
#pragma unroll
      for (int j = 0; j < kElements; ++j) o[i][j] = o[i][j] * mine + other.o[i][j] * others;
    }
  }

  // As kVectors vectors: vector(i) gets or gives the i-th.
  template <typename Put>
  __device__ void give(const Put& put) const {
    put(0, make_float4(maximum[0], maximum[1], sum[0], sum[1]));
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const float* const of = o[i / (kElements / 4)] + i % (kElements / 4) * 4;
      put(1 + i, make_float4(of[0], of[1], of[2], of[3]));
    }
  }
  template <typename Get>
  __device__ static DensePart take(const Get& get) {
    DensePart part;
    const float4 softmax = get(0);
    part.maximum[0] = softmax.x, part.maximum[1] = softmax.y, part.sum[0] = softmax.z, part.sum[1] = softmax.w;
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const float4 four = get(1 + i);
      float* const to = part.o[i / (kElements / 4)] + i % (kElements / 4) * 4;
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
    return part;
  }

  __device__ void write(const DecodeAttentionParams& params, int b, int head, int worker) const {
    using T = typename S::T;
    constexpr int kRun = kElements < 8 ? kElements : 8;  // neighbours in memory
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int group = static_cast<int>(params.heads / params.kv_heads), tokens = static_cast<int>(params.tokens);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = 2 * t + i, token = tokens == 1 ? 0 : query / group;
      if (query >= group * tokens) continue;
      const float factor = sum[i] == 0.f ? 0.f : reciprocal_approximate(sum[i]);  // no key: zeros
      const int64_t row =
          (static_cast<int64_t>(b) * tokens + token) * params.heads + head * group + query - token * group;
      T* const to = static_cast<T*>(params.out) + row * S::D + 8 * g;
#pragma unroll
      for (int j = 0; j < kElements; j += kRun) {
        const int at = worker * kElements + j;
        Vec<T, kRun>::of([&](int l) { return o[i][j + l] * factor; }).store(to + at / 8 * 64 + at % 8);
      }
    }
  }
};

#if __CUDA_ARCH__ >= 900

// By one warp; both warps of a head come here.
template <typename S>
__device__ void dense_finish(const DecodeAttentionParams& params, const Walk& walk, const DenseAccumulator<S>& sums,
                             unsigned char* exchange, int head, int worker) {
  using Part = DensePart<S>;
  const int lane = threadIdx.x % 32, warps = static_cast<int>(params.kv_heads) * S::kWorkers;
  const int warp = threadIdx.x / 32, other = head + (1 - worker) * static_cast<int>(params.kv_heads);
  const float4 softmax = Part::softmax(sums);
  Part part(sums, softmax, worker);
  if constexpr (S::kWorkers == 2) {
    const auto place = [&](int of, int i) {
      return reinterpret_cast<float4*>(exchange) + (of * Part::kVectors + i) * 32 + lane;
    };
    Part(sums, softmax, 1 - worker).give([&](int i, const float4& x) { *place(warp, i) = x; });
    named_barrier(1 + head, 64);
    part.add(Part::take([&](int i) { return *place(other, i); }));
    named_barrier(1 + head, 64);  // what was given has been taken
  }
  const int first = walk.first_cluster(), contributors = walk.last_cluster() - first + 1;
  if (contributors == 1) return part.write(params, walk.b, head, worker);

  // The workspace: of every block the sums of the pair that its share begins in, and of the one it ends in.
  const auto place = [&](int block, int i) {
    const bool ends_in = walk.pair_begin > block * walk.quota.units;
    return static_cast<float4*>(params.workspace) +
           (((static_cast<int64_t>(block) * 2 + ends_in) * warps + warp) * Part::kVectors + i) * 32 + lane;
  };
  part.give([&](int i, const float4& x) { __stcg(place(blockIdx.x, i), x); });
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    __threadfence();  // what this warp has left is seen before the counter
    int* const counter = params.counters + first * 16 + warp;
    before = atomicAdd(counter, 1);
    if (before == contributors - 1) *counter = 0;
    __threadfence();  // and what the others have left, after it
  }
  before = __shfl_sync(0xffffffffu, before, 0);
  if (before != contributors - 1) return;
  constexpr int kAhead = 32 / Part::kElements;  // loads at a time, as registers allow
  Part total;
  for (int i = 0; i < contributors; i += kAhead) {
    Part parts[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int block = first + min(i + j, contributors - 1);
      parts[j] = Part::take([&](int vector) { return __ldcg(place(block, vector)); });
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j < contributors) total.add(parts[j]);
    }
  }
  total.write(params, walk.b, head, worker);
}

#endif

}  // namespace llmk::kernels
