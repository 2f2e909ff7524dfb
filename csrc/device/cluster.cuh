// Blocks that run together as a cluster and read each other's shared memory (sm_90 and later). Before that a block is
// a cluster of its own.
#pragma once
#include <cstdint>

#include "device/ptx.cuh"

namespace llmk {

struct Cluster {
  int size, rank;   // blocks in it, and which of them this one is
  int index, count;  // of the cluster in the grid

  __device__ static Cluster current() {
    Cluster cluster{1, 0, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(cluster.size));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(cluster.rank));
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster.index));
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(cluster.count));
#endif
    return cluster;
  }

  // A barrier in two halves: what was written before arrive() is seen after wait(). For a cluster of one block it
  // orders the threads of the block at arrive() already.
  __device__ void arrive() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }
  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  // What lies at `local`, an address in shared memory, in the block `rank` of the cluster.
  __device__ static float2 load2(uint32_t local, int rank) {
    float2 v;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(map(local, rank)) : "memory");
#else
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(local) : "memory");
#endif
    return v;
  }
  __device__ static float4 load4(uint32_t local, int rank) {
    float4 v;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(map(local, rank))
                 : "memory");
#else
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(local)
                 : "memory");
#endif
    return v;
  }

 private:
#if __CUDA_ARCH__ >= 900
  __device__ static uint32_t map(uint32_t local, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(local), "r"(rank));
    return address;
  }
#endif
};

}  // namespace llmk
