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
// Rows that fit a block take a persistent grid, aligned ones by vectors (backward_persistent.cuh), others by the
// vectors that cover them (backward_cover.cuh). The rest, and short rows that are not aligned, takes two kernels
// (backward_long.cuh). Partial sums are added in a fixed order; no atomics.
#pragma once
#include <algorithm>

#include "backward.h"
#include "backward_cover.cuh"
#include "backward_long.cuh"
#include "backward_persistent.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/dispatch.cuh"

namespace llmk::kernels::norm {

// How the rows are processed: by vectors, by the vectors that cover them, or, where neither is for them, by two
// kernels.
struct BackwardPlan {
  PersistentPlan vectors{};
  BackwardCoverPlan cover{};
  int64_t blocks = 0;  // of a persistent grid, each of which leaves one row of partial sums
};

template <typename T, bool kCentered>
cudaError_t plan_backward(const NormBackwardParams& params, BackwardPlan& plan) {
  if (!all_rows_aligned<T>(row_operands(params))) {
    return plan_backward_cover<T, kCentered>(params, plan.cover, plan.blocks);
  }
  const cudaError_t status = plan_persistent<T, kCentered>(params, plan.vectors);
  if (plan.vectors.row.vectors > 0) plan.blocks = plan.vectors.blocks;
  return status;
}

template <bool kCentered>
cudaError_t backward_workspace(const NormBackwardParams& params, Dtype dtype, NormBackwardWorkspace& workspace) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    BackwardPlan plan;
    if (const cudaError_t status = plan_backward<T, kCentered>(params, plan); status != cudaSuccess) return status;
    int64_t statistics = 0;
    if (plan.blocks > 0) {
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
    BackwardPlan plan;
    cudaError_t status = plan_backward<T, kCentered>(params, plan);
    if (status != cudaSuccess) return status;
    if (plan.vectors.row.vectors > 0) {
      status = launch_persistent<T, kCentered>(plan.vectors, params, stream);
    } else if (plan.cover.vectors > 0) {
      status = launch_cover<T, kCentered>(plan.cover, plan.blocks, params, stream);
    } else {
      status = launch_long<T, kCentered>(params, stream);
    }
    if (status != cudaSuccess) return status;
    return column_sum<T>({params.partials, params.partial_rows, params.cols, params.grad_weight, params.grad_bias},
                         stream);
  });
}

}  // namespace llmk::kernels::norm
