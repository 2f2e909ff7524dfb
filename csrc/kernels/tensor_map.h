// Tensor maps: descriptors of tensors in memory for TMA copies (sm_90 and later).
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "params/weight.h"

namespace llmk::kernels {

// A tensor of 16-bit elements, up to five-dimensional, contiguous along dimension 0, and the box that one copy moves.
// In shared memory a box is dense, dimension 0 first, in 128-byte swizzle: 16-byte vector v of row r lies at
// v ^ (r % 8), so that a column of vectors covers every bank. Elements beyond the tensor are zero. L2 promotion is
// 128 bytes:
//
//   value     | case                            | result
//   ----------|---------------------------------|---------
//   128 bytes | a long stream of boxes, an H200 | 4.5 TB/s
//   256 bytes | the same                        | 4.1 TB/s
struct TensorBox {
  int dims;
  int64_t sizes[5];    // elements
  int64_t strides[5];  // elements; [0] is 1
  int box[5];
};

// Whether this driver has tensor maps.
bool has_tensor_maps();

cudaError_t make_tensor_map(CUtensorMap& map, const void* data, const TensorBox& tensor, ElementType type);

}  // namespace llmk::kernels
