// The facts of a device that routes and launch plans need, and the alignment of operands. Plain host code.
#pragma once
#include <cstddef>
#include <cstdint>

namespace llmk::kernels {

struct DeviceInfo {
  int sm_count;
  int compute_capability;  // 90 for sm_90; that of the compiled code if it is lower than the device's, see launch.cu
  bool has_wgmma;          // whether this library has code for sm_90a, and not for sm_90 alone
  size_t shared_bytes;     // shared memory of one block, at most
  size_t l2_bytes;
  // clusters[n], n = 1, 2, 4, 8, 16: how many clusters of n blocks run at the same time, with each block on its own SM.
  // A cluster must fit a GPC, so there may be fewer than sm_count / n. 0: unknown.
  int clusters[17];
};

inline bool is_aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether rows that start at `pointer` and lie `stride` elements apart can all be moved by 16-byte accesses.
inline bool rows_aligned(const void* pointer, int64_t stride, int64_t rows, size_t element_bytes) {
  return is_aligned(pointer, 16) && (rows <= 1 || stride * element_bytes % 16 == 0);
}

}  // namespace llmk::kernels
