// How a launcher starts a kernel, and what it may ask of the device.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace llmk::kernels {

struct DeviceInfo {
  int sm_count;
  int compute_capability;  // 90 for sm_90; less than the device's where the code is for less, see launch.cu
  size_t shared_bytes;     // of one block at most
  size_t l2_bytes;
  // clusters[n]: how many clusters of n blocks, each block on an SM of its own, run at the same time, for n = 1, 2, 4,
  // 8, 16; fewer than sm_count / n where the groups of SMs that a cluster may span have other sizes, none if unknown.
  int clusters[17];
};

// Of the current device. Asked of the runtime once per device, from then on read without a lock; a failure is not kept.
cudaError_t device_info(DeviceInfo& info);

// Lets `kernel` have as much dynamic shared memory on the current device as the device has for it, and clusters of more
// than 8 blocks. Set once for each kernel and device, and never to less: two launches cannot undercut each other.
cudaError_t allow_most(const void* kernel);

struct LaunchShape {
  int64_t blocks;  // blocks are made large enough that the memory of a GPU ends before their number does
  dim3 threads;
  size_t shared_bytes = 0;
  // Whether the kernel may begin while its predecessor ends. Not for a grid that is to stay on the device as a whole:
  // blocks that come early crowd onto the SMs which happen to have room, and stay there.
  bool may_overlap = true;
  int cluster = 1;  // blocks that run at the same time and share memory; more than one from sm_90 on
};

// Starts `kernel` with programmatic dependent launch where the device has it: the kernel must call pdl_wait() before
// it touches global memory, but for what the caller knows to be complete (see ptx.cuh).
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream, Args&&... args) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  if (shape.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  cudaError_t status = cudaSuccess;
  // Static shared memory counts towards the 48 KiB that need no asking; clusters of 8 every device has that has any.
  if (shape.shared_bytes > 32 * 1024 || shape.cluster > 8) status = allow_most(reinterpret_cast<const void*>(kernel));
  if (status == cudaSuccess) {
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (shape.may_overlap && device.compute_capability >= 90) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config.blockDim = shape.threads;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    status = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  }
  if (status != cudaSuccess) (void)cudaGetLastError();  // or the next launch would be blamed for it
  return status;
}

// Whether a kernel that streams `bytes`, in and out, should ask the L2 cache to keep what it reads. Nobody reads it
// again; but then the cache gives up what is written instead, early and in order, and the memory turns round between
// reading and writing less often: 2-4 % on an H200 (an idea seen in the code that torch.compile generates). What fits
// into the cache is left alone there, since the next kernel will read it.
inline bool keeps_inputs(const DeviceInfo& device, int64_t bytes) {
  return bytes > static_cast<int64_t>(device.l2_bytes);
}

inline bool is_aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether rows that start at `pointer` and lie `stride` elements apart can all be moved by 16-byte accesses.
inline bool rows_aligned(const void* pointer, int64_t stride, int64_t rows, size_t element_bytes) {
  return is_aligned(pointer, 16) && (rows <= 1 || stride * element_bytes % 16 == 0);
}

}  // namespace llmk::kernels
