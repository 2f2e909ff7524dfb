// Sampling: draws one token per row of logits.
//
//   x = logit; if the token has been seen, times 1 / penalty where positive, else times the penalty
//   w = 2^42 exp((x - max x) / temperature), an integer
//   kept: by top-k x >= the k-th largest; by top-p the most probable that reach p of the sum; by min-p w >= min_p 2^42
//   token = the first at which the cumulative sum of w, in token order, exceeds u times the total, u uniform in [0, 1)
//
// logits [rows, vocab], float32, float16 or bfloat16, rows any distance apart. Logits are compared in float32. All sums
// are of integers, so they are exact, the token does not depend on the launch, and the CPU draws the same.
// Reads the logits once if they fit into shared memory.
//
// A cluster of blocks owns a row and keeps it in distributed shared memory:
//
//   1. the largest logit              find_max_and_floor(); greedy sampling ends with find_argmax()
//   2. the top-k, top-p threshold     by radix selection (select.cuh)
//   3. the draw                       draw_from_candidates() by one block, if at most kMaxCandidates tokens are left;
//                                     else draw_from_row()
#include <algorithm>
#include <cfloat>

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "sample.h"
#include "select.cuh"

namespace llmk::kernels {
namespace sampling {
namespace {

// Top-p keeps the logits above `value`, and of those equal to it all but the first `skipped_ties`.
struct Threshold {
  float value;
  uint64_t skipped_ties, tie_weight;
};

struct DrawOptions {
  float top_p;
  int64_t top_k;
  uint64_t min_weight, random;
};

template <typename T>
class Sampler {
 public:
  __device__ Sampler(const SamplingParams& params, int64_t row, Shared& shared, RowSlice<T>& slice)
      : params_(params), row_(row), shared_(shared), slice_(slice) {}

  __device__ void run() {
    // Read before the first barrier of the cluster, so before any row can advance it.
    const uint64_t seed = params_.rng_state[0], offset = params_.rng_state[1] & kOffsetMask;
    const float temperature = of_row(params_.temperature, row_), min_p = of_row(params_.min_p, row_);
    const DrawOptions options{of_row(params_.top_p, row_), of_row(params_.top_k, row_), min_p_weight(min_p),
                              random_bits(seed, offset, row_)};
    if (!(temperature > 0.f)) {
      const uint64_t best = find_argmax();
      if (cluster_rank() == 0 && threadIdx.x == 0) write_token(best >> 32 <= kNoKey ? 0 : ~static_cast<uint32_t>(best));
      return;
    }
    const bool has_top_k = options.top_k > 0 && options.top_k < params_.vocab;
    const auto [max_key, floor_key] = find_max_and_floor(has_top_k ? options.top_k : kThreads + 1);
    if (max_key <= kNoKey) {
      if (cluster_rank() == 0 && threadIdx.x == 0) write_token(0);
      return;
    }
    distance_ = Distance(value_of(max_key), temperature);
    Selector<T> select(shared_, slice_, distance_, max_key);

    float floor = fmaxf(value_of(floor_key), -FLT_MAX);
    if (has_top_k) {
      const uint64_t k = options.top_k;
      const TargetBin target_bin = select.template find_by_distance<false>(floor, [&](uint64_t) { return k; });
      if (target_bin.bin < kBins) {  // else the k-th has no weight
        if (target_bin.above + target_bin.at <= kMaxCandidates)
          return draw_from_candidates(floor, target_bin.bin, options, k, 0);
        KeyRange range = select.key_range(target_bin.bin);
        range.lowest = max(range.lowest, key_of(floor));
        uint64_t above = target_bin.above, at = 0;
        floor = value_of(select.template refine<false>(range, k, above, at));
      }
    }
    Threshold threshold{-INFINITY, 0, 0};
    if (options.top_p < 1.f) {
      uint64_t target = 0;
      const TargetBin target_bin = select.template find_by_distance<true>(
          floor, [&](uint64_t total) { return target = top_p_target(options.top_p, total); });
      if (target_bin.count_bound <= kMaxCandidates)
        return draw_from_candidates(floor, target_bin.bin, options, 0, target_bin.total);
      KeyRange range = select.key_range(target_bin.bin);
      range.lowest = max(range.lowest, key_of(floor));
      uint64_t above = target_bin.above, at = target_bin.at;
      threshold.value = value_of(select.template refine<true>(range, target, above, at));
      const uint64_t weight = weight_of(distance_(threshold.value));
      threshold.skipped_ties = at / weight - (target - above + weight - 1) / weight;
      threshold.tie_weight = weight >= options.min_weight ? weight : 0;
    }
    draw_from_row(threshold, floor, options);
  }

 private:
  // Loads the row. Returns the key of the largest logit, and below it the complement of the lowest index that has it.
  __device__ uint64_t find_argmax() {
    float best_value = -INFINITY;
    uint32_t best_index = 0;
    slice_.load([&](int index, float x) {
      if (x > best_value) best_value = x, best_index = index;
    });
    const auto warp_max = [](uint64_t best) {
      return warp_reduce(best, 32, [](uint64_t a, uint64_t b) { return max(a, b); });
    };
    const uint64_t best = static_cast<uint64_t>(key_of(best_value)) << 32 | static_cast<uint32_t>(~best_index);
    const int lane = threadIdx.x % 32;
    if (const uint64_t largest = warp_max(best); lane == 0) shared_.scan[0][threadIdx.x / 32] = largest;
    __syncthreads();
    return warp_max(all_gather(warp_max(shared_.scan[0][lane])));
  }

  // Loads the row. Returns the key of the largest logit, and a lower bound of the k-th largest, if k is up to kThreads:
  // at least 32 logits of a warp reach the smallest of its lanes' largest, so the ceil(k / 32) best warps hold k
  // logits.
  struct MaxAndFloor {
    uint32_t best, floor;
  };
  __device__ MaxAndFloor find_max_and_floor(int64_t k) {
    float best_value = -INFINITY;
    slice_.load([&](int, float x) { best_value = fmaxf(best_value, x); });
    const uint32_t key = key_of(best_value), best = __reduce_max_sync(0xffffffffu, key);
    const uint32_t floor = __reduce_min_sync(0xffffffffu, key);
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared_.scan[0][threadIdx.x / 32] = static_cast<uint64_t>(best) << 32 | floor;
    __syncthreads();
    const uint64_t warp = shared_.scan[0][lane];
    const uint32_t block_max = __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(warp >> 32));
    uint32_t block_floor = kNoKey;
    if (k <= kThreads) {
      const uint32_t warp_floor = static_cast<uint32_t>(warp);
      int rank = 0;
#pragma unroll 8
      for (int other = 0; other < 32; ++other) {
        const uint32_t other_floor = __shfl_sync(0xffffffffu, warp_floor, other);
        rank += other_floor > warp_floor || (other_floor == warp_floor && other < lane);
      }
      const uint32_t chosen = __ballot_sync(0xffffffffu, rank == (k - 1) / 32);
      block_floor = __shfl_sync(0xffffffffu, warp_floor, __ffs(chosen) - 1);
    }
    const uint64_t block = all_gather(static_cast<uint64_t>(block_max) << 32 | block_floor);
    return {__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(block >> 32)),
            __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(block))};
  }

  // All-gather over the cluster: lane l returns the value of block l % cluster_size().
  __device__ uint64_t all_gather(uint64_t value) {
    cluster_wait();  // until all blocks have begun
    const int thread = threadIdx.x, blocks = cluster_size();
    if (thread < blocks) *in_block(&shared_.block_max[cluster_rank()], thread) = value;
    cluster_sync();
    return shared_.block_max[thread % blocks];
  }

  // Draws from the logits of at least `floor` in the bins of distance up to `bin`; at most kMaxCandidates. One block
  // gathers them, and compares each candidate with all others. `k`: top-k is still to be applied, or 0. `total`: the
  // weight of all tokens, or 0: that of the candidates.
  __device__ void draw_from_candidates(float floor, int bin, const DrawOptions& options, uint64_t k, uint64_t total) {
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
    slice_.for_each([&](int index, float x) {
      if (x < floor || bin_of(distance_(x)) > bin) return;
      const uint32_t position = atomicAdd(&shared_.count, 1u);
      shared_.keys[position] = key_of(x);
      shared_.indices[position] = index;
    });
    cluster_sync();
    if (cluster_rank() != 0) return;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = cluster_size();
    const uint64_t size = lane < blocks ? *in_block(&shared_.count, lane) : 0, ends = warp_inclusive_sum(size);
    const int count = static_cast<int>(__shfl_sync(0xffffffffu, ends, 31));
#pragma unroll 1
    for (int block = warp; block < blocks; block += kWarps) {
      const int begin = static_cast<int>(__shfl_sync(0xffffffffu, ends - size, block));
      const int end = static_cast<int>(__shfl_sync(0xffffffffu, ends, block));
#pragma unroll 1
      for (int i = begin + lane; i < end; i += 32) {
        const uint32_t key = *in_block(&shared_.keys[i - begin], block);
        shared_.candidates[i] = {weight_of(distance_(value_of(key))), key,
                                 *in_block(&shared_.indices[i - begin], block)};
      }
    }
    __syncthreads();

    // As many lanes per candidate as the block has.
    int lanes = 1;
    while (lanes < 32 && 2 * lanes * count <= kThreads) lanes *= 2;
    const int candidate = threadIdx.x / lanes, first = threadIdx.x % lanes;
    const Candidate self = candidate < count ? shared_.candidates[candidate] : Candidate{0, 0, 0};
    const auto sum_over = [&](const auto& value) {
      uint64_t sum = 0;
#pragma unroll 2
      for (int i = first; i < count; i += lanes) sum += value(shared_.candidates[i]);
#pragma unroll 1
      for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      return sum;
    };
    uint64_t weight = self.weight;  // 0 once the candidate is dropped
    const auto update = [&](bool keep, int buffer) {
      if (!keep) weight = 0;
      __syncthreads();
      if (first == 0 && candidate < count) shared_.candidates[candidate].weight = weight;
      return block_sum(first == 0 ? weight : 0, shared_.scan[buffer]).total;  // a barrier, too
    };

    if (k > 0) {
      const uint64_t larger =
          sum_over([&](const Candidate& other) { return static_cast<uint64_t>(other.key > self.key); });
      total = update(larger < k, 0);
    } else if (total == 0) {
      total = update(true, 0);
    }
    bool keep = weight >= options.min_weight;
    if (options.top_p < 1.f) {
      // Of equal logits the later ones come first, as in a stable ascending sort read from its end.
      const uint64_t before = sum_over([&](const Candidate& other) {
        const bool is_before = other.key > self.key || (other.key == self.key && other.index > self.index);
        return is_before ? other.weight : 0;
      });
      keep = keep && before < top_p_target(options.top_p, total);
    }
    const uint64_t point = high_product(options.random, update(keep, 1));
    const uint64_t before =
        sum_over([&](const Candidate& other) { return other.index < self.index ? other.weight : 0; });
    if (first == 0 && before <= point && point < before + weight) write_token(self.index);
  }

  // Draws from the whole row by inversion of the cumulative weight: finds the slice of the row that holds the point,
  // then the sub-slice, then the token.
  __device__ void draw_from_row(const Threshold& threshold, float floor, const DrawOptions& options) {
    const int lane = threadIdx.x % 32, warp = cluster_rank() * kWarps + threadIdx.x / 32;
    const auto kept_weight = [&](float x) {
      const uint64_t weight = weight_of(distance_(x));
      return x > threshold.value && x >= floor && weight >= options.min_weight ? weight : 0;
    };
    const auto add_up = [&](const RowSlice<T>& slice, uint64_t& weight, uint32_t& ties) {
      weight = ties = 0;
      slice.for_each([&](int, float x) {
        weight += kept_weight(x);
        ties += x == threshold.value;
      });
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) weight += __shfl_xor_sync(0xffffffffu, weight, offset);
      ties = __reduce_add_sync(0xffffffffu, ties);
    };
    uint64_t weight;
    uint32_t ties;
    add_up(slice_, weight, ties);
    if (lane < cluster_size()) {
      *in_block(&shared_.warp_weight[warp], lane) = weight;
      *in_block(&shared_.warp_ties[warp], lane) = ties;
    }
    cluster_sync();

    // Thread t looks at slice t of the row; then likewise at sub-slice t of the slice that was hit.
    const auto kept_ties = [&](uint64_t before, uint64_t count) {
      const uint64_t end = before + count;
      return end - min(end, max(before, threshold.skipped_ties));
    };
    const auto find_slice = [&](uint64_t weight, uint64_t ties, uint64_t ties_before, auto&& point_of) {
      ties_before += block_sum(ties, shared_.scan[0]).before;
      weight += threshold.tie_weight * kept_ties(ties_before, ties);
      const auto [before, total] = block_sum(weight, shared_.scan[1]);
      const uint64_t point = point_of(total);
      if (before <= point && point < before + weight) {
        shared_.hit = {static_cast<int>(threadIdx.x), point - before, ties_before};
      }
      __syncthreads();
      return shared_.hit;
    };
    const int thread = threadIdx.x;
    const bool is_slice = thread < cluster_size() * kWarps;
    const auto hit = find_slice(is_slice ? shared_.warp_weight[thread] : 0, is_slice ? shared_.warp_ties[thread] : 0, 0,
                                [&](uint64_t total) { return high_product(options.random, total); });
    if (hit.slice / kWarps != cluster_rank()) return;
    const RowSlice<T> sub_slice = slice_.split(hit.slice % kWarps);
    add_up(sub_slice, weight, ties);
    if (lane == 0) shared_.warp_weight[thread / 32] = weight, shared_.warp_ties[thread / 32] = ties;
    __syncthreads();
    const bool is_sub_slice = thread < kWarps;
    const auto sub_hit =
        find_slice(is_sub_slice ? shared_.warp_weight[thread] : 0, is_sub_slice ? shared_.warp_ties[thread] : 0,
                   hit.ties_before, [&](uint64_t) { return hit.offset; });
    if (sub_hit.slice != thread / 32) return;

    uint64_t remaining = sub_hit.offset, tie_rank = sub_hit.ties_before;
    sub_slice.for_each_in_order([&](int index, const auto& x) {
      uint64_t lane_ties = 0;
      for (float value : x) lane_ties += value == threshold.value;
      const uint64_t ties_end = warp_inclusive_sum(lane_ties);
      uint64_t rank = tie_rank + ties_end - lane_ties;
      const auto each = [&](const auto& visit) {
        uint64_t next_rank = rank;
        for (int i = 0; i < RowSlice<T>::N; ++i) {
          const bool is_kept_tie = x[i] == threshold.value && next_rank++ >= threshold.skipped_ties;
          visit(i, is_kept_tie ? threshold.tie_weight : kept_weight(x[i]));
        }
      };
      uint64_t lane_weight = 0;
      each([&](int, uint64_t value) { lane_weight += value; });
      const uint64_t end = warp_inclusive_sum(lane_weight);
      const uint64_t begin = end - lane_weight;
      if (begin <= remaining && remaining < end) {
        uint64_t sum = begin;
        each([&](int i, uint64_t value) {
          if (sum <= remaining && remaining < sum + value) write_token(index + i);
          sum += value;
        });
      }
      const uint64_t all = __shfl_sync(0xffffffffu, end, 31);
      if (remaining < all) return true;
      remaining -= all;
      tie_rank += __shfl_sync(0xffffffffu, ties_end, 31);
      return false;
    });
  }

  // Called by one thread per row. The last row to finish advances the offset of the random state.
  __device__ void write_token(uint32_t token) {
    params_.tokens[row_] = token;
    if (params_.seen) params_.seen[row_ * params_.seen_stride + token] = 1;
    auto* const state = reinterpret_cast<unsigned long long*>(params_.rng_state + 1);
    const unsigned long long old = atomicAdd(state, 1ull << kOffsetBits);
    if (static_cast<int64_t>(old >> kOffsetBits) == params_.rows - 1) *state = (old + 1) & kOffsetMask;
  }

  const SamplingParams& params_;
  const int64_t row_;
  Shared& shared_;
  RowSlice<T>& slice_;
  Distance distance_;
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const SamplingParams params, bool is_vector, int cached) {
  extern __shared__ __align__(16) unsigned char memory[];
  cluster_arrive();
  pdl_launch_dependents();
  pdl_wait();
  const int64_t row = blockIdx.x / cluster_size();
  RowSlice<T> slice(params, row, is_vector, reinterpret_cast<typename RowSlice<T>::Raw*>(memory + sizeof(Shared)),
                    cached);
  Sampler<T>(params, row, *reinterpret_cast<Shared*>(memory), slice).run();
  cluster_sync();  // other blocks may still read this one's shared memory
}

}  // namespace
}  // namespace sampling

cudaError_t sample(const SamplingParams& params, Dtype dtype, cudaStream_t stream) {
  using namespace sampling;
  if (params.rows > kMaxRows || params.vocab < 1 || params.vocab > kMaxVocab) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const int64_t vectors = (params.vocab + kVector - 1) / kVector;
    int blocks = 1;  // per row: as many as have work while all rows run at the same time, one block per SM
    while (blocks < kMaxCluster && vectors > kThreads * blocks && params.rows <= device.clusters[2 * blocks]) {
      blocks *= 2;
    }
    const int64_t warps = int64_t{kWarps} * blocks;
    const size_t step = sizeof(T) * kVector * kWarps;  // bytes of one vector per warp
    const int64_t room = (device.shared_bytes - sizeof(Shared)) / step;
    const int cached = static_cast<int>(std::min(room, (vectors + warps - 1) / warps));
    const bool is_vector = rows_aligned(params.logits, params.logits_stride, params.rows, sizeof(T));
    const size_t shared_bytes = sizeof(Shared) + cached * step;
    LaunchShape shape{params.rows * blocks, dim3(kThreads), shared_bytes};
    shape.cluster = blocks;
    return launch(sample_kernel<T>, shape, stream, params, is_vector, cached);
  });
}

}  // namespace llmk::kernels
