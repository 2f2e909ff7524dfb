// Reductions over the threads that share a row: lanes of a warp, warps of a block, blocks of a cluster.
//
//   what       | warp                  | block          | cluster
//   -----------|-----------------------|----------------|------------------
//   sum        | warp_sum()            | group_sum()    | cluster_reduce()
//   max, sum   | warp_max_sum()        | group_reduce() | cluster_reduce()
//   max, other | warp_reduce(), an op  | group_reduce() | cluster_reduce()
//
// An arg max is the maximum of numbers that have the index in their low bits.
#pragma once
#include <cmath>

#include "device/cluster.cuh"
#include "device/ptx.cuh"

namespace llmk {

// A group of threads that process one row: a power of two of neighbouring lanes, up to 32, or `threads / 32` warps.
struct Group {
  int threads;  // in the group
  int rank;     // of this thread in its group
  int index;    // of the group in its block
};

// A group that may be at another place of its kernel than the other groups of its block.
struct LooseGroup : Group {};

// A barrier of the threads of a group. Longer than a warp, groups that go in step take the block's, and loose ones
// barriers 1, 2, ... of the block (15 such groups at most). These are not for small blocks: the compiler does not know
// which of them a kernel uses, so that it takes all 16, of which an SM has 64, and so no more than four blocks.
__device__ inline void group_barrier(const Group& group) {
  if (group.threads > 32) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
__device__ inline void group_barrier(const LooseGroup& group) {
  if (group.threads > 32) {
    named_barrier(1 + group.index, group.threads);
  } else {
    __syncwarp();
  }
}

// Sums over the part of a group that lies within one warp; every lane gets the total.
template <int kValues>
__device__ inline void warp_sum(float (&values)[kValues], int threads) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    if (offset < threads) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
    }
  }
}

// The sums over the lanes, one for each of kValues groups of neighbouring lanes: of values[lane / (32 / kValues)].
// Takes fewer shuffles than warp_sum(), since each step halves the values that a lane still sums.
template <int kValues>
__device__ inline float warp_sum_scatter(const float (&values)[kValues]) {
  static_assert(kValues <= 32 && (kValues & (kValues - 1)) == 0);
  float sums[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) sums[i] = values[i];
  int offset = 16;
#pragma unroll
  for (int half = kValues / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = threadIdx.x & offset;  // keeps the upper half
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? sums[half + i] : sums[i], given = upper ? sums[i] : sums[half + i];
      sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, offset);
    }
  }
#pragma unroll
  for (; offset > 0; offset /= 2) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], offset);
  return sums[0];
}

// Combines the values of neighbouring lanes, `threads` of them, by an op that is symmetric; every lane gets the result.
template <typename Value, typename Combine>
__device__ inline Value warp_reduce(Value value, int threads, const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    if (offset < threads) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// The sum of one value per lane.
__device__ inline float warp_sum(float value, int threads) {
  float values[1] = {value};
  warp_sum(values, threads);
  return values[0];
}

// NaN counts as missing.
__device__ inline float warp_max(float value, int threads) {
  return warp_reduce(value, threads, [](float a, float b) { return fmaxf(a, b); });
}

// What an online softmax knows of the numbers seen so far. A NaN or +inf among them makes the sum NaN.
struct alignas(8) MaxSum {
  float max;  // -INFINITY if there are none
  float sum;  // of e^(x - shift())

  __device__ static MaxSum none() { return {-INFINITY, 0.f}; }

  // What is subtracted from the numbers: their maximum, or 0 where that is -inf, since -inf - -inf is NaN.
  __device__ static float shift(float max) { return max == -INFINITY ? 0.f : max; }
  __device__ float shift() const { return shift(max); }

  __device__ MaxSum with_max(float higher) const { return {higher, sum * exp_approximate(max - shift(higher))}; }
  template <int N>
  __device__ void add(const float (&x)[N]) {
    float higher = max;
#pragma unroll
    for (int i = 0; i < N; ++i) higher = fmaxf(higher, x[i]);
    *this = with_max(higher);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp_approximate(x[i] - shift());
  }
};

__device__ inline MaxSum warp_max_sum(const MaxSum& value, int threads) {
  const float max = warp_max(value.max, threads);
  return {max, warp_sum(value.with_max(max).sum, threads)};
}

// Reduces over a group by reduce(value, lanes), one of the functions above; every thread gets the result. `shared`
// holds one value per warp of the block; see group_sum() on its reuse, and on barriers. `none` is the value of nothing.
template <typename Value, typename AnyGroup, typename Reduce>
__device__ inline Value group_reduce(const Value& value, const Value& none, const AnyGroup& group, Value* shared,
                                     const Reduce& reduce) {
  const Value of_warp = reduce(value, group.threads);
  if (group.threads <= 32) return of_warp;
  const int warps = group.threads / 32;
  Value* const values = shared + group.index * warps;
  if (group.rank % 32 == 0) values[group.rank / 32] = of_warp;
  group_barrier(group);
  const int width = warps <= 4 ? 4 : warps <= 8 ? 8 : warps <= 16 ? 16 : 32;
  const int from = threadIdx.x & (width - 1);
  return reduce(from < warps ? values[from] : none, width);
}

// Reduces over the blocks of a cluster. All threads of a block pass their block's value, and get the result. `shared`
// holds one value per block of the cluster, and is not to be used again. Every thread has called cluster.arrive()
// before, and not waited: no block may write to another one's memory before that has begun.
template <typename Value, typename Reduce>
__device__ inline Value cluster_reduce(const Value& value, const Cluster& cluster, Value* shared,
                                       const Reduce& reduce) {
  if (cluster.size == 1) return value;
  cluster.wait();
  if (threadIdx.x < cluster.size) *in_block(shared + cluster.rank, threadIdx.x) = value;
  cluster.arrive();
  cluster.wait();
  return reduce(shared[threadIdx.x & (cluster.size - 1)], cluster.size);
}

// Sums each of the values, a power of two of them, over the lanes up to 2 kOffset apart; lane l gets the sum of value
// l / (32 / kCount).
template <int kCount, int kOffset = 16>
__device__ inline float warp_sum_each(const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return warp_sum(values[0], 2 * kOffset);
  } else {
    const bool upper = threadIdx.x & kOffset;  // half of the lanes go on with half of the values
    float kept[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float mine = upper ? values[i + kCount / 2] : values[i], given = upper ? values[i] : values[i + kCount / 2];
      kept[i] = mine + __shfl_xor_sync(0xffffffffu, given, kOffset);
    }
    return warp_sum_each<kCount / 2, kOffset / 2>(kept);
  }
}

// Sums up to four values over a group; every thread gets the totals. `shared` holds kValues floats per warp of the
// block. Successive calls must alternate between two `shared` buffers: a fast warp may already write the next sums
// while a slow one still reads these, but it cannot pass the barrier in between.
template <int kValues, typename AnyGroup>
__device__ inline void group_sum(float (&values)[kValues], const AnyGroup& group, float* shared) {
  if (group.threads < 32) return warp_sum(values, group.threads);
  constexpr int kCount = kValues == 3 ? 4 : kValues, kLanes = 32 / kCount;  // so many lanes sum one of the values
  float padded[kCount] = {};
#pragma unroll
  for (int i = 0; i < kValues; ++i) padded[i] = values[i];
  float total = warp_sum_each(padded);
  const int warps = group.threads / 32, lane = group.rank % 32, value = lane / kLanes, from = lane % kLanes;
  if (warps > 1) {
    float* const sums = shared + (group.index * kValues + value) * warps;
    if (from == 0 && value < kValues) sums[group.rank / 32] = total;
    group_barrier(group);
    // Every warp adds up the sums of all warps by itself, which saves a broadcast and its barrier.
    total = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (from + i * kLanes < warps && value < kValues) total += sums[from + i * kLanes];
    }
    total = warp_sum(total, kLanes);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = __shfl_sync(0xffffffffu, total, i * kLanes);
}

// The sum over a row of vectors in an order that depends on the row alone. However many vectors a thread has, vector i
// belongs to lane i % 32 of virtual warp i / 32: the lanes of a virtual warp are added up as a tree, then the virtual
// warps. So launches may differ in threads per row and agree bitwise.
constexpr int kMaxVirtualWarps = 64;

// values[i][v]: number i of this thread's v-th vector, number rank + v * threads of the row; 0 where there is none. A
// group of up to 32 lanes must have one vector each. `shared` holds kValues times kMaxVirtualWarps floats per group;
// see group_sum() on alternating.
template <int kValues, int kVectors>
__device__ inline void row_sums(const float (&values)[kValues][kVectors], float (&totals)[kValues], const Group& group,
                                float* shared) {
  if constexpr (kVectors == 1) {
    if (group.threads <= 32) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) totals[i] = values[i][0];
      return warp_sum(totals, group.threads);
    }
  }
  constexpr int kLanes = 32 / kVectors;
  const int lane = group.rank % 32, warps = group.threads / 32, count = kVectors * warps;
  float* const sums = shared + group.index * kValues * kMaxVirtualWarps;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float sum = warp_sum_each(values[i]);
    if (lane % kLanes == 0) sums[i * kMaxVirtualWarps + lane / kLanes * warps + group.rank / 32] = sum;
  }
  const int width = count <= 4 ? 4 : count <= 8 ? 8 : count <= 16 ? 16 : 32;
  const int from = lane & (width - 1);
  __syncthreads();
  if (count == 4) {  // the same tree, without its shuffles
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float* const of = sums + i * kMaxVirtualWarps;
      totals[i] = (of[0] + of[2]) + (of[1] + of[3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float* const of = sums + i * kMaxVirtualWarps;
    totals[i] = from < count ? of[from] : 0.f;
    if (from + 32 < count) totals[i] += of[from + 32];
  }
  warp_sum(totals, width);
}

// The sum of one number per vector.
template <int kVectors>
__device__ inline float row_sum(const float (&values)[kVectors], const Group& group, float* shared) {
  float total[1];
  row_sums(reinterpret_cast<const float(&)[1][kVectors]>(values), total, group, shared);
  return total[0];
}

}  // namespace llmk
