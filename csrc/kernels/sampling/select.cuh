// Radix selection: finds the k-th largest logit of a row (top-k), or the logit at which the most probable ones reach a
// given weight (top-p). The first histogram has bins of the distance from the largest logit. The bin that holds the
// target is then refined by the bits of the keys until one key is left: at most two more rounds for 16-bit logits,
// usually one, and at most three for float32.
#pragma once
#include "row.cuh"

namespace llmk::kernels::sampling {

constexpr int kMaxCandidates = 1024;

struct Candidate {
  uint64_t weight;
  uint32_t key, index;
};

// Shared memory of one block. Members marked * are also accessed by the other blocks of the cluster.
struct Shared {
  uint32_t low[kBins], high[kBins];  // * this block's histogram: counts in `low`, or 64-bit weights in both
  union {
    uint64_t merged[kBins];  // * the histogram of the row
    Candidate candidates[kMaxCandidates];
  };
  uint32_t keys[kMaxCandidates], indices[kMaxCandidates];  // * this block's candidates
  uint32_t count;                                          // * of candidates of this block
  uint64_t block_max[kMaxCluster];                         // * the largest logit of every block
  uint64_t warp_weight[kMaxCluster * kWarps];              // * the weight of every slice
  uint32_t warp_ties[kMaxCluster * kWarps];                // * its logits equal to the threshold
  uint64_t scan[2][kWarps];
  struct {
    int bin;
    uint64_t above, at, count_bound;
  } target_bin;
  struct {
    int slice;
    uint64_t offset, ties_before;
  } hit;  // where the drawn point lies; see draw_from_row()
};

__device__ inline uint64_t warp_inclusive_sum(uint64_t value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, value, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) value += other;
  }
  return value;
}

// Exclusive prefix sum over the threads of the block, and the total. Calls must alternate between two buffers.
struct BlockSum {
  uint64_t before, total;
};
__device__ __noinline__ BlockSum block_sum(uint64_t value, uint64_t (&shared)[kWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t inclusive = warp_inclusive_sum(value);
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  const uint64_t warps = warp_inclusive_sum(shared[lane]);
  const uint64_t before = __shfl_sync(0xffffffffu, warps, (warp + 31) % 32);
  return {inclusive - value + (warp ? before : 0), __shfl_sync(0xffffffffu, warps, 31)};
}

// Keys in [lowest, highest].
struct KeyRange {
  uint32_t lowest, highest;
};

// The bin in which the cumulative sum of weights (or counts), from the largest logits on, reaches a target.
struct TargetBin {
  int bin;               // kBins: none
  uint64_t above;        // sum of the bins before
  uint64_t at;           // of this bin
  uint64_t total;        // of all bins
  uint64_t count_bound;  // upper bound of the logits in this bin and those before; only of find<true>
};

template <typename T>
class Selector {
 public:
  __device__ Selector(Shared& shared, const RowSlice<T>& slice, const Distance& distance, uint32_t best)
      : shared_(shared), slice_(slice), distance_(distance), best_(best) {}

  // The target bin of distance over the logits of at least `floor`, for the target make_target(total weight or count).
  template <bool kWeights, typename MakeTarget>
  __device__ TargetBin find_by_distance(float floor, const MakeTarget& make_target) {
    clear();
    slice_.for_each([&](int, float x) {
      const float distance = distance_(x);
      const int bin = bin_of(distance);
      if (bin < kLastBin && x >= floor) add_to<kWeights>(bin, distance);
    });
    merge<kWeights>(shared_);
    return find<kWeights>(make_target);
  }

  // The keys that fall into a bin of distance.
  __device__ KeyRange key_range(int bin) const {
    return {least_key(bin, best_, distance_), bin == 0 ? best_ : least_key(bin - 1, best_, distance_) - 1};
  }

  // Refines a range to the one key at which the cumulative sum, `above` at the top of the range, reaches `target`. Adds
  // to `above` the sum of the larger keys, and sets `at` to the sum of the key itself.
  template <bool kWeights>
  __device__ uint32_t refine(KeyRange range, uint64_t target, uint64_t& above, uint64_t& at) {
    while (range.lowest < range.highest) {
      const int shift = max(0, 32 - __clz(range.highest - range.lowest) - 11);
      const float low = value_of(range.lowest), high = value_of(range.highest);
      clear();
      slice_.for_each([&](int, float x) {
        if (x >= low && x <= high) add_to<kWeights>((range.highest - key_of(x)) >> shift, distance_(x));
      });
      merge<kWeights>(shared_);
      const uint64_t remaining = target - above;
      const TargetBin target_bin = find<false>([&](uint64_t) { return remaining; });
      above += target_bin.above;
      at = target_bin.at;
      range.highest -= static_cast<uint32_t>(target_bin.bin) << shift;
      range.lowest = max(range.lowest, range.highest - ((1u << shift) - 1));
    }
    return range.highest;
  }

 private:
  __device__ void clear() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared_.low[i] = shared_.high[i] = 0;
    __syncthreads();
  }

  template <bool kWeights>
  __device__ void add_to(int bin, float distance) {
    if constexpr (kWeights) {
      const uint64_t weight = weight_of(distance);
      const uint32_t low = static_cast<uint32_t>(weight);
      uint32_t high = static_cast<uint32_t>(weight >> 32);
      // Shared memory has no 64-bit atomic addition.
      if (low) high += atomicAdd(&shared_.low[bin], low) > ~low;
      if (high) atomicAdd(&shared_.high[bin], high);
    } else {
      atomicAdd(&shared_.low[bin], 1u);
    }
  }

  // Adds up the histograms of the blocks: reduce-scatter, then all-gather, over distributed shared memory.
  template <bool kWeights>
  __device__ static __noinline__ void merge(Shared& shared) {
    const int blocks = cluster_size(), lanes = max(1, blocks / 2), bins = kBins / blocks;
    const int lane = threadIdx.x % lanes;
    cluster_sync();
#pragma unroll 1
    for (int i = threadIdx.x / lanes; i < bins; i += kThreads / lanes) {
      const int bin = cluster_rank() * bins + i;
      uint64_t sum = 0;
#pragma unroll 2
      for (int block = lane; block < blocks; block += lanes) {
        sum += *in_block(&shared.low[bin], block);
        if (kWeights) sum += static_cast<uint64_t>(*in_block(&shared.high[bin], block)) << 32;
      }
#pragma unroll 1
      for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
#pragma unroll 2
      for (int block = lane; block < blocks; block += lanes) *in_block(&shared.merged[bin], block) = sum;
    }
    cluster_sync();
  }

  template <bool kBound, typename MakeTarget>
  __device__ TargetBin find(const MakeTarget& make_target) {
    static_assert(kBins == 2 * kThreads);
    const int bin = 2 * threadIdx.x;
    const uint64_t first = shared_.merged[bin], second = shared_.merged[bin + 1];
    const auto [before, total] = block_sum(first + second, shared_.scan[0]);
    const uint64_t target = make_target(total);
    uint64_t counts = 0, counts_before = 0;
    if constexpr (kBound) {  // a logit weighs at least what one at the far edge of its bin does
      const auto count = [](uint64_t weight, int bin) {
        const float least = fmaxf(1.f, floorf(exp2f(kWeightBits - (bin + 1.5f) / 32.f)));
        return weight ? static_cast<uint64_t>(static_cast<float>(weight) / least * 1.00001f) + 1 : 0;
      };
      counts = count(first, bin);
      const uint64_t second_count = count(second, bin + 1);
      counts_before = block_sum(counts + second_count, shared_.scan[1]).before;
      if (before + first < target) counts += second_count;
    }
    if (threadIdx.x == 0) shared_.target_bin.bin = kBins;
    __syncthreads();
    if (before < target && target <= before + first + second) {
      const bool is_second = before + first < target;
      shared_.target_bin = {bin + is_second, before + (is_second ? first : 0), is_second ? second : first,
                            counts_before + counts};
    }
    __syncthreads();
    return {shared_.target_bin.bin, shared_.target_bin.above, shared_.target_bin.at, total,
            shared_.target_bin.count_bound};
  }

  // The least key whose logit lies in this bin of distance or in one before it. Every warp finds it by itself, by a
  // search that divides the range by 33 in each step.
  __device__ static __noinline__ uint32_t least_key(int bin, uint32_t best, Distance distance) {
    uint32_t outside = kNoKey, inside = best;
#pragma unroll 1
    while (inside - outside > 1) {
      const uint32_t step = (inside - outside - 1) / 33 + 1, lane = threadIdx.x % 32;
      const uint64_t probe = outside + static_cast<uint64_t>(lane + 1) * step;
      const bool is_inside = probe >= inside || bin_of(distance(value_of(static_cast<uint32_t>(probe)))) <= bin;
      const uint32_t first = __ffs(__ballot_sync(0xffffffffu, is_inside)) - 1;  // 32 or more: none
      if (first < 32) inside = min(static_cast<uint64_t>(inside), outside + static_cast<uint64_t>(first + 1) * step);
      outside += min(first, 32u) * step;
    }
    return inside;
  }

  Shared& shared_;
  const RowSlice<T>& slice_;
  const Distance& distance_;
  uint32_t best_;
};

}  // namespace llmk::kernels::sampling
