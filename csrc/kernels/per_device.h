// A value for each device, computed once, by the first thread that needs it.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <mutex>

namespace llmk::kernels {

constexpr int kMaxDevices = 128;  // of a process; PyTorch's own limit is lower

template <typename T>
class PerDevice {
 public:
  // Points `value` to the current device's, which `find(device, value)` computes. Later calls take no lock. If `find`
  // fails, nothing is stored, and the next call tries again.
  template <typename Find>
  cudaError_t get(const T*& value, const Find& find) {
    int device = 0;
    if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
    if (device < 0 || device >= kMaxDevices) return cudaErrorInvalidDevice;
    if (!known_[device].load(std::memory_order_acquire)) {
      const std::lock_guard lock(mutex_);
      if (!known_[device].load(std::memory_order_relaxed)) {  // else another thread has stored it meanwhile
        T found{};
        if (const cudaError_t status = find(device, found); status != cudaSuccess) return status;
        values_[device] = found;
        known_[device].store(true, std::memory_order_release);
      }
    }
    value = &values_[device];
    return cudaSuccess;
  }

 private:
  std::array<T, kMaxDevices> values_{};
  std::array<std::atomic<bool>, kMaxDevices> known_{};
  std::mutex mutex_;
};

}  // namespace llmk::kernels
