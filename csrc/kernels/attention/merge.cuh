// How the sums of many warps become one result: those of a block and then of its cluster in shared memory; where
// several clusters share a pair they leave their sums in a workspace, and the last one to come, by a counter that it
// sets back, adds them up in the order of the clusters. So the result does not depend on who was last, and no float is
// ever added atomically.
#pragma once
#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/tma.cuh"
#include "device/vec.cuh"
#include "plan.h"
#include "shape.h"
#include "softmax.cuh"
#include "work.cuh"

namespace llmk::kernels {

// What an unfinished softmax is made of: the maximum of the scores (in units of log 2), and the sum of 2^(s - maximum).
struct alignas(8) Softmax {
  float maximum, sum;
};

// A barrier of the warps that compute.
__device__ inline void consumers_barrier() {
#if __CUDA_ARCH__ >= 900
  named_barrier(1, kThreads);
#else
  __syncthreads();
#endif
}

// Four elements of a query's unfinished attention.
struct Part {
  float4 sums;
  Softmax softmax;

  __device__ void scale(float factor) {
    sums.x *= factor, sums.y *= factor, sums.z *= factor, sums.w *= factor;
    softmax.sum *= factor;
  }
  __device__ void add(float weight, const float4& other, float sum) {
    sums.x += weight * other.x, sums.y += weight * other.y, sums.z += weight * other.z, sums.w += weight * other.w;
    softmax.sum += weight * sum;
  }
};

// Adds up `count` of them, in order, of which softmax_of(i) and sums_of(i) know; kAhead are loaded at a time.
template <int kAhead, typename SoftmaxOf, typename SumsOf>
__device__ Part combine(int count, const SoftmaxOf& softmax_of, const SumsOf& sums_of) {
  Part total{make_float4(0.f, 0.f, 0.f, 0.f), {-INFINITY, 0.f}};
  for (int first = 0; first < count; first += kAhead) {
    Softmax softmaxes[kAhead];
    float4 sums[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = min(first + j, count - 1);
      softmaxes[j] = softmax_of(i);
      sums[j] = sums_of(i);
    }
    float top = total.softmax.maximum;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) top = fmaxf(top, softmaxes[j].maximum);
    const float base = finite(top);
    total.scale(exp2_approximate(total.softmax.maximum - base));
    total.softmax.maximum = top;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j < count) total.add(exp2_approximate(softmaxes[j].maximum - base), sums[j], softmaxes[j].sum);
    }
  }
  return total;
}

// The workspace: of every cluster the sums of the pair that its share begins in, and of the one it ends in.
template <typename S>
struct Workspace {
  float4* sums;
  float2* softmaxes;  // as pairs, for the instructions that bypass L1

  __device__ Workspace(void* workspace, int clusters)
      : sums(static_cast<float4*>(workspace)),
        softmaxes(reinterpret_cast<float2*>(sums + clusters * 2 * S::kQueries * (S::D / 4))) {}

  __device__ static int slot(const Walk& walk, int cluster, int query) {
    const bool ends_in = walk.pair_begin > cluster * walk.quota.units;
    return (cluster * 2 + ends_in) * S::kQueries + query;
  }
};

// The merging of one pair after another, by the warps that compute. In a cluster, block `rank` finishes the queries
// rank, rank + size, ...: the others push their sums to its shared memory and arrive at its barrier.
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

  // Every warp has stored its sums. `first_query` and `queries`: of the pair; `last`: no pair follows.
  __device__ void finish(const Walk& walk, int first_query, int queries, bool last) {
    const int first_cluster = walk.first_cluster(), contributors = walk.last_cluster() - first_cluster + 1;
    const auto emit = [&](int query, int vector, const Part& part) {
      if (contributors == 1) return write(walk, first_query, query, vector, part);
      const int slot = workspace_.slot(walk, cluster_.index, query);
      __stcg(workspace_.sums + slot * kVectors + vector, part.sums);
      if (vector == 0) __stcg(workspace_.softmaxes + slot, make_float2(part.softmax.maximum, part.softmax.sum));
    };
    consumers_barrier();
    if (cluster_.size == 1) {
      for_each(queries, 0, 1, [&](int query, int vector) { emit(query, vector, of_warps(query, vector)); });
    } else {
      push(queries);
      for_each(queries, cluster_.rank, cluster_.size,
               [&](int query, int vector) { emit(query, vector, of_blocks(query, vector)); });
      if (!last) release();
      ++turn_;
    }
    if (contributors > 1 && comes_last(first_cluster, contributors)) {
      for_each(queries, cluster_.rank, cluster_.size, [&](int query, int vector) {
        write(walk, first_query, query, vector, of_clusters(walk, first_cluster, contributors, query, vector));
      });
    }
  }

  // All blocks of the cluster have begun, or are still there: before the first push, or where there was none.
  __device__ void meet() {
    if (!met_) cluster_.wait();
    met_ = true;
  }

 private:
  static constexpr int kVectors = S::D / 4;

  // Deals out body(query, vector) for the queries first, first + step, ... to the threads.
  template <typename Body>
  __device__ void for_each(int queries, int first, int step, const Body& body) const {
    for (int item = threadIdx.x;; item += kThreads) {
      const int query = first + item / kVectors * step;
      if (query >= queries) return;
      body(query, item % kVectors);
    }
  }

  __device__ const Softmax& softmax_at(int offset, int row) const {
    return reinterpret_cast<const Softmax*>(shared_ + offset)[row];
  }
  __device__ const float4& sums_at(int offset, int row, int vector) const {
    return *reinterpret_cast<const float4*>(shared_ + offset + (row * S::kSumRow + vector * 4) * 4);
  }
  __device__ Part of_warps(int query, int vector) const {
    return combine<4>(
        kWarps, [&](int warp) { return softmax_at(layout_.softmaxes, warp * S::kQueries + query); },
        [&](int warp) { return sums_at(layout_.sums, warp * S::kQueries + query, vector); });
  }
  // The blocks' parts of a query lie one after another, in the place of the first ones of that many queries.
  __device__ int part_row(int query, int rank) const { return (query & -cluster_.size) + rank; }
  __device__ Part of_blocks(int query, int vector) const {
    return combine<4>(
        cluster_.size, [&](int rank) { return softmax_at(layout_.part_softmaxes, part_row(query, rank)); },
        [&](int rank) { return sums_at(layout_.parts, part_row(query, rank), vector); });
  }
  __device__ Part of_clusters(const Walk& walk, int first_cluster, int count, int query, int vector) const {
    const auto softmax_of = [&](int i) {
      const float2 part = __ldcg(workspace_.softmaxes + workspace_.slot(walk, first_cluster + i, query));
      return Softmax{part.x, part.y};
    };
    const auto sums_of = [&](int i) {
      return __ldcg(workspace_.sums + workspace_.slot(walk, first_cluster + i, query) * kVectors + vector);
    };
    // One trip to memory: mostly of few, where there are few pairs of many.
    return count <= 4 ? combine<4>(count, softmax_of, sums_of) : combine<16>(count, softmax_of, sums_of);
  }

  // Gives the sums of this block to those who finish them, and waits for what the others give.
  __device__ void push([[maybe_unused]] int queries) {
#if __CUDA_ARCH__ >= 900
    const uint32_t base = shared_address(shared_);
    meet();
    if (turn_ > 0) barrier_wait_cluster(base + layout_.parts_free, (turn_ - 1) % 2);
    for_each(queries, 0, 1, [&](int query, int vector) {
      const Part part = of_warps(query, vector);
      const int owner = query & (cluster_.size - 1), row = part_row(query, cluster_.rank);
      const uint32_t sums = base + layout_.parts + (row * S::kSumRow + vector * 4) * 4;
      cluster_store(cluster_address(sums, owner), part.sums);
      if (vector == 0) {
        cluster_store(cluster_address(base + layout_.part_softmaxes + row * 8, owner),
                      make_float2(part.softmax.maximum, part.softmax.sum));
      }
    });
    arrive(base + layout_.parts_full);
    barrier_wait_cluster(base + layout_.parts_full, turn_ % 2);
#endif
  }
  // What the others gave has been read.
  __device__ void release() const {
#if __CUDA_ARCH__ >= 900
    arrive(shared_address(shared_) + layout_.parts_free);
#endif
  }
  // This warp arrives at a barrier of every block of the cluster.
  __device__ void arrive([[maybe_unused]] uint32_t barrier) const {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < cluster_.size) barrier_arrive_cluster(cluster_address(barrier, lane));
#endif
  }

  // Whether all other clusters have left their sums of the queries of this block.
  __device__ bool comes_last(int first_cluster, int contributors) const {
    volatile int* const verdict = reinterpret_cast<volatile int*>(shared_ + layout_.verdict);
    consumers_barrier();
    if (threadIdx.x == 0) {
      int* const counter = params_.counters + first_cluster * cluster_.size + cluster_.rank;
      // What this block has left is seen before the counter, and what the others have left, after it.
      const bool is_last = atomic_add_acq_rel(counter, 1) == contributors - 1;
      if (is_last) *counter = 0;
      *verdict = is_last;
    }
    consumers_barrier();
    return *verdict;
  }

  __device__ void write(const Walk& walk, int first_query, int query, int vector, const Part& part) const {
    using T = typename S::T;
    const int group = static_cast<int>(params_.heads / params_.kv_heads), tokens = static_cast<int>(params_.tokens);
    const float factor = part.softmax.sum == 0.f ? 0.f : reciprocal_approximate(part.softmax.sum);  // no key: zeros
    const float values[4] = {part.sums.x * factor, part.sums.y * factor, part.sums.z * factor, part.sums.w * factor};
    const int t = tokens == 1 ? 0 : divide(first_query + query, group), g = first_query + query - t * group;
    const int kv_head = plan_.chunks == 1 ? walk.pair : divide(walk.pair, plan_.chunks);
    const int64_t head = (static_cast<int64_t>(walk.b) * tokens + t) * params_.heads + kv_head * group + g;
    Vec<T, 4>::of([&](int i) { return values[i]; }).store(static_cast<T*>(params_.out) + head * S::D + vector * 4);
  }

  const DecodeAttentionParams& params_;
  const DecodePlan& plan_;
  const Cluster& cluster_;
  unsigned char* shared_;
  const Layout& layout_;
  Workspace<S> workspace_;
  int turn_ = 0;
  bool met_ = false;
};

}  // namespace llmk::kernels
