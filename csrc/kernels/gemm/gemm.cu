#include "gemm.h"

#include <atomic>

#include "gemm_sm90.cuh"
#include "kernels/launch.h"
#include "kernels/tensor_map.h"

namespace llmk::kernels {
namespace {

using many_tokens::Arguments;
using many_tokens::Epilogue;
using many_tokens::gemm_kernel;

std::atomic<bool> is_route{false};  // see llmk_gemm_is_route

// Boxes of 128 rows by 64 elements of K, zeros beyond the tensor.
cudaError_t tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t k, int64_t stride, Dtype dtype) {
  const TensorBox tensor{.dims = 3,
                         .sizes = {k, rows, 1},
                         .strides = {1, stride, stride},
                         .box = {many_tokens::kDepth, many_tokens::kRows, 1}};
  return make_tensor_map(map, data, tensor, dtype);
}

template <typename T, Epilogue kEpilogue>
cudaError_t launch_gemm(const LinearParams& p, Dtype dtype, cudaStream_t stream) {
  using namespace many_tokens;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  CUtensorMap x{}, weight{};
  if (const cudaError_t status = tensor_map(x, p.x, p.m, p.k, p.m > 1 ? p.x_stride : p.k, dtype);
      status != cudaSuccess) {
    return status;
  }
  if (const cudaError_t status = tensor_map(weight, p.weight, p.n, p.k, p.n > 1 ? p.weight_stride : p.k, dtype);
      status != cudaSuccess) {
    return status;
  }
  const auto divide_up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  constexpr bool kGlu = kEpilogue == Epilogue::kGlu;
  const int64_t columns = kGlu ? p.n / 2 : p.n;
  const int column_step = kGlu ? kColumns / 2 : kColumns, cluster = p.m > kRows ? 2 : 1;
  const int row_tiles = divide_up(p.m, cluster * kRows), tiles = row_tiles * divide_up(columns, column_step);
  const Arguments arguments{.bias = p.bias,
                            .y = p.residual ? p.residual : p.y,
                            .y_stride = p.y_stride,
                            .columns = columns,
                            .alpha = static_cast<float>(p.alpha),
                            .activation = p.glu.value_or(Activation{}),
                            .m = static_cast<int>(p.m),
                            .k_tiles = divide_up(p.k, kDepth),
                            .half_step = kGlu ? static_cast<int>(columns) : kColumns / 2,
                            .column_step = column_step,
                            .row_tiles = row_tiles,
                            .tiles = tiles};
  LaunchShape shape{.blocks = int64_t{std::min(tiles, device.clusters[cluster])} * cluster,
                    .threads = dim3(kThreads),
                    .shared_bytes = kSharedBytes,
                    .may_overlap = false,
                    .cluster = cluster};
  const auto kernel = cluster == 1 ? gemm_kernel<T, kEpilogue, 1> : gemm_kernel<T, kEpilogue, 2>;
  return launch(kernel, shape, stream, x, weight, arguments);
}

template <typename T>
cudaError_t launch_as(const LinearParams& p, Dtype dtype, cudaStream_t stream) {
  if (p.glu) return launch_gemm<T, Epilogue::kGlu>(p, dtype, stream);
  if (p.residual) return launch_gemm<T, Epilogue::kAdd>(p, dtype, stream);
  return launch_gemm<T, Epilogue::kStore>(p, dtype, stream);
}

}  // namespace

bool gemm_supported(const LinearParams& p, Dtype dtype) {
  DeviceInfo device;
  if (dtype != Dtype::kFloat16 && dtype != Dtype::kBFloat16) return false;
  if (p.normalize || p.m > INT32_MAX - 256 || p.n > INT32_MAX - 256 || p.k > INT32_MAX - 64) return false;
  if (device_info(device) != cudaSuccess || !device.has_wgmma || !has_tensor_maps()) return false;
  const int64_t columns = p.glu ? p.n / 2 : p.n;
  return p.k % 8 == 0 && columns % 8 == 0 && rows_aligned(p.x, p.x_stride, p.m, 2) &&
         rows_aligned(p.weight, p.weight_stride, p.n, 2) &&
         rows_aligned(p.residual ? p.residual : p.y, p.y_stride, p.m, 2);
}

bool gemm_is_faster(const LinearParams&) { return is_route; }

cudaError_t gemm(const LinearParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.m == 0 || params.n == 0 || params.k == 0)
    return cudaErrorInvalidValue;  // the caller has a result for them
  return dtype == Dtype::kFloat16 ? launch_as<__half>(params, dtype, stream)
                                  : launch_as<__nv_bfloat16>(params, dtype, stream);
}

}  // namespace llmk::kernels

// For tests and benchmarks, which call it through ctypes: whether linears of many tokens take the kernel.
extern "C" __attribute__((visibility("default"))) void llmk_gemm_is_route(int value) {
  llmk::kernels::is_route = value != 0;
}
