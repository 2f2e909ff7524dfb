#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"
#include "plan.h"

namespace llmk::kernels {

// Whether linear() takes this, on the current device: compute capability 8.0 and up, up to 64 rows of a 16-bit dtype
// (16 where there is no wgmma), 16-byte aligned rows.
bool linear_supported(const LinearParams& params, Dtype dtype);

// Whether that is faster than cuBLAS (measured, see linear.cu).
bool linear_is_faster(const LinearParams& params);

// Bytes of `workspace`: 0 unless x is normalized by a launch of its own.
size_t linear_workspace_bytes(const LinearParams& params, Dtype dtype);

// How many partial sums of squares per token linear() can leave, where `params` adds to the residual and a norm and
// `next` follow; 0 if it cannot, or if that would not save a launch.
int linear_parts(const LinearParams& params, const LinearParams& next, Dtype dtype);

// y = epilogue(norm(x) weight^T + bias), or residual += that.
cudaError_t linear(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
