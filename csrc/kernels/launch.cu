#include "launch.h"

#include <array>
#include <atomic>
#include <mutex>

namespace llmk::kernels {

namespace {

__global__ void nothing() {}

// Clusters of more than 8 blocks need that many SMs side by side, which not every device, or part of one, has.
int count_clusters_of_16(int shared_bytes) {
  int clusters = 0;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {16, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(16);
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = shared_bytes;  // all of an SM
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaError_t status = cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status == cudaSuccess) status = cudaFuncSetAttribute(nothing, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status == cudaSuccess) status = cudaOccupancyMaxActiveClusters(&clusters, nothing, &config);
  if (status != cudaSuccess) (void)cudaGetLastError();
  return status == cudaSuccess ? clusters : 0;
}

}  // namespace

cudaError_t device_info(DeviceInfo& info) {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceInfo, kMaxDevices> cache;
  static std::array<std::atomic<bool>, kMaxDevices> known;
  static std::mutex mutex;
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (!known[device].load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex);
    int sm_count = 0, major = 0, minor = 0, shared_bytes = 0, l2_bytes = 0;
    for (const auto& [value, attribute] :
         {std::pair{&sm_count, cudaDevAttrMultiProcessorCount}, std::pair{&major, cudaDevAttrComputeCapabilityMajor},
          std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
          std::pair{&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
          std::pair{&l2_bytes, cudaDevAttrL2CacheSize}}) {
      const cudaError_t status = cudaDeviceGetAttribute(value, attribute, device);
      if (status != cudaSuccess) return status;
    }
    cache[device] = {sm_count, major * 10 + minor, static_cast<size_t>(shared_bytes), static_cast<size_t>(l2_bytes),
                     major >= 9 ? count_clusters_of_16(shared_bytes) : 0};
    known[device].store(true, std::memory_order_release);
  }
  info = cache[device];
  return cudaSuccess;
}

}  // namespace llmk::kernels
