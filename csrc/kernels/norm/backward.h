// The workspace of the backward of RMSNorm and LayerNorm.
#pragma once
#include <cstdint>

namespace llmk::kernels {

// The rows of partial sums over rows, and the floats of workspace in all, on the current device.
struct NormBackwardWorkspace {
  int64_t partial_rows;
  int64_t floats;
};

}  // namespace llmk::kernels
