// Whether tensors share memory: an op must not write where it reads, or twice.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace llmk {

// Both are exact for the layouts that views and slices make; where strides interlock in an unusual way, so that the
// search would take long, the answer is yes.

// Whether two elements of the tensor lie at one address.
bool overlaps_itself(const torch::stable::Tensor& tensor);

// From the first byte of a tensor to behind its last.
int64_t extent_bytes(const torch::stable::Tensor& tensor);

// Whether a byte belongs to both tensors, which have elements.
bool overlap(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

}  // namespace llmk
