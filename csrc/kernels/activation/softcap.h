#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/softcap.h"

namespace llmk::kernels {

cudaError_t scale_softcap(const SoftcapParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
