#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"
#include "plan.h"

namespace llmk::kernels {

// Whether linear() takes this, on the current device: up to 64 rows of a 16-bit dtype (16 where there is no wgmma),
// 16-byte aligned rows, sm_90.
bool linear_supported(const LinearParams& params, Dtype dtype);

// Whether that is faster than cuBLAS, as measured.
bool linear_pays(const LinearParams& params);

// What `workspace` must hold: 0 unless x is normalized by a launch of its own.
size_t linear_workspace_bytes(const LinearParams& params, Dtype dtype);

// How many sums of squares linear() leaves for each token if `params`, to which it adds the residual, are followed by a
// norm and `next`; 0 unless it takes both of them, and that saves a launch.
int linear_parts(const LinearParams& params, const LinearParams& next, Dtype dtype);

// y = epilogue(norm(x) weight^T + bias), or residual += that.
cudaError_t linear(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
