// The epilogue of a linear: what becomes of its sums x weight^T [m, n]. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

#include "params/glu.h"

namespace llmk {

constexpr int kHandoffTokens = 128;  // that a norm hand-off has room for

struct Epilogue {
  const void* bias;       // [n], or null; not with `glu`
  void* y;                // [m, n], or [m, n / 2] with `glu`
  int64_t y_stride;       // between rows
  bool glu;               // y = act(gate) up
  bool add_residual;      // y is the residual: alpha times the result is added to it
  Activation activation;  // with `glu`
  float alpha;            // with `add_residual`

  // The norm hand-off (params/linear.h) of a linear that adds to the residual:
  //   `scaled` [m, n], contiguous: the new residual times (next_norm_weight [n] + next_offset); or null
  //   `squares` [parts + 1, kHandoffTokens]: for each token linear_parts() partial sums of squares of the new residual;
  //   then, as its first element, the scale that next_norm_weight was divided by (kernels/linear/norm_weight.cuh)
  const void* next_norm_weight;
  float next_offset;
  void* scaled;
  float* squares;
};

}  // namespace llmk
