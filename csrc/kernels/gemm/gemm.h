// Linear for many tokens, by TMA and wgmma on Hopper: gemm_sm90.cuh.
#pragma once
#include <cuda_runtime.h>

#include "dtype.h"
#include "params/linear.h"

namespace llmk::kernels {

// Whether gemm() takes this, on the current device: a GPU with wgmma, a 16-bit dtype, and k, the columns of y, the
// strides and addresses in whole vectors of 16 bytes. It does not normalize.
bool gemm_supported(const LinearParams& params, Dtype dtype);

// Whether it is faster than cuBLAS, where supported (plan.h).
bool gemm_is_faster(const LinearParams& params);

cudaError_t gemm(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
