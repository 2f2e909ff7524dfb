// RMSNorm and LayerNorm on the CPU. Every function computes a part, so that the caller can divide the work among
// threads; the result does not depend on how.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/norm.h"

namespace llmk::cpu {

// Rows [row_begin, row_end) of y and, with a residual, of sum; or of the target.
void rms_norm(const NormParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);
void layer_norm(const NormParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);

// The rows are cut into params.partial_rows chunks, chunk i being rows [rows * i / partial_rows,
// rows * (i + 1) / partial_rows). For chunks [partial_begin, partial_end): grad_x of their rows and, when grad_weight
// and grad_bias are wanted, their sums over rows into row i of each one's partials. partial_rows >= 1 in any case.
void rms_norm_backward(const NormBackwardParams& params, Dtype dtype, int64_t partial_begin, int64_t partial_end);
void layer_norm_backward(const NormBackwardParams& params, Dtype dtype, int64_t partial_begin, int64_t partial_end);

// Columns [col_begin, col_end) of grad_weight and grad_bias: the sum of all partials, to be called when these are
// complete.
void norm_grad_weight_and_bias(const NormBackwardParams& params, Dtype dtype, int64_t col_begin, int64_t col_end);

}  // namespace llmk::cpu
