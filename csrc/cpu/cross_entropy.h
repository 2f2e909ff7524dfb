// Cross-entropy on the CPU. Every function computes rows [row_begin, row_end), so that the caller can divide the work
// among threads; the result does not depend on how. The two that sum over rows are called once, by one thread.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/cross_entropy.h"

namespace llmk::cpu {

// sums[0]: the sum of the weights of all targets, or 1 if not `mean`; sums[1]: that of all classes.
void cross_entropy_sums(const CrossEntropyParams& params, bool mean, Dtype dtype, void* sums);
// losses, lse and, where it is wanted, grad.
void cross_entropy(const CrossEntropyParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);
// loss = the sum of the losses / params.sums[0].
void cross_entropy_reduce(const CrossEntropyParams& params, Dtype dtype, void* loss);
// grad from logits, lse and grad_loss.
void cross_entropy_backward(const CrossEntropyParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);
void cross_entropy_scale(const CrossEntropyScaleParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);

}  // namespace llmk::cpu
