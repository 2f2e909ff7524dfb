// Reductions over the threads that share a row.
#pragma once
#include "device/ptx.cuh"

namespace llmk {

// A group of threads that process one row: a power of two of neighbouring lanes, up to 32, or `threads / 32` warps.
struct Group {
  int threads;  // in the group
  int rank;     // of this thread in its group
  int index;    // of the group in its block
};

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

// Sums each of the values over the warp; lane l gets the sum of value l / (32 / kCount).
template <int kCount>
__device__ inline float warp_sum_each(const float (&values)[kCount]) {
  static_assert(kCount == 1 || kCount == 2);
  const bool second = kCount == 2 && threadIdx.x & 16;  // half of the warp sums one value, half the other
  const float kept = second ? values[kCount - 1] : values[0], given = second ? values[0] : values[kCount - 1];
  float sum[1] = {kept + __shfl_xor_sync(0xffffffffu, given, 16)};
  warp_sum(sum, 16);
  return sum[0];
}

// Sums over a group; every thread gets the total. `shared` holds kValues floats per warp of the block. Groups need not
// call it in step, but those of more than a warp take barriers 1, 2, ... of the block (15 such groups at most).
// Successive calls must alternate between two `shared` buffers: a fast warp may already write the next sums while a
// slow one still reads these, but it cannot pass the barrier in between.
template <int kValues>
__device__ inline void group_sum(float (&values)[kValues], const Group& group, float* shared) {
  if (group.threads < 32) return warp_sum(values, group.threads);
  constexpr int kLanes = 32 / kValues;  // of a warp sum one of the values
  const int warps = group.threads / 32, lane = group.rank % 32;
  float total[1] = {warp_sum_each(values)};
  if (warps > 1) {
    float* const sums = shared + group.index * warps * kValues;
    if (lane % kLanes == 0) sums[lane / kLanes * warps + group.rank / 32] = total[0];
    named_barrier(1 + group.index, group.threads);
    // Every warp adds up the sums of all warps by itself, which saves a broadcast and its barrier.
    const int from = lane % kLanes;
    total[0] = from < warps ? sums[lane / kLanes * warps + from] : 0.f;
    if (from + kLanes < warps) total[0] += sums[lane / kLanes * warps + from + kLanes];
    warp_sum(total, kLanes);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = __shfl_sync(0xffffffffu, total[0], i * kLanes);
}

// The sum over a row of vectors in an order that depends on the row alone. However many vectors a thread has, vector i
// belongs to lane i % 32 of virtual warp i / 32: the lanes of a virtual warp are added up as a tree, then the virtual
// warps. So launches may differ in threads per row and agree bitwise.
constexpr int kMaxVirtualWarps = 64;

// values[v]: of this thread's v-th vector, number rank + v * threads of the row; 0 where there is none. A group of up
// to 32 lanes must have one vector each. `shared` holds kMaxVirtualWarps floats per group; see group_sum() on
// alternating.
template <int kVectors>
__device__ inline float row_sum(const float (&values)[kVectors], const Group& group, float* shared) {
  if constexpr (kVectors == 1) {
    if (group.threads <= 32) {
      float sum[1] = {values[0]};
      warp_sum(sum, group.threads);
      return sum[0];
    }
  }
  const int lane = group.rank % 32, warps = group.threads / 32;
  float* const sums = shared + group.index * kMaxVirtualWarps;
  const float sum = warp_sum_each(values);
  constexpr int kLanes = 32 / kVectors;
  if (lane % kLanes == 0) sums[lane / kLanes * warps + group.rank / 32] = sum;
  const int count = kVectors * warps;
  const int width = count <= 4 ? 4 : count <= 8 ? 8 : count <= 16 ? 16 : 32;
  const int from = lane & (width - 1);
  __syncthreads();
  if (count == 4) return (sums[0] + sums[2]) + (sums[1] + sums[3]);  // the same tree, without its shuffles
  float total[1] = {from < count ? sums[from] : 0.f};
  if (from + 32 < count) total[0] += sums[from + 32];
  warp_sum(total, width);
  return total[0];
}

}  // namespace llmk
