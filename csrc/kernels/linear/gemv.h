#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"

namespace llmk::kernels {

// linear() for one token whose norm, if any, may be folded (see linear.cu); K up to kGemvMaxColumns.
constexpr int64_t kGemvMaxColumns = 32768;
cudaError_t gemv(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
