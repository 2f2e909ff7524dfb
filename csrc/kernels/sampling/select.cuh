// Selection by histogram: the k-th largest logit of a row, or the logit at which the most probable ones reach a given
// weight. Bins of the distance from the maximum come first, then the bin that was hit is divided by the bits of the
// keys until one key is left: at most two more rounds for 16-bit logits, usually one, and three for float32.
#pragma once
#include "row.cuh"

namespace llmk::kernels::sampling {

constexpr int kMaxCandidates = 1024;

struct Candidate {
  uint64_t weight;
  uint32_t key, index;
};

// Of one block; those marked with * are also reached from the other blocks.
struct Shared {
  uint32_t low[kBins], high[kBins];  // * this block's histogram: counts, or both halves of weights
  union {
    uint64_t merged[kBins];  // * the histogram of the row
    Candidate candidates[kMaxCandidates];
  };
  uint32_t keys[kMaxCandidates], indices[kMaxCandidates];  // * this block's candidates
  uint32_t count;                                          // * their number
  uint64_t block_best[kMaxCluster];                        // * largest logit of every block
  uint64_t warp_weight[kMaxCluster * kWarps];              // * of every warp
  uint32_t warp_ties[kMaxCluster * kWarps];                // *
  uint64_t scan[2][kWarps];
  struct {
    int bin;
    uint64_t above, at, bound;
  } crossing;
  struct {
    int warp;
    uint64_t rest, ties;
  } owner;  // of the point that is drawn; see draw_in_order()
};

__device__ inline uint64_t warp_inclusive_sum(uint64_t value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, value, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) value += other;
  }
  return value;
}

// The sum over the threads before this one, and over all. Calls must alternate between two buffers.
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

// Keys in [least, most].
struct KeyRange {
  uint32_t least, most;
};

// Where the weights (or counts) of the bins reach a target.
struct Crossing {
  int bin;         // kBins: nowhere
  uint64_t above;  // sum of the bins before
  uint64_t at;     // of this bin
  uint64_t total;  // of all bins
  uint64_t bound;  // where find() is told to: no more logits than that are in this bin and those before
};

template <typename T>
class Selector {
 public:
  __device__ Selector(Shared& shared, const Part<T>& part, const Distance& distance, uint32_t best)
      : shared_(shared), part_(part), distance_(distance), best_(best) {}

  // Looks for `target` in bins of distance, over the logits of at least `floor`. make_target(total) gives it.
  template <bool kWeights, typename MakeTarget>
  __device__ Crossing by_distance(float floor, const MakeTarget& make_target) {
    clear();
    part_.for_each([&](int, float x) {
      const float distance = distance_(x);
      const int bin = bin_of(distance);
      if (bin < kLastBin && x >= floor) add_to<kWeights>(bin, distance);
    });
    merge<kWeights>(shared_);
    return find<kWeights>(make_target);
  }

  // The keys of a bin of distance.
  __device__ KeyRange keys_of(int bin) const {
    return {least_key(bin, best_, distance_), bin == 0 ? best_ : least_key(bin - 1, best_, distance_) - 1};
  }

  // Narrows a range down to the one key at which the sum from the top of the range reaches `target`; adds to `above`
  // what lies over it, and sets `at` to what lies at it.
  template <bool kWeights>
  __device__ uint32_t narrow(KeyRange range, uint64_t target, uint64_t& above, uint64_t& at) {
    while (range.least < range.most) {
      const int shift = max(0, 32 - __clz(range.most - range.least) - 11);
      const float least = value_of(range.least), most = value_of(range.most);
      clear();
      part_.for_each([&](int, float x) {
        if (x >= least && x <= most) add_to<kWeights>((range.most - key_of(x)) >> shift, distance_(x));
      });
      merge<kWeights>(shared_);
      const uint64_t rest = target - above;
      const Crossing crossing = find<false>([&](uint64_t) { return rest; });
      above += crossing.above;
      at = crossing.at;
      range.most -= static_cast<uint32_t>(crossing.bin) << shift;
      range.least = max(range.least, range.most - ((1u << shift) - 1));
    }
    return range.most;
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
      // There is no 64-bit addition in shared memory.
      if (low) high += atomicAdd(&shared_.low[bin], low) > ~low;
      if (high) atomicAdd(&shared_.high[bin], high);
    } else {
      atomicAdd(&shared_.low[bin], 1u);
    }
  }

  // Adds up the histograms of the blocks: each block for some of the bins, which it then hands to all.
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
  __device__ Crossing find(const MakeTarget& make_target) {
    static_assert(kBins == 2 * kThreads);
    const int bin = 2 * threadIdx.x;
    const uint64_t first = shared_.merged[bin], second = shared_.merged[bin + 1];
    const auto [before, total] = block_sum(first + second, shared_.scan[0]);
    const uint64_t target = make_target(total);
    uint64_t counts = 0, counts_before = 0;
    if constexpr (kBound) {  // at the far edge of its bin, a logit has the least weight
      const auto count = [](uint64_t weight, int bin) {
        const float least = fmaxf(1.f, floorf(exp2f(kWeightBits - (bin + 1.5f) / 32.f)));
        return weight ? static_cast<uint64_t>(static_cast<float>(weight) / least * 1.00001f) + 1 : 0;
      };
      counts = count(first, bin);
      const uint64_t second_count = count(second, bin + 1);
      counts_before = block_sum(counts + second_count, shared_.scan[1]).before;
      if (before + first < target) counts += second_count;
    }
    if (threadIdx.x == 0) shared_.crossing.bin = kBins;
    __syncthreads();
    if (before < target && target <= before + first + second) {
      const bool is_second = before + first < target;
      shared_.crossing = {bin + is_second, before + (is_second ? first : 0), is_second ? second : first,
                          counts_before + counts};
    }
    __syncthreads();
    return {shared_.crossing.bin, shared_.crossing.above, shared_.crossing.at, total, shared_.crossing.bound};
  }

  // The least key whose logit lies in this bin of distance or in one before it. Every warp finds it by itself, in steps
  // of 33 parts.
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
  const Part<T>& part_;
  const Distance& distance_;
  uint32_t best_;
};

}  // namespace llmk::kernels::sampling
