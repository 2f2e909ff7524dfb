#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/embed_tokens.h"

namespace llmk::kernels {

cudaError_t embed_tokens(const EmbedTokensParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
