// What csrc/device/tma.cuh does by the TMA unit and mbarriers, in C++, for kernels that run on the CPU (gpu.h).
//
// A copy takes place as early or as late as it may: every other one at once, so that it is seen if others still read
// there, and the rest when their bytes are waited for, so that it is seen if someone does not wait.
#pragma once
#include <map>

#include "device/ptx.cuh"

namespace llmk {

struct Mbarrier {
  int arrivals, arrived = 0, phase = 0;
  int64_t expected = 0, asked_for = 0;  // bytes of this phase
  std::vector<std::function<void()>> copies;

  void complete() {
    if (arrived < arrivals || expected != asked_for) return;
    for (const auto& copy : copies) copy();
    copies.clear(), arrived = 0, expected = asked_for = 0, ++phase;
  }
};
inline std::map<uint32_t, Mbarrier> mbarriers;  // of the block

inline Mbarrier& mbarrier_of(uint32_t address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) std::printf("a barrier that is not initialised\n"), gpu::fail();
  return found->second;
}
inline void barrier_init(uint32_t address, int arrivals) { mbarriers[address] = {.arrivals = arrivals}; }
inline void barrier_init_fence() {}
inline void async_proxy_fence() {}
inline void barrier_arrive(uint32_t address) { ++mbarrier_of(address).arrived; }
inline void barrier_arrive_expecting(uint32_t address, uint32_t bytes) {
  mbarrier_of(address).expected += bytes, barrier_arrive(address);
}
inline void barrier_wait(uint32_t address, uint32_t parity) {
  Mbarrier& barrier = mbarrier_of(address);
  while (true) {
    if (barrier.phase % 2 == static_cast<int>(parity)) barrier.complete();
    if (barrier.phase % 2 != static_cast<int>(parity)) return;
    gpu::give_way();
  }
}
inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t address, uint64_t) {
  void* const to = __cvta_shared_to_generic(shared);
  gpu::Guarded::check(global, bytes);
  if (shared % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) {
    std::printf("a copy of %u bytes is not aligned\n", bytes), gpu::fail();
  }
  Mbarrier& barrier = mbarrier_of(address);
  barrier.asked_for += bytes;
  const auto copy = [=] { std::memcpy(to, global, bytes); };
  static bool is_late = false;
  if (is_late = !is_late; !is_late) return copy();
  std::memset(to, 0xff, bytes);
  barrier.copies.push_back(copy);
}

}  // namespace llmk
