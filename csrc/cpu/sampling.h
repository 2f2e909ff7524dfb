// Sampling on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/sampling.h"

namespace llmk::cpu {

// Draws the tokens of rows [begin, end). The random state is only read: the caller advances it when all rows are done.
void sample(const SamplingParams& params, Dtype dtype, int64_t begin, int64_t end);

}  // namespace llmk::cpu
