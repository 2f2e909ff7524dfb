// Clusters of one block, for kernels that run on the CPU.
#pragma once
#include "device/ptx.cuh"

namespace llmk {

struct Cluster {
  int size, rank, index, count;

  static Cluster of(int size, int count) { return {size, 0, static_cast<int>(blockIdx.x), count}; }
  void arrive() const {}
  void arrive_relaxed() const {}
  void wait() const { __syncthreads(); }
};
inline void cluster_sync() { __syncthreads(); }
template <typename T>
T* in_block(T* shared, int) {
  return shared;
}

}  // namespace llmk
