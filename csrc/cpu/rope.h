// Rotary position embedding on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/rope.h"

namespace llmk::cpu {

// All heads of q and k at the flat indices batch * tokens + token in [begin, end). With position_ids, every position
// must be in [0, table_rows): check with first_bad_position() before.
void rope(const RopeParams& params, Dtype dtype, int64_t begin, int64_t end);

// The flat index batch * tokens + token of the first position outside [0, table_rows), or -1 when there is none.
int64_t first_bad_position(const RopeParams& params);

}  // namespace llmk::cpu
