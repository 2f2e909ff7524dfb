#include "launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

namespace llmk::kernels {
namespace {

__global__ void empty_kernel() {}

// The architecture that this library's code for the current device was compiled for: __CUDA_ARCH__ / 10, as the kernels
// saw it. Where there is only PTX of an older one, it runs, but without what `#if __CUDA_ARCH__ >= 900` encloses, and
// no launcher may count on that. ptxVersion is this virtual architecture, of machine code as well; binaryVersion is
// that of the machine code, which the driver makes of any PTX for the device's own architecture.
cudaError_t code_architecture(int& result) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, empty_kernel);
  if (status != cudaSuccess) (void)cudaGetLastError();  // or the next launch would be blamed for it
  result = attributes.ptxVersion;
  // The kernel does exist.
  return status == cudaErrorInvalidDeviceFunction ? cudaErrorNoKernelImageForDevice : status;
}

// Fills in DeviceInfo::clusters.
void count_clusters(DeviceInfo& info) {
  info.clusters[1] = info.sm_count;
  if (info.compute_capability < 90) return;
  const int shared_bytes = static_cast<int>(info.shared_bytes);  // so that two blocks do not fit an SM
  cudaError_t status = cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  // More than 8 blocks need that many SMs side by side, which not every device, or part of one, has.
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  for (const unsigned size : {2, 4, 8, 16}) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {size, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(size);
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = info.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (status == cudaSuccess) status = cudaOccupancyMaxActiveClusters(&info.clusters[size], empty_kernel, &config);
    if (status != cudaSuccess) info.clusters[size] = 0;
  }
  if (status != cudaSuccess) (void)cudaGetLastError();
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
    int code = 0;
    if (const cudaError_t status = code_architecture(code); status != cudaSuccess) return status;
    DeviceInfo& found = cache[device];
    found = {sm_count,
             std::min(major * 10 + minor, code),
             static_cast<size_t>(shared_bytes),
             static_cast<size_t>(l2_bytes),
             {}};
    count_clusters(found);
    known[device].store(true, std::memory_order_release);
  }
  info = cache[device];
  return cudaSuccess;
}

}  // namespace llmk::kernels
