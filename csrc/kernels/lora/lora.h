#pragma once
#include <cuda_runtime_api.h>

#include "params/lora.h"

namespace llmk::kernels {

cudaError_t lora_split(const LoraSplits& splits, cudaStream_t stream);
cudaError_t lora_adapters(const LoraAdapters& params, Dtype dtype, cudaStream_t stream);
cudaError_t lora_sum(const LoraSums& sums, cudaStream_t stream);

}  // namespace llmk::kernels
