// Linear for many tokens, by TMA and wgmma on Hopper: gemm_sm90.cuh.
#pragma once
#include <cuda_runtime.h>

#include "dtype.h"
#include "params/linear.h"
#include "plan.h"

namespace llmk::kernels {

// See llmk_force_gemm.
int forced_gemm();

// It does not normalize, except by a norm hand-off (params/linear.h). `plan` and `blocks` are those of choose_route()
// (linear/route.h).
cudaError_t gemm(const LinearParams& params, const GemmPlan& plan, int blocks, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
