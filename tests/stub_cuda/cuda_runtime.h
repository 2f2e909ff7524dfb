// The part of the CUDA runtime that csrc/kernels/launch.* needs, for its tests on machines without a GPU: four devices
// with slow answers, and launches that fail where a device would refuse them.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#define __global__

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidClusterSize = 912,
  cudaErrorUnknown = 999,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 13,
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int ptxVersion, maxThreadsPerBlock;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace stub {

constexpr int kDevices = 4;
constexpr size_t kShared = 232448;          // of a block at most
constexpr size_t kPlainShared = 48 * 1024;  // without an attribute

inline thread_local int device = 0;
inline std::atomic<int> failures{0};  // how many of the next queries of a device fail
inline std::atomic<int> calls{0};     // of the runtime, except cudaGetDevice and launches
inline std::atomic<int> lowered{0};   // attributes that were set to less than before
inline std::mutex mutex;
struct Allowed {
  int shared = 0, clusters = 0;
};
inline std::map<std::pair<const void*, int>, Allowed> allowed;  // by kernel and device
inline std::map<const void*, size_t> static_bytes;              // by kernel; 0 where there is none
inline size_t static_bytes_of(const void* kernel) {
  const auto found = static_bytes.find(kernel);
  return found == static_bytes.end() ? 0 : found->second;
}

inline int sm_count(int device) { return 100 + device; }
inline int clusters(int device, unsigned size) { return sm_count(device) / static_cast<int>(size) - 1; }
inline void answer() {
  ++calls;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

}  // namespace stub

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = stub::device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  stub::answer();
  if (stub::failures > 0 && stub::failures-- > 0) return cudaErrorUnknown;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = stub::sm_count(device); break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(stub::kShared); break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
  }
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  stub::answer();
  *attributes = {stub::static_bytes_of(kernel), 90, 1024};
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  stub::answer();
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize &&
      value + stub::static_bytes_of(kernel) > stub::kShared) {
    return cudaErrorInvalidValue;
  }
  const std::lock_guard lock(stub::mutex);
  stub::Allowed& allowed = stub::allowed[{kernel, stub::device}];
  int& now = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ? allowed.shared : allowed.clusters;
  stub::lowered += value < now;
  now = value;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* kernel) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

// Whether a device would accept the launch.
inline cudaError_t check_launch(const void* kernel, const cudaLaunchConfig_t& config) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config.attrs[i].val.clusterDim.x;
  }
  const std::lock_guard lock(stub::mutex);
  const stub::Allowed& allowed = stub::allowed[{kernel, stub::device}];
  const bool needs_asking = config.dynamicSmemBytes + stub::static_bytes_of(kernel) > stub::kPlainShared;
  if (needs_asking && static_cast<int>(config.dynamicSmemBytes) > allowed.shared) return cudaErrorInvalidValue;
  if (cluster > 8 && !allowed.clusters) return cudaErrorInvalidClusterSize;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, Kernel* kernel, const cudaLaunchConfig_t* config) {
  stub::answer();
  const cudaError_t status = check_launch(reinterpret_cast<const void*>(kernel), *config);
  if (status == cudaSuccess) *count = stub::clusters(stub::device, config->attrs[0].val.clusterDim.x);
  return status;
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return check_launch(kernel, *config);
}
