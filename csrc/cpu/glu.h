// Gated activations on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/glu.h"

namespace llmk::cpu {

// Elements [begin, end) of y, counted row * cols + col, so that a single row is split over threads as well.
void glu(const GluParams& params, Activation activation, Dtype dtype, int64_t begin, int64_t end);

// Elements [begin, end), counted likewise, of grad_gate and grad_up.
void glu_backward(const GluBackwardParams& params, Activation activation, Dtype dtype, int64_t begin, int64_t end);

}  // namespace llmk::cpu
