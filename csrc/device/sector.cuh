// The sectors of 32 bytes by which L2 sends memory to an SM.
#pragma once
#include <cstdint>

#include "device/ptx.cuh"

namespace llmk {

constexpr int kSectorBytes = 32;

// How many vectors of 16 bytes (0 or 1) a copy of what lies at `global` is to leave free at `shared`, so that each
// sector comes to lie in 32 aligned bytes there, too. Else cp.async that bypasses L1 fetches it twice, once for each
// half. By ncu on an H200, the backward of RMSNorm over 8192 x 1000 bfloat16, where half of the rows begin in the
// middle of a sector, is sent 1.55 million sectors without this, and 1.07 million with it.
__device__ inline int vectors_to_sector(const void* shared, const void* global) {
  const auto difference = shared_address(shared) ^ static_cast<uint32_t>(reinterpret_cast<uintptr_t>(global));
  return static_cast<int>(difference % kSectorBytes / 16);
}

}  // namespace llmk
