// What lora_linear does between matrix products whose float32 factors are split into two of bfloat16:
//
//   lora_split   x = factor (first half + second half), or as it is; upper = bf16(x), lower = bf16(x - upper)
//                reads 4 bytes per number (8 with halves), writes three parts, 6 bytes
//   lora_sum     first half + second half, 8 bytes read and 4 written
//
// float32 sources of any size with rows any distance apart. Every operation rounds once, so the results are those of
// the CPU; a number is computed by one thread, so they have the same bits every time. The matrices are small, some
// 10^5 numbers: what counts is the latency of a launch. So up to two matrices share one, a thread has one vector of
// four numbers (or one number), and 128 of them a block, to reach many SMs:
//
//   blocks   |-- those of the first matrix --|-- of the second --|
//
// Source of the splitting: Henry, Tang and Heinecke 2019.
#include "lora.h"

#include "device/vec.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 128, kWidth = 4;

// How far into a matrix of `rows` rows of `cols` a thread is; `row` is `rows` and more behind the end.
struct Position {
  int64_t row, col;
};
template <int N>
__device__ Position position(int64_t block, int64_t cols) {
  const int64_t vector = block * kThreads + threadIdx.x, per_row = cols / N;
  // The division of 32 bits is several times faster.
  const int64_t row =
      (vector | per_row) >> 32 ? vector / per_row : static_cast<uint32_t>(vector) / static_cast<uint32_t>(per_row);
  return {row, (vector - row * per_row) * N};
}

template <int N>
__device__ void split(const LoraSplit& params, int64_t block) {
  const auto [row, col] = position<N>(block, params.cols);
  if (row >= params.rows) return;
  using Floats = Vec<float, N>;
  using Parts = Vec<Bf16, N>;
  const float* const source = params.source + row * params.source_stride + col;
  Floats x = Floats::load(source);
  if (params.half) {
    const Floats other = Floats::load(source + params.half);
    x = Floats::of([&](int i) { return __fmul_rn(params.factor, __fadd_rn(x[i], other[i])); });
  }
  const Parts upper = Parts::of([&](int i) { return x[i]; });
  const Parts lower = Parts::of([&](int i) { return __fsub_rn(x[i], upper[i]); });
  Bf16* const parts = static_cast<Bf16*>(params.parts) + row * params.row_stride + col;
  upper.store(parts);
  lower.store(parts + params.lower * params.part_stride);
  upper.store(parts + (3 - params.lower) * params.part_stride);
}

template <int N>
__device__ void add_halves(const LoraSum& params, int64_t block) {
  const auto [row, col] = position<N>(block, params.cols);
  if (row >= params.rows) return;
  using Floats = Vec<float, N>;
  const float* const source = params.source + row * params.source_stride + col;
  add(Floats::load(source), Floats::load(source + params.half)).store(params.sum + row * params.cols + col);
}

template <int N>
__global__ void __launch_bounds__(kThreads) split_kernel(const LoraSplits params, int64_t first_blocks) {
  pdl_launch_dependents();
  pdl_wait();
  if (blockIdx.x < first_blocks) {
    split<N>(params.first, blockIdx.x);
  } else {
    split<N>(params.second, blockIdx.x - first_blocks);
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads) sum_kernel(const LoraSums params, int64_t first_blocks) {
  pdl_launch_dependents();
  pdl_wait();
  if (blockIdx.x < first_blocks) {
    add_halves<N>(params.first, blockIdx.x);
  } else {
    add_halves<N>(params.second, blockIdx.x - first_blocks);
  }
}

// Whether all accesses of a thread can be of kWidth numbers.
bool takes_vectors(const LoraSplit& p) {
  const auto is_multiple = [](int64_t stride) { return stride % kWidth == 0; };
  return p.rows == 0 || (is_multiple(p.cols) && rows_aligned(p.source, p.source_stride, p.rows, sizeof(float)) &&
                         is_multiple(p.half) && is_aligned(p.parts, kWidth * sizeof(Bf16)) &&
                         is_multiple(p.row_stride) && is_multiple(p.part_stride));
}
bool takes_vectors(const LoraSum& p) {
  return p.rows == 0 || (p.cols % kWidth == 0 && rows_aligned(p.source, p.source_stride, p.rows, sizeof(float)) &&
                         p.half % kWidth == 0 && is_aligned(p.sum, 16));
}

// Launches one of the kernels, by vectors if both matrices allow that. Not before the kernel in front has ended: that
// one is cuBLAS's in most calls, which never lets another start early (see rms_norm_between in csrc/torch/parts.h).
template <typename Params>
cudaError_t run(void (*vectors)(Params, int64_t), void (*numbers)(Params, int64_t), Params params,
                cudaStream_t stream) {
  for (auto* matrix : {&params.first, &params.second}) {
    if (matrix->cols == 0) matrix->rows = 0;
  }
  const bool is_wide = takes_vectors(params.first) && takes_vectors(params.second);
  const int64_t per_block = is_wide ? kThreads * kWidth : kThreads;
  const auto blocks = [&](const auto& matrix) { return (matrix.rows * matrix.cols + per_block - 1) / per_block; };
  const int64_t first = blocks(params.first), all = first + blocks(params.second);
  if (all == 0) return cudaSuccess;
  LaunchShape shape{all, dim3(kThreads)};
  shape.may_overlap = false;
  return launch(is_wide ? vectors : numbers, shape, stream, params, first);
}

}  // namespace

cudaError_t lora_split(const LoraSplits& splits, cudaStream_t stream) {
  return run<LoraSplits>(split_kernel<kWidth>, split_kernel<1>, splits, stream);
}

cudaError_t lora_sum(const LoraSums& sums, cudaStream_t stream) {
  return run<LoraSums>(sum_kernel<kWidth>, sum_kernel<1>, sums, stream);
}

}  // namespace llmk::kernels
