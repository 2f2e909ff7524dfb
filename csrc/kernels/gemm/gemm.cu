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

template <int kColumns>
constexpr bool kPlansTheRing = many_tokens::Ring<kColumns>::kStages == gemm_stages(kColumns) &&
                               many_tokens::Ring<kColumns>::kSharedBytes == gemm_shared_bytes(kColumns);
static_assert(kPlansTheRing<256> && kPlansTheRing<224> && kPlansTheRing<192> && kPlansTheRing<144> &&
              kPlansTheRing<128>);

template <typename T, bool kGlu, int kColumns, bool kAlternates>
cudaError_t launch_gemm(const LinearParams& p, const GemmPlan& plan, int blocks, Dtype dtype, cudaStream_t stream) {
  using namespace many_tokens;
  CUtensorMap x{}, weight{};
  cudaError_t status = tensor_map(x, p.x, p.m, p.k(), p.x_stride, kRows / 2, element_type(dtype));
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
                            .cluster = plan.cluster,
                            .shares_weight = plan.shares_weight,
                            .weight_early = p.in_step,
                            .half_step = kGlu ? static_cast<int>(columns) : kColumns / 2,
                            .column_step = kGlu ? kColumns / 2 : kColumns,
                            .row_tiles = plan.row_tiles,
                            .column_tiles = plan.column_tiles,
                            .tiles = plan.row_tiles * plan.column_tiles};
  const LaunchShape shape{.blocks = blocks,
                          .threads = dim3(kThreads),
                          .shared_bytes = Ring<kColumns>::kSharedBytes,
                          .cluster = plan.cluster};
  return launch(gemm_kernel<T, kColumns, kGlu, kAlternates>, shape, stream, x, weight, arguments);
}

template <typename T, bool kGlu>
cudaError_t launch_as(const LinearParams& p, const GemmPlan& plan, int blocks, Dtype dtype, cudaStream_t stream) {
  const auto is = [&](int columns, bool alternates) {
    return plan.tile.columns == columns && plan.tile.alternates == alternates;
  };
  if (is(256, false)) return launch_gemm<T, kGlu, 256, false>(p, plan, blocks, dtype, stream);
  if (is(224, false)) return launch_gemm<T, kGlu, 224, false>(p, plan, blocks, dtype, stream);
  if (is(192, true)) return launch_gemm<T, kGlu, 192, true>(p, plan, blocks, dtype, stream);
  if (is(144, true)) return launch_gemm<T, kGlu, 144, true>(p, plan, blocks, dtype, stream);
  if (is(128, true)) return launch_gemm<T, kGlu, 128, true>(p, plan, blocks, dtype, stream);
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
// it is faster; 1: all that it supports; -1: none; else all, with tiles of so many columns, plus 1000 where the
// warpgroups alternate.
extern "C" __attribute__((visibility("default"))) void llmk_force_gemm(int value) { llmk::kernels::forced = value; }
