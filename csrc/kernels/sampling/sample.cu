// One token per row of logits [rows, vocab], of any float type and any distance between rows:
//
//   x = logit; where the token has been seen, times 1 / penalty if positive, else times the penalty
//   w = 2^42 exp((x - max x) / temperature), an integer
//   top-k: x >= the k-th largest; top-p: the most probable that reach p of their sum; min-p: w >= min_p max w
//   token = the first at which the sum of w, in token order, passes a uniform random number times the total
//
// Reads the logits once, if they fit into shared memory: a row belongs to a cluster of blocks, which keep it there and
// select by histogram (select.cuh). Where a few hundred tokens are left, one block finishes with a list of them, in
// which everybody counts those before him; else the row is summed up in token order. All sums are of integers, so the
// token does not depend on the launch, and the CPU draws the same.
#include <algorithm>
#include <array>
#include <atomic>
#include <cfloat>

#include "device/ptx.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "sample.h"
#include "select.cuh"

namespace llmk::kernels {
namespace sampling {
namespace {

// What is drawn from once the thresholds are known: logits above `value`, and those at it but the first `skipped_ties`.
struct Cut {
  float value;
  uint64_t skipped_ties, tie_weight;
};

struct Draw {
  float top_p;
  int64_t top_k;
  uint64_t least_weight, random;
};

template <typename T>
class Sampler {
 public:
  __device__ Sampler(const SamplingParams& params, int64_t row, Shared& shared, Part<T>& part)
      : params_(params), row_(row), shared_(shared), part_(part) {}

  __device__ void run() {
    // Read before the first barrier of the cluster, so before any row can advance it.
    const uint64_t seed = params_.rng_state[0], offset = params_.rng_state[1] & kOffsetMask;
    const float temperature = of_row(params_.temperature, row_), min_p = of_row(params_.min_p, row_);
    const Draw draw{of_row(params_.top_p, row_), of_row(params_.top_k, row_), min_p_weight(min_p),
                    random_bits(seed, offset, row_)};
    if (!(temperature > 0.f)) {
      const uint64_t best = find_best();
      if (cluster_rank() == 0 && threadIdx.x == 0) finish(best >> 32 <= kNoKey ? 0 : ~static_cast<uint32_t>(best));
      return;
    }
    const bool has_top_k = draw.top_k > 0 && draw.top_k < params_.vocab;
    const auto [best_key, floor_key] = find_best_and_floor(has_top_k ? draw.top_k : kThreads + 1);
    if (best_key <= kNoKey) {
      if (cluster_rank() == 0 && threadIdx.x == 0) finish(0);
      return;
    }
    distance_ = Distance(value_of(best_key), temperature);
    Selector<T> select(shared_, part_, distance_, best_key);

    float floor = fmaxf(value_of(floor_key), -FLT_MAX);
    if (has_top_k) {
      const uint64_t k = draw.top_k;
      const Crossing crossing = select.template by_distance<false>(floor, [&](uint64_t) { return k; });
      if (crossing.bin < kBins) {  // else the k-th has no weight
        if (crossing.above + crossing.at <= kMaxCandidates) return draw_from_list(floor, crossing.bin, draw, k, 0);
        KeyRange range = select.keys_of(crossing.bin);
        range.least = max(range.least, key_of(floor));
        uint64_t above = crossing.above, at = 0;
        floor = value_of(select.template narrow<false>(range, k, above, at));
      }
    }
    Cut cut{-INFINITY, 0, 0};
    if (draw.top_p < 1.f) {
      uint64_t target = 0;
      const Crossing crossing = select.template by_distance<true>(
          floor, [&](uint64_t total) { return target = top_p_target(draw.top_p, total); });
      if (crossing.bound <= kMaxCandidates) return draw_from_list(floor, crossing.bin, draw, 0, crossing.total);
      KeyRange range = select.keys_of(crossing.bin);
      range.least = max(range.least, key_of(floor));
      uint64_t above = crossing.above, at = crossing.at;
      cut.value = value_of(select.template narrow<true>(range, target, above, at));
      const uint64_t weight = weight_of(distance_(cut.value));
      cut.skipped_ties = at / weight - (target - above + weight - 1) / weight;
      cut.tie_weight = weight >= draw.least_weight ? weight : 0;
    }
    draw_in_order(cut, floor, draw);
  }

 private:
  // Loads the row. The key of the largest logit, and the complement of the lowest index that has it.
  __device__ uint64_t find_best() {
    float best_value = -INFINITY;
    uint32_t best_index = 0;
    part_.load([&](int index, float x) {
      if (x > best_value) best_value = x, best_index = index;
    });
    const auto warp_best = [](uint64_t best) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
      return best;
    };
    const uint64_t best = static_cast<uint64_t>(key_of(best_value)) << 32 | static_cast<uint32_t>(~best_index);
    const int lane = threadIdx.x % 32;
    if (const uint64_t mine = warp_best(best); lane == 0) shared_.scan[0][threadIdx.x / 32] = mine;
    __syncthreads();
    return warp_best(exchange(warp_best(shared_.scan[0][lane])));
  }

  // Loads the row. The key of the largest logit, and one that at least k logits reach (if k is up to kThreads): each
  // lane has a largest one, so 32 logits reach the smallest of a warp's; of these take the best warps.
  struct BestAndFloor {
    uint32_t best, floor;
  };
  __device__ BestAndFloor find_best_and_floor(int64_t k) {
    float best_value = -INFINITY;
    part_.load([&](int, float x) { best_value = fmaxf(best_value, x); });
    const uint32_t key = key_of(best_value), best = __reduce_max_sync(0xffffffffu, key);
    const uint32_t floor = __reduce_min_sync(0xffffffffu, key);
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared_.scan[0][threadIdx.x / 32] = static_cast<uint64_t>(best) << 32 | floor;
    __syncthreads();
    const uint64_t warp = shared_.scan[0][lane];
    const uint32_t block_best = __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(warp >> 32));
    uint32_t block_floor = kNoKey;
    if (k <= kThreads) {
      const uint32_t warp_floor = static_cast<uint32_t>(warp);
      int rank = 0;
#pragma unroll 8
      for (int other = 0; other < 32; ++other) {
        const uint32_t its = __shfl_sync(0xffffffffu, warp_floor, other);
        rank += its > warp_floor || (its == warp_floor && other < lane);
      }
      const uint32_t chosen = __ballot_sync(0xffffffffu, rank == (k - 1) / 32);
      block_floor = __shfl_sync(0xffffffffu, warp_floor, __ffs(chosen) - 1);
    }
    const uint64_t block = exchange(static_cast<uint64_t>(block_best) << 32 | block_floor);
    return {__reduce_max_sync(0xffffffffu, static_cast<uint32_t>(block >> 32)),
            __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(block))};
  }

  // Hands the value of this block to all; returns those of the blocks, one per lane, over and over.
  __device__ uint64_t exchange(uint64_t value) {
    cluster_wait();  // until all blocks have begun
    const int thread = threadIdx.x, blocks = cluster_size();
    if (thread < blocks) *in_block(&shared_.block_best[cluster_rank()], thread) = value;
    cluster_sync();
    return shared_.block_best[thread % blocks];
  }

  // Draws from the logits of at least `floor` in the bins of distance up to `bin`, of which there are no more than
  // kMaxCandidates. `k`: top-k is still to be applied, or 0; `total`: the weight of all tokens, or 0 for that of the
  // list.
  __device__ void draw_from_list(float floor, int bin, const Draw& draw, uint64_t k, uint64_t total) {
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
    part_.for_each([&](int index, float x) {
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

    // A candidate is looked after by as many lanes as there are for it.
    int lanes = 1;
    while (lanes < 32 && 2 * lanes * count <= kThreads) lanes *= 2;
    const int mine = threadIdx.x / lanes, first = threadIdx.x % lanes;
    const Candidate me = mine < count ? shared_.candidates[mine] : Candidate{0, 0, 0};
    const auto sum_over = [&](const auto& value) {
      uint64_t sum = 0;
#pragma unroll 2
      for (int i = first; i < count; i += lanes) sum += value(shared_.candidates[i]);
#pragma unroll 1
      for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      return sum;
    };
    uint64_t weight = me.weight;  // 0 once the candidate is dropped
    const auto update = [&](bool keep, int buffer) {
      if (!keep) weight = 0;
      __syncthreads();
      if (first == 0 && mine < count) shared_.candidates[mine].weight = weight;
      return block_sum(first == 0 ? weight : 0, shared_.scan[buffer]).total;  // a barrier, too
    };

    if (k > 0) {
      const uint64_t larger =
          sum_over([&](const Candidate& other) { return static_cast<uint64_t>(other.key > me.key); });
      total = update(larger < k, 0);
    } else if (total == 0) {
      total = update(true, 0);
    }
    bool keep = weight >= draw.least_weight;
    if (draw.top_p < 1.f) {
      // Of equal logits the later ones come first, as in a stable ascending sort read from its end.
      const uint64_t before = sum_over([&](const Candidate& other) {
        const bool is_before = other.key > me.key || (other.key == me.key && other.index > me.index);
        return is_before ? other.weight : 0;
      });
      keep = keep && before < top_p_target(draw.top_p, total);
    }
    const uint64_t point = high_product(draw.random, update(keep, 1));
    const uint64_t before = sum_over([&](const Candidate& other) { return other.index < me.index ? other.weight : 0; });
    if (first == 0 && before <= point && point < before + weight) finish(me.index);
  }

  // Draws from the whole row.
  __device__ void draw_in_order(const Cut& cut, float floor, const Draw& draw) {
    const int lane = threadIdx.x % 32, warp = cluster_rank() * kWarps + threadIdx.x / 32;
    const auto kept_weight = [&](float x) {
      const uint64_t weight = weight_of(distance_(x));
      return x > cut.value && x >= floor && weight >= draw.least_weight ? weight : 0;
    };
    const auto add_up = [&](const Part<T>& part, uint64_t& weight, uint32_t& ties) {
      weight = ties = 0;
      part.for_each([&](int, float x) {
        weight += kept_weight(x);
        ties += x == cut.value;
      });
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) weight += __shfl_xor_sync(0xffffffffu, weight, offset);
      ties = __reduce_add_sync(0xffffffffu, ties);
    };
    uint64_t weight;
    uint32_t ties;
    add_up(part_, weight, ties);
    if (lane < cluster_size()) {
      *in_block(&shared_.warp_weight[warp], lane) = weight;
      *in_block(&shared_.warp_ties[warp], lane) = ties;
    }
    cluster_sync();

    // Which part of the row the point lies in: thread t looks at part t. Then likewise which share of this part.
    const auto kept_ties = [&](uint64_t before, uint64_t count) {
      const uint64_t end = before + count;
      return end - min(end, max(before, cut.skipped_ties));
    };
    const auto find_owner = [&](uint64_t weight, uint64_t ties, uint64_t ties_before, auto&& point_of) {
      ties_before += block_sum(ties, shared_.scan[0]).before;
      weight += cut.tie_weight * kept_ties(ties_before, ties);
      const auto [before, total] = block_sum(weight, shared_.scan[1]);
      const uint64_t point = point_of(total);
      if (before <= point && point < before + weight) {
        shared_.owner = {static_cast<int>(threadIdx.x), point - before, ties_before};
      }
      __syncthreads();
      return shared_.owner;
    };
    const int thread = threadIdx.x;
    const bool is_part = thread < cluster_size() * kWarps;
    const auto owner = find_owner(is_part ? shared_.warp_weight[thread] : 0, is_part ? shared_.warp_ties[thread] : 0, 0,
                                  [&](uint64_t total) { return high_product(draw.random, total); });
    if (owner.warp / kWarps != cluster_rank()) return;
    const Part<T> share = part_.share_of(owner.warp % kWarps);
    add_up(share, weight, ties);
    if (lane == 0) shared_.warp_weight[thread / 32] = weight, shared_.warp_ties[thread / 32] = ties;
    __syncthreads();
    const bool is_share = thread < kWarps;
    const auto share_owner =
        find_owner(is_share ? shared_.warp_weight[thread] : 0, is_share ? shared_.warp_ties[thread] : 0, owner.ties,
                   [&](uint64_t) { return owner.rest; });
    if (share_owner.warp != thread / 32) return;

    uint64_t rest = share_owner.rest, tie_rank = share_owner.ties;
    share.walk([&](int index, const auto& x) {
      uint64_t my_ties = 0;
      for (float value : x) my_ties += value == cut.value;
      const uint64_t ties_end = warp_inclusive_sum(my_ties);
      uint64_t rank = tie_rank + ties_end - my_ties;
      const auto each = [&](const auto& visit) {
        uint64_t my_rank = rank;
        for (int i = 0; i < Part<T>::N; ++i) {
          const bool is_kept_tie = x[i] == cut.value && my_rank++ >= cut.skipped_ties;
          visit(i, is_kept_tie ? cut.tie_weight : kept_weight(x[i]));
        }
      };
      uint64_t mine = 0;
      each([&](int, uint64_t value) { mine += value; });
      const uint64_t end = warp_inclusive_sum(mine);
      const uint64_t begin = end - mine;
      if (begin <= rest && rest < end) {
        uint64_t sum = begin;
        each([&](int i, uint64_t value) {
          if (sum <= rest && rest < sum + value) finish(index + i);
          sum += value;
        });
      }
      const uint64_t all = __shfl_sync(0xffffffffu, end, 31);
      if (rest < all) return true;
      rest -= all;
      tie_rank += __shfl_sync(0xffffffffu, ties_end, 31);
      return false;
    });
  }

  // Called by one thread of the row. The last row of all advances the offset.
  __device__ void finish(uint32_t token) {
    params_.tokens[row_] = token;
    if (params_.seen) params_.seen[row_ * params_.seen_stride + token] = 1;
    auto* const state = reinterpret_cast<unsigned long long*>(params_.rng_state + 1);
    const unsigned long long old = atomicAdd(state, 1ull << kOffsetBits);
    if (static_cast<int64_t>(old >> kOffsetBits) == params_.rows - 1) *state = (old + 1) & kOffsetMask;
  }

  const SamplingParams& params_;
  const int64_t row_;
  Shared& shared_;
  Part<T>& part_;
  Distance distance_;
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const SamplingParams params, bool is_vector, int cached) {
  extern __shared__ __align__(16) unsigned char memory[];
  cluster_arrive();
  pdl_launch_dependents();
  pdl_wait();
  const int64_t row = blockIdx.x / cluster_size();
  Part<T> part(params, row, is_vector, reinterpret_cast<typename Part<T>::Raw*>(memory + sizeof(Shared)), cached);
  Sampler<T>(params, row, *reinterpret_cast<Shared*>(memory), part).run();
  cluster_sync();  // other blocks may still read this one's shared memory
}

// How many clusters of 2^log2_blocks blocks the device holds at once; asked once, as the devices of a machine are
// alike. A block takes an SM for itself, so its shared memory does not matter.
template <typename T>
cudaError_t clusters_at_once(int log2_blocks, int& count) {
  static std::array<std::atomic<int>, 5> cache{};  // one more than the number
  std::atomic<int>& known = cache[log2_blocks];
  if (known == 0) {
    const auto kernel = sample_kernel<T>;
    if (1 << log2_blocks > 8) {
      const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (status != cudaSuccess) return status;
    }
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1u << log2_blocks, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << log2_blocks);
    config.blockDim = dim3(kThreads);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    const cudaError_t status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (status != cudaSuccess) return status;
    known = clusters + 1;
  }
  count = known - 1;
  return cudaSuccess;
}

}  // namespace
}  // namespace sampling

cudaError_t sample(const SamplingParams& params, Dtype dtype, cudaStream_t stream) {
  using namespace sampling;
  if (params.rows > kMaxRows || params.vocab < 1 || params.vocab > kMaxVocab) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    DeviceInfo device;
    cudaError_t status = device_info(device);
    if (status != cudaSuccess) return status;
    const bool has_clusters = device.compute_capability >= 90;
    const int64_t vectors = (params.vocab + kVector - 1) / kVector;
    int log2_blocks = 0;  // of a row: as many as leave no row waiting, and find work
    while (has_clusters && 1 << log2_blocks < kMaxCluster && vectors > kThreads << log2_blocks) {
      int clusters = 0;
      status = clusters_at_once<T>(log2_blocks + 1, clusters);
      if (status != cudaSuccess) return status;
      if (params.rows > clusters) break;
      ++log2_blocks;
    }
    const int64_t warps = int64_t{kWarps} << log2_blocks;
    const size_t step = sizeof(T) * kVector * kWarps;  // bytes of one vector per warp
    const int64_t room = (device.shared_bytes - sizeof(Shared)) / step;
    const int cached = static_cast<int>(std::min(room, (vectors + warps - 1) / warps));
    const bool is_vector = rows_aligned(params.logits, params.logits_stride, params.rows, sizeof(T));
    const size_t shared_bytes = sizeof(Shared) + cached * step;
    const auto kernel = sample_kernel<T>;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status == cudaSuccess) {
      cudaLaunchAttribute attributes[2]{};
      attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[0].val.programmaticStreamSerializationAllowed = 1;
      attributes[1].id = cudaLaunchAttributeClusterDimension;
      attributes[1].val.clusterDim = {1u << log2_blocks, 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(static_cast<unsigned>(params.rows << log2_blocks));
      config.blockDim = dim3(kThreads);
      config.dynamicSmemBytes = shared_bytes;
      config.stream = stream;
      config.attrs = attributes;
      config.numAttrs = has_clusters ? 2 : 0;
      status = cudaLaunchKernelEx(&config, kernel, params, is_vector, cached);
    }
    if (status != cudaSuccess) (void)cudaGetLastError();
    return status;
  });
}

}  // namespace llmk::kernels
