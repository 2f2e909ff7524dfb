// The next rows of a group of threads on their way into shared memory: a ring of stages, a row in each, which the TMA
// unit fills (sm_90 and later). A row is copied by the aligned vectors that cover it (row_cover.cuh), by one
// instruction of one thread, so it costs the others no instructions and no registers, however many rows are on their
// way.
#pragma once
#include <algorithm>

#include "device/reduce.cuh"
#include "device/tma.cuh"
#include "kernels/device_info.h"

namespace llmk::kernels::norm {

struct RowRingPlan {
  int stages;           // 0: no ring
  int operand_vectors;  // of a stage, for each operand
};

constexpr int kMostRingStages = 4;

// Whether a kernel with a ring has code for the device.
inline bool has_row_ring(const DeviceInfo& device) { return device.compute_capability >= 90; }

template <typename T, int kOperands>
class RowRing {
  using V = Vec<T, kVecWidth<T>>;

 public:
  // `memory` and `barriers` are the block's; a barrier for each stage of each group.
  __device__ RowRing(int4* memory, uint64_t* barriers, const RowRingPlan& plan, const Group& group)
      : plan_(plan),
        first_stage_(memory + group.index * plan.stages * kOperands * plan.operand_vectors),
        first_barrier_(shared_address(barriers + group.index * plan.stages)),
        rank_(group.rank) {}

  // Before others than the first thread of the group use the ring, there is to be a barrier of the group.
  __device__ void init() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (rank_ > 0) return;
    for (int i = 0; i < plan_.stages; ++i) barrier_init(first_barrier_ + i * sizeof(uint64_t), 1);
    barrier_init_fence();
#endif
  }

  // Of the first thread: has `count` vectors from each of `rows` copied to stage `stage`. All threads have read what
  // lay there. A count of 0: nothing.
  __device__ void fill(int stage, const T* const (&rows)[kOperands], int count, uint64_t policy) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const uint32_t barrier = first_barrier_ + stage * sizeof(uint64_t), bytes = count * sizeof(int4);
    if (count == 0) return barrier_arrive(barrier);
    barrier_arrive_expecting(barrier, kOperands * bytes);
#pragma unroll
    for (int i = 0; i < kOperands; ++i) bulk_load(shared_address(at(stage, i)), rows[i], bytes, barrier, policy);
#endif
  }
  // Waits for the present stage.
  __device__ void wait() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    barrier_wait(first_barrier_ + stage_ * sizeof(uint64_t), parity_);
#endif
  }
  // There, the elements of an operand.
  __device__ const T* elements(int operand) const { return reinterpret_cast<const T*>(at(stage_, operand)); }

  __device__ int stage() const { return stage_; }
  __device__ void next() {
    if (++stage_ == plan_.stages) stage_ = 0, parity_ ^= 1;
  }

 private:
  __device__ int4* at(int stage, int operand) const {
    return first_stage_ + (stage * kOperands + operand) * plan_.operand_vectors;
  }

  RowRingPlan plan_;
  int4* first_stage_;
  uint32_t first_barrier_, parity_ = 0;
  int rank_, stage_ = 0;
};

}  // namespace llmk::kernels::norm
