#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"

namespace llmk::kernels {

// linear() for one token whose norm, if any, may be folded (see linear.cu); K up to kGemvMaxColumns.
constexpr int64_t kGemvMaxColumns = 32768;

// Whether it is the faster one, as measured on an H200: where the weights of an SM fit into its shared memory.
inline bool gemv_pays(int64_t n, int64_t k, int sm_count) {
  return k <= kGemvMaxColumns && n * k * 2 <= int64_t{208 * 1024} * sm_count;
}

cudaError_t gemv(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
