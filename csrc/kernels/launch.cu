#include "launch.h"

#include <atomic>

namespace llmk::kernels {

cudaError_t device_info(DeviceInfo& info) {
  constexpr int kMaxDevices = 64;
  static std::atomic<uint64_t> cache[kMaxDevices];  // both numbers in one word, 0 while unknown
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  uint64_t packed = cache[device].load(std::memory_order_relaxed);
  if (packed == 0) {
    int sm_count = 0, major = 0, minor = 0;
    for (const auto& [value, attribute] : {std::pair{&sm_count, cudaDevAttrMultiProcessorCount},
                                           std::pair{&major, cudaDevAttrComputeCapabilityMajor},
                                           std::pair{&minor, cudaDevAttrComputeCapabilityMinor}}) {
      const cudaError_t status = cudaDeviceGetAttribute(value, attribute, device);
      if (status != cudaSuccess) return status;
    }
    packed = static_cast<uint64_t>(sm_count) << 32 | static_cast<uint64_t>(major * 10 + minor);
    cache[device].store(packed, std::memory_order_relaxed);
  }
  info = {static_cast<int>(packed >> 32), static_cast<int>(packed & 0xffffffffu)};
  return cudaSuccess;
}

}  // namespace llmk::kernels
