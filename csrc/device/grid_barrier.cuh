// A barrier of all blocks of a grid, in two halves. Only for a cooperative launch, whose blocks all run at once.
#pragma once
#include <cstdint>

#include "device/tma.cuh"

namespace llmk {

#if __CUDA_ARCH__ >= 900

// Of the first `threads` threads of each block, which meet at named barrier 1. `counter` is zero before the launch.
struct GridBarrier {
  unsigned* counter;
  int threads;
  unsigned expected = 0;

  // What this block wrote before is seen by every block behind wait().
  __device__ void arrive() {
    named_barrier(1, threads);
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    expected += gridDim.x;
  }
  __device__ void wait() const {
    if (threadIdx.x == 0) {
      unsigned seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
      } while (seen < expected);
    }
    named_barrier(1, threads);
  }
};

#endif

}  // namespace llmk
