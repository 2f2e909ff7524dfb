// The merge of split-KV: partial outputs with their softmax states become one output,
//
//   m = max_i m_i      l = sum_i 2^(m_i - m) l_i      y = sum_i 2^(m_i - m) o_i / l        (m + log2 l: log-sum-exp)
//
//   warps -> block      in shared memory
//   blocks -> cluster   in distributed shared memory: block `rank` merges the queries rank, rank + size, ...
//   clusters            where several share a work tile: each writes its partial output to the workspace; the last to
//                       arrive, by a counter that it resets, merges them in the order of the clusters
//
// The order is fixed and no float is added atomically, so the result does not depend on timing.
#pragma once
#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/tma.cuh"
#include "device/vec.cuh"
#include "plan.h"
#include "shape.h"
#include "softmax.cuh"
#include "tile_scheduler.cuh"

namespace llmk::kernels {

// The state of an online softmax: the maximum of the scores (in base 2), and the sum of 2^(s - maximum).
struct alignas(8) SoftmaxState {
  float maximum, sum;
};

// A barrier of the consumer warps.
__device__ inline void consumers_barrier() {
#if __CUDA_ARCH__ >= 900
  named_barrier(1, kThreads);
#else
  __syncthreads();
#endif
}

// Four elements of a query's output, not yet normalized.
struct PartialOutput {
  float4 sums;
  SoftmaxState softmax;

  __device__ void scale(float factor) {
    sums.x *= factor, sums.y *= factor, sums.z *= factor, sums.w *= factor;
    softmax.sum *= factor;
  }
  __device__ void add(float weight, const float4& other, float sum) {
    sums.x += weight * other.x, sums.y += weight * other.y, sums.z += weight * other.z, sums.w += weight * other.w;
    softmax.sum += weight * sum;
  }
};

// Merges `count` partial outputs in order, given by softmax_of(i) and sums_of(i); kUnroll loads are in flight.
template <int kUnroll, typename SoftmaxOf, typename SumsOf>
__device__ PartialOutput merge_partials(int count, const SoftmaxOf& softmax_of, const SumsOf& sums_of) {
  PartialOutput total{make_float4(0.f, 0.f, 0.f, 0.f), {-INFINITY, 0.f}};
  for (int first = 0; first < count; first += kUnroll) {
    SoftmaxState softmaxes[kUnroll];
    float4 sums[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int i = min(first + j, count - 1);
      softmaxes[j] = softmax_of(i);
      sums[j] = sums_of(i);
    }
    float new_maximum = total.softmax.maximum;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) new_maximum = fmaxf(new_maximum, softmaxes[j].maximum);
    const float base = finite(new_maximum);
    total.scale(exp2_approximate(total.softmax.maximum - base));
    total.softmax.maximum = new_maximum;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (first + j < count) total.add(exp2_approximate(softmaxes[j].maximum - base), sums[j], softmaxes[j].sum);
    }
  }
  return total;
}

// The workspace in device memory. A cluster shares at most two work tiles with others, those of its first and its last
// split: two partial outputs of each query of a query tile.
template <typename S>
struct Workspace {
  float4* sums;
  float2* softmaxes;  // as work_tiles, for the instructions that bypass L1

  __device__ Workspace(void* workspace, int clusters)
      : sums(static_cast<float4*>(workspace)),
        softmaxes(reinterpret_cast<float2*>(sums + clusters * 2 * S::kQueries * (S::D / 4))) {}

  __device__ static int row(const TileScheduler<S>& scheduler, int cluster, int query) {
    const bool is_last_split = scheduler.work_tile_begin > cluster * scheduler.splits.kv_tiles;
    return (cluster * 2 + is_last_split) * S::kQueries + query;
  }
};

// Merges one work tile after another. For the consumer warps.
template <typename S>
class Merger {
 public:
  __device__ Merger(const DecodeAttentionParams& params, const DecodePlan& plan, const Cluster& cluster,
                    unsigned char* shared, const Layout& layout)
      : params_(params),
        plan_(plan),
        cluster_(cluster),
        shared_(shared),
        layout_(layout),
        workspace_(params.workspace, cluster.count) {}

  // After every warp has stored its partial output. `first_query` and `queries`: of the work tile.
  __device__ void merge(const TileScheduler<S>& scheduler, int first_query, int queries, bool is_last_work_tile) {
    const int first_cluster = scheduler.first_cluster(), contributors = scheduler.last_cluster() - first_cluster + 1;
    const auto emit = [&](int query, int vector, const PartialOutput& partial) {
      if (contributors == 1) return write(scheduler, first_query, query, vector, partial);
      const int row = workspace_.row(scheduler, cluster_.index, query);
      __stcg(workspace_.sums + row * kVectors + vector, partial.sums);
      if (vector == 0) __stcg(workspace_.softmaxes + row, make_float2(partial.softmax.maximum, partial.softmax.sum));
    };
    consumers_barrier();
    if (cluster_.size == 1) {
      for_each(queries, 0, 1, [&](int query, int vector) { emit(query, vector, merge_warps(query, vector)); });
    } else {
      push_partials(queries);
      for_each(queries, cluster_.rank, cluster_.size,
               [&](int query, int vector) { emit(query, vector, merge_blocks(query, vector)); });
      if (!is_last_work_tile) release_partials();
      ++round_;
    }
    if (contributors > 1 && is_last_cluster(first_cluster, contributors)) {
      for_each(queries, cluster_.rank, cluster_.size, [&](int query, int vector) {
        write(scheduler, first_query, query, vector,
              merge_clusters(scheduler, first_cluster, contributors, query, vector));
      });
    }
  }

  // Waits until all blocks of the cluster have started: before the first access to their shared memory, and before the
  // exit of a block that had none.
  __device__ void wait_for_cluster() {
    if (!cluster_started_) cluster_.wait();
    cluster_started_ = true;
  }

 private:
  static constexpr int kVectors = S::D / 4;

  // Calls body(query, vector) for all vectors of the queries first, first + step, ..., split over the threads.
  template <typename Body>
  __device__ void for_each(int queries, int first, int step, const Body& body) const {
    for (int item = threadIdx.x;; item += kThreads) {
      const int query = first + item / kVectors * step;
      if (query >= queries) return;
      body(query, item % kVectors);
    }
  }

  __device__ const SoftmaxState& softmax_at(int offset, int row) const {
    return reinterpret_cast<const SoftmaxState*>(shared_ + offset)[row];
  }
  __device__ const float4& sums_at(int offset, int row, int vector) const {
    return *reinterpret_cast<const float4*>(shared_ + offset + (row * S::kSumRow + vector * 4) * 4);
  }
  __device__ PartialOutput merge_warps(int query, int vector) const {
    return merge_partials<4>(
        kWarps, [&](int warp) { return softmax_at(layout_.softmaxes, warp * S::kQueries + query); },
        [&](int warp) { return sums_at(layout_.sums, warp * S::kQueries + query, vector); });
  }
  // Rows of block_sums: the partial outputs of a query from all blocks lie one after another.
  __device__ int partial_row(int query, int rank) const { return (query & -cluster_.size) + rank; }
  __device__ PartialOutput merge_blocks(int query, int vector) const {
    return merge_partials<4>(
        cluster_.size, [&](int rank) { return softmax_at(layout_.block_softmaxes, partial_row(query, rank)); },
        [&](int rank) { return sums_at(layout_.block_sums, partial_row(query, rank), vector); });
  }
  __device__ PartialOutput merge_clusters(const TileScheduler<S>& scheduler, int first_cluster, int count, int query,
                                          int vector) const {
    const auto softmax_of = [&](int i) {
      const float2 state = __ldcg(workspace_.softmaxes + workspace_.row(scheduler, first_cluster + i, query));
      return SoftmaxState{state.x, state.y};
    };
    const auto sums_of = [&](int i) {
      return __ldcg(workspace_.sums + workspace_.row(scheduler, first_cluster + i, query) * kVectors + vector);
    };
    // All loads in flight at once; mostly few clusters share a work tile.
    return count <= 4 ? merge_partials<4>(count, softmax_of, sums_of) : merge_partials<16>(count, softmax_of, sums_of);
  }

  // Writes this block's partial outputs to the blocks that merge them, and waits for those of the other blocks.
  __device__ void push_partials([[maybe_unused]] int queries) {
#if __CUDA_ARCH__ >= 900
    const uint32_t base = shared_address(shared_);
    wait_for_cluster();
    if (round_ > 0) barrier_wait(base + layout_.partials_empty, (round_ - 1) % 2);
    const uint32_t full = base + layout_.partials_full;
    if (threadIdx.x == 0) {
      const int owned = (queries + cluster_.size - 1 - cluster_.rank) >> (__ffs(cluster_.size) - 1);
      barrier_arrive_expecting(full, owned * cluster_.size * static_cast<int>(S::D * 4 + sizeof(SoftmaxState)));
    }
    for_each(queries, 0, 1, [&](int query, int vector) {
      const PartialOutput partial = merge_warps(query, vector);
      const int owner = query & (cluster_.size - 1), row = partial_row(query, cluster_.rank);
      const uint32_t sums = base + layout_.block_sums + (row * S::kSumRow + vector * 4) * 4,
                     owners_full = cluster_address(full, owner);
      cluster_store(cluster_address(sums, owner), partial.sums, owners_full);
      if (vector == 0) {
        cluster_store(cluster_address(base + layout_.block_softmaxes + row * 8, owner),
                      make_float2(partial.softmax.maximum, partial.softmax.sum), owners_full);
      }
    });
    barrier_wait(full, round_ % 2);
#endif
  }
  // This block has read the partial outputs of the others, and used them: each of its warps arrives at every block of
  // the cluster.
  __device__ void release_partials() const {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < cluster_.size)
      barrier_arrive_cluster(cluster_address(shared_address(shared_) + layout_.partials_empty, lane));
#endif
  }

  // Whether all other clusters have written their partial outputs of this block's queries.
  __device__ bool is_last_cluster(int first_cluster, int contributors) const {
    volatile int* const is_last = reinterpret_cast<volatile int*>(shared_ + layout_.is_last);
    consumers_barrier();
    if (threadIdx.x == 0) {
      int* const counter = params_.counters + first_cluster * cluster_.size + cluster_.rank;
      // Releases this block's partial outputs, acquires those of the others.
      const bool arrived_last = atomic_add_acq_rel(counter, 1) == contributors - 1;
      if (arrived_last) *counter = 0;
      *is_last = arrived_last;
    }
    consumers_barrier();
    return *is_last;
  }

  __device__ void write(const TileScheduler<S>& scheduler, int first_query, int query, int vector,
                        const PartialOutput& partial) const {
    using T = typename S::T;
    const int group = plan_.group, tokens = static_cast<int>(params_.tokens);
    const float factor =
        partial.softmax.sum == 0.f ? 0.f : reciprocal_approximate(partial.softmax.sum);  // no key: zeros
    const float values[4] = {partial.sums.x * factor, partial.sums.y * factor, partial.sums.z * factor,
                             partial.sums.w * factor};
    const int t = tokens == 1 ? 0 : divide(first_query + query, group), g = first_query + query - t * group;
    const int kv_head = plan_.query_tiles == 1 ? scheduler.work_tile : divide(scheduler.work_tile, plan_.query_tiles);
    const int64_t head = (static_cast<int64_t>(scheduler.b) * tokens + t) * params_.heads + kv_head * group + g;
    Vec<T, 4>::of([&](int i) { return values[i]; }).store(static_cast<T*>(params_.out) + head * S::D + vector * 4);
  }

  const DecodeAttentionParams& params_;
  const DecodePlan& plan_;
  const Cluster& cluster_;
  unsigned char* shared_;
  const Layout& layout_;
  Workspace<S> workspace_;
  int round_ = 0;
  bool cluster_started_ = false;
};

}  // namespace llmk::kernels
