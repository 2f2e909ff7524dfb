#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/sampling.h"

namespace llmk::kernels {

// Draws one token per row and advances the random state, all on the device and without workspace. At most
// sampling::kMaxRows rows of sampling::kMaxVocab logits.
cudaError_t sample(const SamplingParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
