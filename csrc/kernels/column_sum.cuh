// Sums over rows: the second half of a gradient that all rows share (weight, bias), after a kernel that has left
// partial sums, each over a part of the rows. The order is fixed, so the result has the same bits every time.
#pragma once
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

struct ColumnSums {
  const float* partials;  // [count][partial_rows, cols]
  int64_t partial_rows, cols;
  int count;             // of sums wanted, 1 or 2
  void *first, *second;  // targets [cols]; the second is null if one sum is wanted

  // With the targets that are wanted.
  ColumnSums(const void* partials, int64_t partial_rows, int64_t cols, void* first, void* second = nullptr)
      : partials(static_cast<const float*>(partials)),
        partial_rows(partial_rows),
        cols(cols),
        count((first != nullptr) + (second != nullptr)),
        first(first ? first : second),
        second(first ? second : nullptr) {}
};

// target = sum of the partial sums: a block takes 32 columns, its warps split the rows of partial sums. So few threads
// that a block fits an SM beside one of the kernel before and waits there for its end.
constexpr int kColumnSumWarps = 8;
constexpr int kColumnSumLoads = 17;  // of a thread in flight: all rows, where there is one for each of 132 SMs
template <typename T>
__global__ void __launch_bounds__(32 * kColumnSumWarps) column_sum_kernel(const ColumnSums params) {
  __shared__ float sums[kColumnSumWarps][32];
  pdl_launch_dependents();
  pdl_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool second = blockIdx.x >= gridDim.x / params.count;
  const int64_t strip = (blockIdx.x - (second ? gridDim.x / params.count : 0)) * static_cast<int64_t>(32);
  const int64_t col = strip + lane;
  const float* const partials = params.partials + (second ? params.partial_rows * params.cols : 0);
  float sum = 0.f;
  if (col < params.cols) {
    for (int64_t first = warp; first < params.partial_rows; first += kColumnSumLoads * kColumnSumWarps) {
      float values[kColumnSumLoads];
#pragma unroll
      for (int i = 0; i < kColumnSumLoads; ++i) {
        const int64_t row = first + i * kColumnSumWarps;
        values[i] = row < params.partial_rows ? partials[row * params.cols + col] : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kColumnSumLoads; ++i) sum += values[i];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || col >= params.cols) return;
#pragma unroll
  for (int w = 1; w < kColumnSumWarps; ++w) sum += sums[w][lane];
  static_cast<T*>(second ? params.second : params.first)[col] = from_float<T>(sum);
}

template <typename T>
cudaError_t column_sum(const ColumnSums& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  return launch(column_sum_kernel<T>, {(params.cols + 31) / 32 * params.count, dim3(32 * kColumnSumWarps)}, stream,
                params);
}

}  // namespace llmk::kernels
