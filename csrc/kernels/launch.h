// Launching a kernel on the current device.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "device_info.h"

namespace llmk::kernels {

// The facts of the current device. The runtime is queried once per device; later calls take no lock. A failure is not
// cached.
cudaError_t device_info(DeviceInfo& info);

// The compute capability of the current device, 90 for 9.0, also where DeviceInfo's is lower, which is that of the
// code. Queried as the facts are.
cudaError_t device_capability(int& capability);

// Sets the attributes of `kernel` on the current device to the maximum: all dynamic shared memory of a block, and
// clusters of more than 8 blocks. Done once per kernel and device and never lowered, so that a launch cannot undo what
// a launch in another thread needs.
cudaError_t set_kernel_attributes(const void* kernel);

struct LaunchShape {
  int64_t blocks;  // at most 2^31 - 1: blocks are large enough for any tensor that fits a GPU
  dim3 threads;
  size_t shared_bytes = 0;
  // Whether the kernel may start before the previous one has ended. Not for a persistent grid: blocks that start early
  // pile up on the SMs that have room at that time, and stay there.
  bool may_overlap = true;
  int cluster = 1;  // blocks that run at the same time and share memory; more than one from sm_90 on
};

// Launches `kernel`, with programmatic dependent launch where the device has it: the kernel must call pdl_wait() before
// it touches global memory, except for what may be read early (see ptx.cuh). While this thread records a
// graph, the launch becomes a part of it (recorder.h).
cudaError_t launch_kernel(const void* kernel, const LaunchShape& shape, cudaStream_t stream, void** arguments);

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                   const std::decay_t<Params>&... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))..., nullptr};
  return launch_kernel(reinterpret_cast<const void*>(kernel), shape, stream, pointers);
}

// Whether a kernel that streams `bytes`, in and out, should load its inputs with the L2 policy evict_last. The inputs
// are not read again. But the cache then evicts the outputs early and in order, so that the memory changes less often
// between reading and writing. Not where everything fits into the cache, since the next kernel will read it there.
// Idea: code that torch.compile generates.
//
//   value      | case                                  | result
//   -----------|---------------------------------------|------------------
//   evict_last | more bytes than the L2 cache, an H200 | 2 to 4 % faster
inline bool keeps_inputs(const DeviceInfo& device, int64_t bytes) {
  return bytes > static_cast<int64_t>(device.l2_bytes);
}

// What a kernel reads or writes row by row; null: nothing.
struct RowOperand {
  const void* pointer;
  int64_t stride = 0;  // elements between rows; 0: rows are contiguous, or there is one for all of them
};

struct RowOperands {
  int64_t rows, cols;
  RowOperand operands[8];  // null after the last
};

// Whether rows of elements T can be moved by 16-byte accesses in all operands.
template <typename T>
bool all_rows_aligned(const RowOperands& of) {
  return of.cols * static_cast<int64_t>(sizeof(T)) % 16 == 0 &&
         std::all_of(std::begin(of.operands), std::end(of.operands), [&](const RowOperand& operand) {
           return !operand.pointer || rows_aligned(operand.pointer, operand.stride, of.rows, sizeof(T));
         });
}

}  // namespace llmk::kernels
