#pragma once
#include <cuda_runtime_api.h>

#include "params/optim.h"

namespace llmk::kernels {

// A step of Adam or AdamW for a whole list.
cudaError_t adam(const AdamParams& params, cudaStream_t stream);

}  // namespace llmk::kernels
