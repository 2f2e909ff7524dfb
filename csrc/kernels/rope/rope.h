#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/rope.h"

namespace llmk::kernels {

constexpr int64_t kMaxRopeTokens = 0x7fffffff;  // batch * tokens of one call

cudaError_t rope(const RopeParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
