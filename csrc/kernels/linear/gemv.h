#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"

namespace llmk::kernels {

constexpr int kGemvWarps = 10;  // of a block, at most
// Limits: a row of x must fit the registers, and the partial sums of an SM's rows the shared memory beside the ring.
constexpr int64_t kGemvMaxK = int64_t{kGemvWarps} * 8 * 256, kGemvMaxRowsPerSm = 2048;

// The route for one token: gemv, or else linear()'s own kernel, which is faster where many short rows leave gemv too
// few warps. Measured on an H200, weights of models of 0.5 to 8 billion parameters, in us; gemv wins all other cases:
//
//   case           |  gemv | linear
//   ---------------|-------|-------
//   151936 x 896   |    82 |   62.6
//   151936 x 1536  |   109 |    104
inline bool gemv_is_faster(int64_t n, int64_t k, int sm_count) {
  return k <= kGemvMaxK && n <= (k < 2048 ? 128 : kGemvMaxRowsPerSm) * sm_count;
}

// linear() for one token; a norm must be one that linear() can fold.
cudaError_t gemv(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
