// RMSNorm and rotary embedding on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/rms_norm_rope.h"

namespace llmk::cpu {

// All heads of q and k at the flat indices batch * tokens + token in [begin, end). With position_ids, every position
// must be in [0, table_rows): check with first_bad_position() of cpu/rope.h before.
void rms_norm_rope(const RmsNormRopeParams& params, Dtype dtype, int64_t begin, int64_t end);

// The tokens are cut into params.partial_rows chunks, chunk i being tokens [tokens * i / partial_rows, tokens * (i + 1)
// / partial_rows) of all batch * tokens. For chunks [begin, end): the gradients of x of their tokens and, where the
// gradient of a weight is wanted, its sum over them into row i of the partials.
void rms_norm_rope_backward(const RmsNormRopeParams& params, Dtype dtype, int64_t begin, int64_t end);

// Columns [begin, end) of the gradient of a weight: the sum of all partials.
void rms_norm_rope_grad_weight(const HeadNorm& norm, int64_t partial_rows, Dtype dtype, int64_t begin, int64_t end);

}  // namespace llmk::cpu
