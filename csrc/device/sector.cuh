// The sectors of 32 bytes by which L2 sends memory to an SM.
#pragma once
#include <cstdint>

#include "device/ptx.cuh"

namespace llmk {

constexpr int kSectorBytes = 32;

// How many vectors of 16 bytes, 0 or 1, a copy of memory from `global` on is to leave free in shared memory: so many
// that its sectors come to lie in sectors there, too. cp.async that bypasses L1 gets them twice, else, once for each
// half. By ncu, an H200, sectors sent to the SMs by the backward of RMSNorm, 8192 x 1000 bfloat16: 1.55 million, of
// which half of the rows begin in the middle of a sector, and 1.07 million with this.
__device__ inline int vectors_to_sector(const void* shared, const void* global) {
  const auto difference = shared_address(shared) ^ static_cast<uint32_t>(reinterpret_cast<uintptr_t>(global));
  return static_cast<int>(difference % kSectorBytes / 16);
}

}  // namespace llmk
