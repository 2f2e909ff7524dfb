// Thread block clusters (sm_90 and later): blocks that run at the same time and access each other's shared memory.
// Before sm_90, every block is a cluster of its own.
#pragma once
#include <cstdint>

#include "device/ptx.cuh"

namespace llmk {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ inline int cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}
__device__ inline void cluster_arrive() {
  __syncwarp();  // the instruction needs a converged warp
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
// The same without memory ordering, which is a fence of the GPU: some 1 us.
__device__ inline void cluster_arrive_relaxed() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address of block `rank`'s copy of a variable in shared memory.
template <typename T>
__device__ T* in_block(T* shared, int rank) {
  T* result;
  asm("mapa.u64 %0, %1, %2;" : "=l"(result) : "l"(shared), "r"(rank));
  return result;
}
#else
__device__ inline int cluster_rank() { return 0; }
__device__ inline int cluster_size() { return 1; }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_arrive_relaxed() {}
__device__ inline void cluster_wait() { __syncthreads(); }
template <typename T>
__device__ T* in_block(T* shared, int) {
  return shared;
}
#endif

// A barrier of all threads of the cluster; earlier writes, also to other blocks' shared memory, are visible after it.
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

struct Cluster {
  int size, rank;    // blocks in it, and which of them this one is
  int index, count;  // of the cluster in the grid

  // For a one-dimensional grid, without the cluster's special registers, which are slow. `size` is a power of two.
  __device__ static Cluster of(int size, int count) {
    const int block = static_cast<int>(blockIdx.x);
    return {size, block & (size - 1), block >> (__ffs(size) - 1), count};
  }

  // A split barrier: writes before arrive() are visible after wait(). Does nothing for a cluster of one block.
  __device__ void arrive() const {
    if (size > 1) cluster_arrive();
  }
  __device__ void arrive_relaxed() const {
    if (size > 1) cluster_arrive_relaxed();
  }
  __device__ void wait() const {
    if (size > 1) cluster_wait();
  }
};

}  // namespace llmk
