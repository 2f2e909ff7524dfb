// What csrc/device/ptx.cuh does by instructions, in C++, for kernels that run on the CPU (gpu.h).
#pragma once
#include "gpu.h"

namespace llmk {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer));
}

inline void* __cvta_shared_to_generic(uint32_t address) {
  static thread_local char here;
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(&here) & ~uintptr_t{0xffffffff}) | address);
}

inline float reciprocal_approximate(float x) { return 1.f / x; }
inline float exp_approximate(float x) { return std::exp(x); }
inline float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : min(a, b); }
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : max(a, b); }

inline uint64_t l2_policy(bool) { return 0; }
inline uint4 load_16(const void* global, uint64_t) {
  gpu::Guarded::check(global, 16);
  return *static_cast<const uint4*>(global);
}
inline void load_if(bool wanted, const void* global, uint4& value) { value = wanted ? load_16(global, 0) : uint4{}; }
inline void prefetch_l2(const void*) {}

// As soon as they are asked for.
inline void cp_async_16(void* shared, const void* global, int bytes, uint64_t) {
  if (bytes > 0) gpu::Guarded::check(global, bytes);
  std::memset(shared, 0, 16);
  std::memcpy(shared, global, bytes);
}
inline void cp_async_commit() {}
template <int kPending>
void cp_async_wait() {}

inline void named_barrier(int id, int threads) { gpu::wait(gpu::block->barriers[id], threads); }
inline void named_barrier_arrive(int id, int threads) { gpu::arrive(gpu::block->barriers[id], threads); }

inline int atomic_add_acq_rel(int* counter, int value) { return std::exchange(*counter, *counter + value); }
inline int atomic_add_release(int* counter, int value) { return atomic_add_acq_rel(counter, value); }

inline void pdl_wait() {}
inline void pdl_launch_dependents() {}

}  // namespace llmk
