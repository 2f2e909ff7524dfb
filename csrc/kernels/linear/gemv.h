#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/linear.h"

namespace llmk::kernels {

// linear() for one token whose norm, if any, may be folded (see linear.cu); K up to kGemvMaxColumns.
constexpr int64_t kGemvMaxColumns = 32768;
constexpr int kGemvWarps = 7;  // of a block, which has an SM; each takes two rows of the weight at a time

// Whether it is the faster one, as measured on an H200: where every warp has one pair of rows at most, or nearly all
// have two and the weights of an SM fit into its shared memory.
inline bool gemv_pays(int64_t n, int64_t k, int sm_count) {
  const int64_t rows = (n + sm_count - 1) / sm_count, pairs = (rows + 1) / 2;
  const bool two_each = pairs >= 2 * kGemvWarps - 1 && pairs <= 2 * kGemvWarps;
  return k <= kGemvMaxColumns && (pairs <= kGemvWarps || (two_each && rows * k * 2 <= 208 * 1024));
}

cudaError_t gemv(const LinearParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
