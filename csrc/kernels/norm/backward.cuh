// Backward of RMSNorm and of LayerNorm (see forward.cuh). With n = x rstd, of LayerNorm (x - m) rstd, g = grad_y
// (offset + w) and a second gradient of x, grad_sum (add_rms_norm, add_layer_norm):
//
//   RMSNorm:    grad_x = round(rstd (g - n mean(g n)) + grad_sum)
//   LayerNorm:  grad_x = round(rstd (g - mean(g) - n mean(g n)) + grad_sum)
//   grad_w = round(sum over rows of grad_y m)        grad_b = round(sum over rows of grad_y)
//
// m is what the forward multiplied by the weight: round(n) with cast_before_weight, else n, as in eager autograd.
//
// m and rstd are recomputed: the row is read anyway, and the forward needs to save x only. float32, float16 or
// bfloat16; float32 arithmetic. Moves 3 elements per element (4 with grad_sum), plus a float32 row of each partial sum
// per block.
//
// Rows that fit a block take a persistent grid (backward_persistent.cuh), others two kernels (backward_long.cuh).
// Partial sums are added in a fixed order; no atomics.
#pragma once
#include <algorithm>

#include "backward.h"
#include "backward_long.cuh"
#include "backward_persistent.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/dispatch.cuh"

namespace llmk::kernels::norm {

template <bool kCentered>
cudaError_t backward_workspace(const NormBackwardParams& params, Dtype dtype, NormBackwardWorkspace& workspace) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    PersistentPlan plan;
    if (const cudaError_t status = plan_persistent<T, kCentered>(params, plan); status != cudaSuccess) return status;
    int64_t statistics = 0;
    if (plan.row.vectors > 0) {
      workspace.partial_rows = plan.blocks;
    } else {
      // Enough partial sums to fill the GPU, and none over more than 1024 rows, for accuracy.
      workspace.partial_rows = std::min<int64_t>(params.rows, std::max<int64_t>(64, params.rows / 1024));
      statistics = kCentered ? 2 * params.rows : params.rows;
    }
    const int sums = wanted_sums(params);
    workspace.floats = sums > 0 ? sums * workspace.partial_rows * params.cols + statistics : 0;
    return cudaSuccess;
  });
}

template <bool kCentered>
cudaError_t backward(const NormBackwardParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    PersistentPlan plan;
    cudaError_t status = plan_persistent<T, kCentered>(params, plan);
    if (status != cudaSuccess) return status;
    status = plan.row.vectors > 0 ? launch_persistent<T, kCentered>(plan, params, stream)
                                  : launch_long<T, kCentered>(params, stream);
    if (status != cudaSuccess) return status;
    return column_sum<T>({params.partials, params.partial_rows, params.cols, params.grad_weight, params.grad_bias},
                         stream);
  });
}

}  // namespace llmk::kernels::norm
