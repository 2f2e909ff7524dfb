#include "gemm.h"

#include <atomic>

#include "gemm_sm90.cuh"
#include "kernels/launch.h"
#include "kernels/tensor_map.h"

namespace llmk::kernels {
namespace {

std::atomic<int> forced{0};  // see llmk_force_gemm

// Boxes of `box_rows` rows by 64 elements of K, zeros beyond the tensor.
cudaError_t tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t k, int64_t stride, int box_rows,
                       ElementType type) {
  if (rows == 1) stride = k;
  const TensorBox tensor{
      .dims = 3, .sizes = {k, rows, 1}, .strides = {1, stride, stride}, .box = {kGemmDepth, box_rows, 1}};
  return make_tensor_map(map, data, tensor, type);
}

template <int kColumns, GemmSchedule kSchedule>
constexpr bool kPlansTheRing = many_tokens::Ring<kColumns, kSchedule>::kStages == gemm_stages({kColumns, kSchedule}) &&
                               many_tokens::Ring<kColumns, kSchedule>::kSharedBytes ==
                                   gemm_shared_bytes({kColumns, kSchedule});

template <typename T, bool kGlu, int kColumns, GemmSchedule kSchedule>
cudaError_t launch_gemm(const LinearParams& p, const GemmPlan& plan, int blocks, Dtype dtype, cudaStream_t stream) {
  using namespace many_tokens;
  static_assert(kPlansTheRing<kColumns, kSchedule>);
  CUtensorMap x{}, weight{};
  cudaError_t status = tensor_map(x, p.x, p.m, p.k(), p.x_stride, plan.half_rows, element_type(dtype));
  if (status == cudaSuccess)
    status = tensor_map(weight, p.weight.data, p.n(), p.k(), p.weight.stride, kColumns / 2, p.weight.type);
  if (status != cudaSuccess) return status;
  const int64_t columns = p.columns();
  const Arguments arguments{.bias = p.epilogue.bias,
                            .y = p.epilogue.y,
                            .y_stride = p.epilogue.y_stride,
                            .columns = columns,
                            .alpha = p.epilogue.alpha,
                            .adds = p.epilogue.add_residual,
                            .activation = p.epilogue.activation,
                            .m = static_cast<int>(p.m),
                            .k_tiles = static_cast<int>((p.k() + kDepth - 1) / kDepth),
                            .pair = plan.pair,
                            .shares_weight = plan.shares_weight,
                            .splits = plan.splits,
                            .weight_early = p.in_step,
                            .weight_once = plan.row_tiles == 1,
                            .half_rows = plan.half_rows,
                            .half_step = kGlu ? static_cast<int>(columns) : kColumns / 2,
                            .column_step = kGlu ? kColumns / 2 : kColumns,
                            .row_tiles = plan.row_tiles,
                            .column_tiles = plan.column_tiles,
                            .tiles = plan.row_tiles * plan.column_tiles,
                            .norm = {.squares = p.squares,
                                     .parts = p.parts,
                                     .inverse_cols = 1.f / static_cast<float>(p.k()),
                                     .eps = static_cast<float>(p.norm.eps),
                                     .next_norm_weight = p.epilogue.next_norm_weight,
                                     .next_offset = p.epilogue.next_offset,
                                     .scaled = p.epilogue.scaled,
                                     .next_squares = p.epilogue.squares}};
  const LaunchShape shape{.blocks = blocks,
                          .threads = dim3(kThreads),
                          .shared_bytes = Ring<kColumns, kSchedule>::kSharedBytes,
                          .cluster = plan.cluster()};
  return launch(gemm_kernel<T, kColumns, kGlu, kSchedule>, shape, stream, x, weight, arguments);
}

template <typename T, bool kGlu>
cudaError_t launch_as(const LinearParams& p, const GemmPlan& plan, int blocks, Dtype dtype, cudaStream_t stream) {
  using enum GemmSchedule;
  const auto is = [&](int columns, GemmSchedule schedule) {
    return plan.tile.columns == columns && plan.tile.schedule == schedule;
  };
  if (is(256, kTogether)) return launch_gemm<T, kGlu, 256, kTogether>(p, plan, blocks, dtype, stream);
  if (is(224, kTogether)) return launch_gemm<T, kGlu, 224, kTogether>(p, plan, blocks, dtype, stream);
  if (is(192, kAlternate)) return launch_gemm<T, kGlu, 192, kAlternate>(p, plan, blocks, dtype, stream);
  if (is(144, kAlternate)) return launch_gemm<T, kGlu, 144, kAlternate>(p, plan, blocks, dtype, stream);
  if (is(128, kAlternate)) return launch_gemm<T, kGlu, 128, kAlternate>(p, plan, blocks, dtype, stream);
  if constexpr (!kGlu) {
    if (is(192, kSplit)) return launch_gemm<T, kGlu, 192, kSplit>(p, plan, blocks, dtype, stream);
    if (is(144, kSplit)) return launch_gemm<T, kGlu, 144, kSplit>(p, plan, blocks, dtype, stream);
    if (is(128, kSplit)) return launch_gemm<T, kGlu, 128, kSplit>(p, plan, blocks, dtype, stream);
    if (is(80, kSplit)) return launch_gemm<T, kGlu, 80, kSplit>(p, plan, blocks, dtype, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t launch_as(const LinearParams& p, const GemmPlan& plan, int blocks, Dtype dtype, cudaStream_t stream) {
  return p.epilogue.glu ? launch_as<T, true>(p, plan, blocks, dtype, stream)
                        : launch_as<T, false>(p, plan, blocks, dtype, stream);
}

}  // namespace

int forced_gemm() { return forced; }

cudaError_t gemm(const LinearParams& params, const GemmPlan& plan, int blocks, Dtype dtype, cudaStream_t stream) {
  return dtype == Dtype::kFloat16 ? launch_as<__half>(params, plan, blocks, dtype, stream)
                                  : launch_as<__nv_bfloat16>(params, plan, blocks, dtype, stream);
}

}  // namespace llmk::kernels

// For tests and benchmarks, which call it through ctypes: which linears of many tokens take the kernel. 0: those where
// it is faster; 1: all that it supports; -1: none; else all, with the tile gemm_tile(value).
extern "C" __attribute__((visibility("default"))) void llmk_force_gemm(int value) { llmk::kernels::forced = value; }
