// The launches of attention over prompts. Which kernel: route.h.
#include "flash_attention.cuh"

#include <atomic>
#include <utility>

#include "flash_attention.h"
#include "flash_attention_any.h"
#include "flash_attention_maps.h"
#include "flash_attention_sm90.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/recorder.h"

namespace llmk::kernels {
namespace {

// Calls body(Extra) for the instance that has what is asked for.
template <typename Body>
cudaError_t dispatch_extra(const FlashAttentionParams& params, const Body& body) {
  using flash::Extra;
  const Extra extra = params.bias                   ? Extra::kBias
                      : params.block_table          ? Extra::kPages
                      : flash::scales_early(params) ? Extra::kScaled
                                                    : Extra::kNone;
  return dispatch_int<0, 1, 2, 3>(static_cast<int>(extra), [&](auto value) {
    return body(std::integral_constant<Extra, static_cast<Extra>(decltype(value)::value)>{});
  });
}

template <typename T, int kDim>
cudaError_t launch_tiles(const FlashAttentionParams& params, const AttentionPlan& plan, cudaStream_t stream) {
  using Size = flash::Tile<kDim>;
  const LaunchShape shape{plan.blocks, dim3(Size::kThreads), Size::kSharedBytes};
  return dispatch_extra(params, [&](auto extra) {
    return launch(flash::flash_attention_kernel<T, kDim, decltype(extra)::value>, shape, stream, params);
  });
}

std::atomic<bool> is_portable{false};  // see llmk_flash_attention_portable

template <typename T, int kDim>
cudaError_t launch_sm90(const FlashAttentionParams& params, const AttentionPlan& plan, Dtype dtype,
                        cudaStream_t stream) {
  using namespace flash;
  using Size = Sm90Tile<kDim>;
  Maps maps;
  cudaError_t status = make_map(maps.q, params, q_operand(params), Size::kQueries, dtype);
  const int rows =
      static_cast<int>(params.block_table ? std::min<int64_t>(Size::kKeys, params.page_size) : Size::kKeys);
  if (status == cudaSuccess) status = make_map(maps.k, params, k_operand(params), rows, dtype);
  if (status == cudaSuccess) status = make_map(maps.v, params, v_operand(params), rows, dtype);
  if (status != cudaSuccess) return status;
  DeviceInfo device;
  if (status = device_info(device); status != cudaSuccess) return status;
  const int64_t tiles = (params.q_tokens + Size::kQueries - 1) / Size::kQueries;
  const int64_t count = tiles * params.batch * params.heads, key_heads = params.batch * params.kv_heads;
  if (count > INT32_MAX) return cudaErrorInvalidValue;
  // All key heads if they fit into the L2 cache, else as many as fit into half of it.
  //
  //   time, of tokens, heads; H200     | one section | half of L2 | cuDNN
  //   ---------------------------------|-------------|------------|----------
  //   16384, 32 + 32, all to all       | 1.13        | 1.06       | 1
  //   16384, 28 + 4, causal: 34 of 50M | 0.94        | 1.02       | 1
  const int64_t head_bytes = 4 * params.k_tokens * params.head_dim, cache = static_cast<int64_t>(device.l2_bytes);
  const int64_t fitting = key_heads * head_bytes <= cache ? key_heads : cache / 2 / head_bytes;
  const int section = static_cast<int>(std::clamp<int64_t>(fitting, 1, key_heads));
  const LaunchShape shape{plan.blocks, dim3(Size::kThreads), Size::kSharedBytes};
  return dispatch_extra(params, [&](auto extra) {
    return launch(flash_attention_sm90_kernel<T, kDim, decltype(extra)::value>, shape, stream, params, maps, section,
                  static_cast<int>(count), rows);
  });
}

template <typename T>
cudaError_t launch_route(const FlashAttentionParams& params, const AttentionRoute& route, Dtype dtype,
                         cudaStream_t stream) {
  const AttentionPlan& plan = route.plan;
  if (route.forward == AttentionVariant::kWgmma) {
    return dispatch_int<64, 128, 192, 256>(
        plan.head_columns, [&](auto dim) { return launch_sm90<T, decltype(dim)::value>(params, plan, dtype, stream); });
  }
  return dispatch_int<64, 128, 256>(
      plan.head_columns, [&](auto dim) { return launch_tiles<T, decltype(dim)::value>(params, plan, stream); });
}

}  // namespace

cudaError_t launch_flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.batch == 0 || params.q_tokens == 0 || params.heads == 0 || params.head_dim == 0) return cudaSuccess;
  const AttentionRoute route = route_attention(problem_of(params, dtype));
  if (route.forward == AttentionVariant::kNone) return cudaErrorInvalidValue;
  if (route.forward == AttentionVariant::kPlain) return flash_attention_any(params, dtype, stream);
  return dtype == Dtype::kFloat16 ? launch_route<__half>(params, route, dtype, stream)
                                  : launch_route<__nv_bfloat16>(params, route, dtype, stream);
}

AttentionRoute route_attention(const AttentionProblem& problem) {
  DeviceInfo device{};  // of a device whose properties are not known: it has no wgmma
  (void)device_info(device);
  return choose_attention_route(problem, device, {.tensor_maps = has_tensor_maps(), .portable = is_portable});
}

cudaError_t flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  const auto launch = [=](const FlashAttentionParams& p) { return launch_flash_attention(p, dtype, stream); };
  return launch_movable(params, launch,
                        [](FlashAttentionParams& p, const Moves& moves) { moves(p.k, p.v, p.k_begin, p.k_end); });
}

}  // namespace llmk::kernels

// For tests, which call it through ctypes: whether every GPU takes the kernels for compute capability 8.0.
extern "C" __attribute__((visibility("default"))) void llmk_flash_attention_portable(int value) {
  llmk::kernels::is_portable = value != 0;
}
