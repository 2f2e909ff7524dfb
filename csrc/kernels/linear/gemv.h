#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"

namespace llmk::kernels {

// linear() for one token whose norm, if any, may be folded (see linear.cu).
constexpr int kGemvWarps = 10;  // of a block, at most
// What fits its registers and its shared memory: the sums of an SM's rows by all warps, beside the ring.
constexpr int64_t kGemvMostColumns = int64_t{kGemvWarps} * 8 * 256, kGemvMostRowsPerSm = 2048;

// Whether it is the faster one, as measured on an H200 with the weights of models of 0.5 to 8 billion parameters: but
// for the many short rows of a small model's vocabulary, where it has too few warps (151936 x 896: 82 us against 62.6,
// 151936 x 1536: 109 against 104).
inline bool gemv_pays(int64_t n, int64_t k, int sm_count) {
  return k <= kGemvMostColumns && n <= (k < 2048 ? 128 : kGemvMostRowsPerSm) * sm_count;
}

cudaError_t gemv(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
