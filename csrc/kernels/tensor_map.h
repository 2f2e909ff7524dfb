// Tensor maps: what the copy engine (TMA, sm_90 and later) is told about a tensor in memory.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "dtype.h"

namespace llmk::kernels {

// A tensor of 16-bit elements, up to five-dimensional, contiguous along dimension 0, and the box that one copy brings.
// In shared memory boxes lie densely, dimension 0 first; its 64 elements are 128 bytes, whose 16-byte units are
// swizzled (exclusive-or the row's number modulo 8), so that a column of them meets every bank. What lies beyond the
// tensor comes as zeros. The L2 cache fetches those 128 bytes and no more: if it is told to fetch 256 at a time, as is
// usual, a long stream of boxes gets 4.1 TB/s of an H200 instead of 4.5.
struct TensorBox {
  int dims;
  int64_t sizes[5];    // elements
  int64_t strides[5];  // elements; [0] is 1
  int box[5];
};

// Whether this driver has tensor maps.
bool has_tensor_maps();

cudaError_t make_tensor_map(CUtensorMap& map, const void* data, const TensorBox& tensor, Dtype dtype);

}  // namespace llmk::kernels
