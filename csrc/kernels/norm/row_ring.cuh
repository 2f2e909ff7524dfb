// Rows on their way into shared memory: a ring of stages of kRows rows each, which the TMA unit fills (sm_90 and later)
// for one group of threads. A row is copied by the aligned vectors that cover it (row_cover.cuh), by one instruction of
// one thread, so it costs no registers and hardly an instruction, however many rows are on their way.
#pragma once
#include "device/reduce.cuh"
#include "device/tma.cuh"

namespace llmk::kernels::norm {

template <typename T, int kRows, int kStages>
class RowRing {
 public:
  // `memory` and `barriers` are the block's, for each group kRows kStages rows of `row_vectors` vectors and kStages
  // barriers. At first all stages are filled, with next() behind each; then a group meets at a barrier.
  __device__ RowRing(int4* memory, uint64_t* barriers, int row_vectors, const Group& group)
      : rows_(memory + group.index * kStages * kRows * row_vectors),
        barriers_(shared_address(barriers + group.index * kStages)),
        row_vectors_(row_vectors) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (group.rank > 0) return;
    for (int stage = 0; stage < kStages; ++stage) barrier_init(barrier(stage), 1);
    barrier_init_fence();
#endif
  }

  // Of the first thread: has rows copied to the present stage, where all have read what lay there: copy(i, to, barrier)
  // has row i copied, and returns how many bytes that will be.
  template <typename Copy>
  __device__ void fill(const Copy& copy) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) bytes += copy(i, shared_address(row(i)), barrier(stage_));
    barrier_arrive_expecting(barrier(stage_), bytes);
#endif
  }
  // Waits until the rows of the present stage are there.
  __device__ void wait() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    barrier_wait(barrier(stage_), parity_);
#endif
  }
  // What threads have written to a row comes before the copies that follow.
  __device__ void fence() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    async_proxy_fence();
#endif
  }
  // The vectors of row i of the present stage.
  __device__ int4* row(int i) const { return rows_ + (stage_ * kRows + i) * row_vectors_; }

  __device__ void next() {
    if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
  }

 private:
  __device__ uint32_t barrier(int stage) const { return barriers_ + stage * sizeof(uint64_t); }

  int4* rows_;
  uint32_t barriers_, parity_ = 1;  // 0 when all stages have been filled
  int row_vectors_, stage_ = 0;
};

}  // namespace llmk::kernels::norm
