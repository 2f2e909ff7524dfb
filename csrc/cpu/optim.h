#pragma once
#include <cstdint>

#include "params/optim.h"

namespace llmk::cpu {

// A step of Adam for elements [begin, end) of tensor `number` of the list. The step of the tensor is not counted up.
void adam(const AdamParams& params, int64_t number, int64_t begin, int64_t end);

// The sum of squares of elements [begin, end), or their largest magnitude.
double grad_norm(const GradTensor& tensor, bool infinity, int64_t begin, int64_t end);

// Multiplies elements [begin, end) by the factor.
void scale(const GradTensor& tensor, double factor, int64_t begin, int64_t end);

}  // namespace llmk::cpu
