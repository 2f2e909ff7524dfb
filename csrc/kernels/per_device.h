// What is found out once for each device of a process, by whichever thread needs it first.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <mutex>

namespace llmk::kernels {

constexpr int kMaxDevices = 128;  // of a process; more than PyTorch can be built for

template <typename T>
class PerDevice {
 public:
  // Points `value` to what `find(device, value)` has found for the current device. Everybody else reads it without a
  // lock. Where `find` fails nothing is kept, and the next call tries again.
  template <typename Find>
  cudaError_t get(const T*& value, const Find& find) {
    int device = 0;
    if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
    if (device < 0 || device >= kMaxDevices) return cudaErrorInvalidDevice;
    if (!known_[device].load(std::memory_order_acquire)) {
      const std::lock_guard lock(mutex_);
      if (!known_[device].load(std::memory_order_relaxed)) {  // another thread may have been here meanwhile
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
