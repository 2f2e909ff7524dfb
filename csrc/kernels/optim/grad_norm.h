#pragma once
#include <cuda_runtime_api.h>

#include "params/optim.h"

namespace llmk::kernels {

// How many floats of workspace grad_norm() needs.
int64_t grad_norm_partials(const GradTensor* tensors, int64_t count);

// The norm of all elements of a list.
cudaError_t grad_norm(const GradNormParams& params, cudaStream_t stream);

// Multiplies all elements by max_norm / (norm + 1e-6), if that is less than 1 or NaN.
cudaError_t clip_grads(const ClipGradParams& params, cudaStream_t stream);

}  // namespace llmk::kernels
