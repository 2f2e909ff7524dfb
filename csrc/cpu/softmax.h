// Softmax on the CPU. Every function computes rows [row_begin, row_end), so that the caller can divide the work among
// threads; the result does not depend on how.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/softmax.h"

namespace llmk::cpu {

void softmax(const SoftmaxParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);
void softmax_backward(const SoftmaxBackwardParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);

}  // namespace llmk::cpu
