#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/cross_entropy.h"

namespace llmk::kernels {

// sums[0]: the sum of the weights of all targets, or 1 if not `mean`; sums[1]: that of all classes.
cudaError_t cross_entropy_sums(const CrossEntropyParams& params, bool mean, float* sums, cudaStream_t stream);
// losses, lse and, where it is wanted, grad.
cudaError_t cross_entropy(const CrossEntropyParams& params, Dtype dtype, cudaStream_t stream);
// loss = the sum of the losses / params.sums[0].
cudaError_t cross_entropy_reduce(const CrossEntropyParams& params, float* loss, cudaStream_t stream);
// grad from logits, lse and grad_loss.
cudaError_t cross_entropy_backward(const CrossEntropyParams& params, Dtype dtype, cudaStream_t stream);
cudaError_t cross_entropy_scale(const CrossEntropyScaleParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
