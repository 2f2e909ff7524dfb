#include "launch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <initializer_list>
#include <utility>

#include "per_device.h"
#include "recorder.h"

namespace llmk::kernels {
namespace {

__global__ void empty_kernel() {}
const void* const kEmptyKernel = reinterpret_cast<const void*>(empty_kernel);

// Has static shared memory where it was compiled for sm_90a.
__global__ void wgmma_kernel(int* result) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ volatile int memory[1];
  memory[0] = 1;
  *result = memory[0];
#endif
}

cudaError_t find_wgmma(bool& result) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, wgmma_kernel);
  if (status != cudaSuccess) (void)cudaGetLastError();  // clears it, or the next launch would report it
  result = attributes.sharedSizeBytes > 0;
  return status;
}

// The architecture that this library's code for the current device was compiled for: __CUDA_ARCH__ / 10 in the kernels.
// Where the library has only PTX of an older architecture, that runs, but without the code in
// `#if __CUDA_ARCH__ >= 900`, so no launcher may count on it. ptxVersion is this architecture, of machine code as well.
// binaryVersion is not: the driver compiles any PTX for the device's own architecture.
cudaError_t code_architecture(int& result) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, empty_kernel);
  if (status != cudaSuccess) (void)cudaGetLastError();  // clears it, or the next launch would report it
  result = attributes.ptxVersion;
  // The function exists, but without code for this device.
  return status == cudaErrorInvalidDeviceFunction ? cudaErrorNoKernelImageForDevice : status;
}

// See set_kernel_attributes().
cudaError_t set_attributes(const DeviceInfo& device, const void* kernel) {
  cudaFuncAttributes attributes{};
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status == cudaSuccess) {
    const int bytes = static_cast<int>(device.shared_bytes - attributes.sharedSizeBytes);
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  if (status == cudaSuccess && device.compute_capability >= 90) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (status != cudaSuccess) (void)cudaGetLastError();  // clears it, or the next launch would report it
  return status;
}

// Fills in DeviceInfo::clusters; zeros where the device gives no answer.
void count_clusters(DeviceInfo& info) {
  info.clusters[1] = info.sm_count;
  if (info.compute_capability < 90 || set_attributes(info, kEmptyKernel) != cudaSuccess) return;
  for (const unsigned size : {2, 4, 8, 16}) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {size, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(size);
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = info.shared_bytes;  // so that an SM takes one block
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&info.clusters[size], empty_kernel, &config) != cudaSuccess) {
      (void)cudaGetLastError();
      info.clusters[size] = 0;
    }
  }
}

using Attributes = std::initializer_list<std::pair<int*, cudaDeviceAttr>>;

cudaError_t query(int device, Attributes attributes) {
  for (const auto& [value, attribute] : attributes) {
    const cudaError_t status = cudaDeviceGetAttribute(value, attribute, device);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t query_capability(int device, int& capability) {
  int major = 0, minor = 0;
  const cudaError_t status =
      query(device, {{&major, cudaDevAttrComputeCapabilityMajor}, {&minor, cudaDevAttrComputeCapabilityMinor}});
  capability = 10 * major + minor;
  return status;
}

cudaError_t query_info(int device, DeviceInfo& info) {
  int sm_count = 0, capability = 0, shared_bytes = 0, l2_bytes = 0;
  if (const cudaError_t status = query_capability(device, capability); status != cudaSuccess) return status;
  const cudaError_t status = query(device, {{&sm_count, cudaDevAttrMultiProcessorCount},
                                            {&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                                            {&l2_bytes, cudaDevAttrL2CacheSize}});
  if (status != cudaSuccess) return status;
  int code = 0;
  if (const cudaError_t status = code_architecture(code); status != cudaSuccess) return status;
  const int compute_capability = std::min(capability, code);
  bool has_wgmma = false;
  if (compute_capability == 90) {
    if (const cudaError_t status = find_wgmma(has_wgmma); status != cudaSuccess) return status;
  }
  info = {sm_count, compute_capability, has_wgmma, static_cast<size_t>(shared_bytes), static_cast<size_t>(l2_bytes),
          {}};
  count_clusters(info);
  return cudaSuccess;
}

cudaError_t cached_info(const DeviceInfo*& info) {
  static PerDevice<DeviceInfo> infos;
  return infos.get(info, query_info);
}

// The kernels whose attributes are set on a device: a hash table that only grows, so that it is read without a lock. If
// it is full, the attributes of further kernels are set at every launch: slower, and as correct.
class ConfiguredKernels {
 public:
  bool contains(const void* kernel) const {
    for (size_t i = 0, at = first(kernel); i < kSlots; ++i, at = (at + 1) % kSlots) {
      const void* const found = slots_[at].load(std::memory_order_acquire);
      if (found == kernel) return true;
      if (found == nullptr) return false;
    }
    return false;
  }
  void add(const void* kernel) {
    for (size_t i = 0, at = first(kernel); i < kSlots; ++i, at = (at + 1) % kSlots) {
      const void* found = nullptr;
      if (slots_[at].compare_exchange_strong(found, kernel, std::memory_order_acq_rel) || found == kernel) return;
    }
  }

 private:
  static constexpr size_t kSlots = 1024;  // there are some 300 kernels
  static size_t first(const void* kernel) { return reinterpret_cast<uintptr_t>(kernel) / 16 * 0x9e3779b1u % kSlots; }
  std::array<std::atomic<const void*>, kSlots> slots_{};
};

cudaError_t launch_now(const void* kernel, const LaunchShape& shape, bool overlaps, cudaStream_t stream,
                       void** arguments) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (overlaps) {
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
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace

cudaError_t device_info(DeviceInfo& info) {
  const DeviceInfo* found = nullptr;
  if (const cudaError_t status = cached_info(found); status != cudaSuccess) return status;
  info = *found;
  return cudaSuccess;
}

cudaError_t device_capability(int& capability) {
  static PerDevice<int> capabilities;
  const int* found = nullptr;
  const cudaError_t status = capabilities.get(found, query_capability);
  if (status == cudaSuccess) capability = *found;
  return status;
}

cudaError_t set_kernel_attributes(const void* kernel) {
  static std::array<ConfiguredKernels, kMaxDevices> configured;
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const DeviceInfo* info = nullptr;
  if (const cudaError_t status = cached_info(info); status != cudaSuccess)
    return status;  // has checked that `device` is in range
  if (configured[device].contains(kernel)) return cudaSuccess;
  const cudaError_t status = set_attributes(*info, kernel);
  if (status == cudaSuccess) configured[device].add(kernel);
  return status;
}

cudaError_t launch_kernel(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments) {
  const DeviceInfo* device = nullptr;
  cudaError_t status = cached_info(device);
  if (status == cudaSuccess && shape.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Up to 48 KiB, static shared memory included, and clusters of up to 8 blocks need no attribute.
  if (status == cudaSuccess && (shape.shared_bytes > 32 * 1024 || shape.cluster > 8)) {
    status = set_kernel_attributes(kernel);
  }
  if (status == cudaSuccess) {
    const bool overlaps = shape.may_overlap && device->compute_capability >= 90;
    status = current_recorder ? current_recorder->add_launch(kernel, shape, overlaps, arguments)
                              : launch_now(kernel, shape, overlaps, stream, arguments);
  }
  if (status != cudaSuccess) (void)cudaGetLastError();  // clears it, or the next launch would report it
  return status;
}

}  // namespace llmk::kernels
