// Activations with biases in front, on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/glu.h"

namespace llmk::cpu {

// Rows [row_begin, row_end) of y.
void bias_act(const BiasActParams& params, Activation activation, Dtype dtype, int64_t row_begin, int64_t row_end);

// The rows are cut into params.partial_rows chunks as in norm.h. For chunks [partial_begin, partial_end): the gradients
// of their rows and, for the biases whose gradients are wanted, sums over rows into row i of each one's partials.
void bias_act_backward(const BiasActBackwardParams& params, Activation activation, Dtype dtype, int64_t partial_begin,
                       int64_t partial_end);

// Columns [col_begin, col_end) of the gradients of the biases, to be called when the partials are complete.
void bias_act_grad_bias(const BiasActBackwardParams& params, Dtype dtype, int64_t col_begin, int64_t col_end);

}  // namespace llmk::cpu
