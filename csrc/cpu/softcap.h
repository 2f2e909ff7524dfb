// Scale and softcap of logits on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/softcap.h"

namespace llmk::cpu {

// Elements [begin, end) of y, counted row * cols + col, so that a single row is split over threads as well.
void scale_softcap(const SoftcapParams& params, Dtype dtype, int64_t begin, int64_t end);

}  // namespace llmk::cpu
