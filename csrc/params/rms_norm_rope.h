// Parameters of RMSNorm and rotary embedding in one kernel, on either device. Strides count elements; head dimensions
// are contiguous.
#pragma once
#include <cstdint>

#include "params/norm.h"
#include "params/rope.h"

namespace llmk {

// Of q or of k, beside its RopeTensor. A row is what one norm is taken of: a head of a token, or all of its heads.
struct HeadNorm {
  const void* weight;  // [cols], or null
  int64_t cols;        // of a row: head_dim, or heads * head_dim

  // Of the backward pass, where RopeTensor::in is the gradient of the result and RopeTensor::out the gradient of x.
  const void* x;  // [batch, tokens, heads, head_dim] by the strides below: what was normalized
  int64_t x_batch, x_token, x_head;
  void* grad_weight;  // [cols], or null when it is not wanted
  void* partials;     // workspace [partial_rows, cols] of the accumulation dtype when it is
};

struct RmsNormRopeParams {
  RopeParams rope;  // `transposed` in the backward pass
  HeadNorm q, k;
  RmsNormOptions norm;
  bool row_wise;         // a row is all heads of a token
  bool float_angles;     // cos and sin are float32 although q and k are not: products and sums are rounded but once
  int64_t partial_rows;  // how many partial sums over rows are made; fixes the order of the summation
};

}  // namespace llmk
