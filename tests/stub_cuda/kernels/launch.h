// Launches on the CPU (gpu.h), of a GPU with few SMs.
#pragma once
#include "gpu.h"

#define launch launch_on_a_gpu
#include "../../../csrc/kernels/launch.h"
#undef launch

namespace llmk::kernels {

// Dynamic shared memory of kernels in an unnamed namespace, by the name that they have for it.
namespace {

thread_local int4 cache[stub::kShared / sizeof(int4)];

}  // namespace

// With clusters, or one before Hopper, which has less shared memory.
inline bool is_hopper = true;

inline cudaError_t device_info(DeviceInfo& info) {
  info = {};
  info.sm_count = 6, info.compute_capability = is_hopper ? 90 : 86, info.l2_bytes = 50 << 20;
  info.shared_bytes = is_hopper ? stub::kShared : 101376;
  for (const int n : {1, 2, 4, 8, 16}) info.clusters[n] = n == 1 || is_hopper ? info.sm_count / n : 0;
  return cudaSuccess;
}

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t,
                   const std::decay_t<Params>&... arguments) {
  if (shape.cluster > 1) std::printf("a cluster of %d blocks\n", shape.cluster), gpu::fail();
  blockDim = {shape.threads.x, shape.threads.y, shape.threads.z};
  gridDim = {static_cast<unsigned>(shape.blocks), 1, 1};
  // Blocks may come in any order: here every other one first.
  for (const unsigned first : {0u, 1u}) {
    for (blockIdx.x = first; blockIdx.x < gridDim.x; blockIdx.x += 2) {
      gpu::run_block(blockDim, [&] { kernel(arguments...); });
    }
  }
  return cudaSuccess;
}

}  // namespace llmk::kernels
