// Whether tensors share memory: an op must not write where it reads, or twice.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace llmk {

// Both are exact for views and slices. For unusual strides, for which the search would take long, they return true.

// Whether two elements of the tensor share memory.
bool overlaps_itself(const torch::stable::Tensor& tensor);

// The bytes from the first to the last element.
int64_t extent_bytes(const torch::stable::Tensor& tensor);

// Whether two tensors, neither of them empty, share memory.
bool overlap(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

}  // namespace llmk
