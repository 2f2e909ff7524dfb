// The sum of e^(z - shift) over a row that may start anywhere (row_cover.cuh), for softmax and cross-entropy.
//
// The sum must not depend on where the row starts. Had each thread its own shift, as in an online softmax, it would, as
// a thread has other elements then. So all threads take the same one: the largest of 32 numbers of the row, which are
// known before the row has arrived. The sum is at least 1 then. In the rare case that the row's largest number is far
// above those (the sum is over kMostPowers, or no number), the maximum is looked for, and the sum taken once more. An
// exponential of 16-bit numbers is as exact with either. In float32 z - shift is rounded, so there the maximum always
// comes first.
#pragma once
#include "kernels/row_part.cuh"

namespace llmk::kernels {

constexpr float kMostPowers = 1e14f;  // e^32

template <int kSums>
struct PowerSums {
  float shift;        // what was subtracted
  float sums[kSums];  // of the powers, and what else is summed beside them
};

// The largest z(x) of 32 elements that are spread over the row.
template <typename T, typename Score>
__device__ float largest_of_some(const T* row, int64_t cols, const Score& score) {
  return warp_max(score(to_float(row[cols * (threadIdx.x % 32) / 32])), 32);
}

// `sampled`: the number to begin with. for_each_arriving() of `part` has not been called. largest(c): of the z of the
// vector at c. add(c, shift, of_elements): adds its powers to of_elements[0], and what else there is to the others.
// Neither counts what is not the part's. A block has at most kWarps warps. Every thread of the cluster gets the result,
// and cluster.arrive() has been called once before.
template <bool kSampled, int kSums, int N, int kWarps, typename Part, typename Largest, typename Add>
__device__ PowerSums<kSums> sum_powers(const Part& part, const RowPosition& at, float sampled, bool wanted,
                                       const Largest& largest, const Add& add) {
  struct Sums {
    float values[kSums];
  };
  // Little shared memory, since a kilobyte more can cost an SM a block. The maximum is between both sums, and so are
  // its barriers: what the first has left has been read.
  __shared__ float maxima[kWarps], max_of_blocks[kMaxCluster];
  __shared__ WarpSums<N> of_warps[kWarps * kSums];
  __shared__ Sums of_blocks[kMaxCluster];
  const auto reduce_sums = [&](const float(&of_elements)[kSums][N]) {
    Sums sums;
    sum_covering(of_elements, part.shift(), sums.values, at.group, of_warps);
    return cluster_reduce(sums, at.cluster, of_blocks, [](Sums of, int lanes) {
      warp_sum(of.values, lanes);
      return of;
    });
  };
  PowerSums<kSums> result{};
  bool again = true;
  if constexpr (kSampled) {
    float of_elements[kSums][N] = {};
    part.for_each_arriving([&](int c) { add(c, sampled, of_elements); }, wanted);
    const Sums sums = reduce_sums(of_elements);
    result.shift = sampled;
#pragma unroll
    for (int i = 0; i < kSums; ++i) result.sums[i] = sums.values[i];
    again = wanted && !(sums.values[0] < kMostPowers);
    if (!(blockDim.y > 1 ? __syncthreads_or(again) : again)) return result;  // the rows of a block go in step
    at.cluster.arrive();
  }
  float max = -INFINITY;
  const auto look = [&](int c) { max = fmaxf(max, largest(c)); };
  if (kSampled) {
    part.for_each(look);
  } else {
    part.for_each_arriving(look, wanted);
  }
  max = group_reduce(max, -INFINITY, at.group, maxima, warp_max);
  max = cluster_reduce(max, at.cluster, max_of_blocks, warp_max);
  at.cluster.arrive();
  const float shift = MaxSum::shift(max);
  float of_elements[kSums][N] = {};
  if (wanted) part.for_each([&](int c) { add(c, shift, of_elements); });
  const Sums sums = reduce_sums(of_elements);
  if (!again) return result;
  result.shift = shift;
#pragma unroll
  for (int i = 0; i < kSums; ++i) result.sums[i] = sums.values[i];
  return result;
}

}  // namespace llmk::kernels
