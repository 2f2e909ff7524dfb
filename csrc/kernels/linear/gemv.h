#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "gemv_plan.h"
#include "params/linear.h"

namespace llmk::kernels {

// linear() for one token; a norm must be one that linear() can fold.
cudaError_t gemv(const LinearParams& params, const GemvPlan& plan, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
