// Attention over prompts: which kernel.
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

template <typename T, int kDim>
cudaError_t launch_tiles(const FlashAttentionParams& params, cudaStream_t stream) {
  using Size = flash::Tile<kDim>;
  const int64_t tiles = (params.q_tokens + Size::kQueries - 1) / Size::kQueries;
  const LaunchShape shape{tiles * params.batch * params.heads, dim3(Size::kThreads), Size::kSharedBytes};
  return launch(flash::flash_attention_kernel<T, kDim>, shape, stream, params);
}

std::atomic<bool> is_portable{false};  // see llmk_flash_attention_portable

template <typename T, int kDim>
cudaError_t launch_sm90(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  using namespace flash;
  using Size = Sm90Tile<kDim>;
  Maps maps;
  cudaError_t status = make_map(maps.q, params, q_operand(params), Size::kQueries, dtype);
  if (status == cudaSuccess) status = make_map(maps.k, params, k_operand(params), Size::kKeys, dtype);
  if (status == cudaSuccess) status = make_map(maps.v, params, v_operand(params), Size::kKeys, dtype);
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
  const LaunchShape shape{std::min<int64_t>(count, device.sm_count), dim3(Size::kThreads), Size::kSharedBytes};
  return launch(flash_attention_sm90_kernel<T, kDim>, shape, stream, params, maps, section, static_cast<int>(count));
}

template <typename T>
cudaError_t launch_fast(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  if (flash_attention_is_sm90(params)) {
    if (params.head_dim <= 64) return launch_sm90<T, 64>(params, dtype, stream);
    if (params.head_dim <= 128) return launch_sm90<T, 128>(params, dtype, stream);
    if (params.head_dim <= 192) return launch_sm90<T, 192>(params, dtype, stream);
    return launch_sm90<T, 256>(params, dtype, stream);
  }
  if (params.head_dim <= 64) return launch_tiles<T, 64>(params, stream);
  if (params.head_dim <= 128) return launch_tiles<T, 128>(params, stream);
  return launch_tiles<T, 256>(params, stream);
}

}  // namespace

bool flash_attention_is_sm90(const FlashAttentionParams& p) {
  using namespace flash;
  DeviceInfo device;
  if (is_portable || p.k_tokens == 0 || device_info(device) != cudaSuccess) return false;
  return device.has_wgmma && has_tensor_maps() && can_map(q_operand(p)) && can_map(k_operand(p)) &&
         can_map(v_operand(p));
}

bool flash_attention_is_fast(const FlashAttentionParams& params, Dtype dtype) {
  if (dtype == Dtype::kFloat32 || params.head_dim % 8 != 0 || params.head_dim > kMaxFlashHeadDim) return false;
  for (const void* pointer : {params.q, params.k, params.v, static_cast<const void*>(params.y)}) {
    if (!is_aligned(pointer, 16)) return false;
  }
  for (const int64_t stride : {params.q_batch, params.q_token, params.q_head, params.k_batch, params.k_token,
                               params.k_head, params.v_batch, params.v_token, params.v_head}) {
    if (stride % 8 != 0) return false;
  }
  return true;
}

static cudaError_t launch_flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.batch == 0 || params.q_tokens == 0 || params.heads == 0 || params.head_dim == 0) return cudaSuccess;
  if (params.q_tokens > kMaxFlashTokens || params.k_tokens > kMaxFlashTokens || params.head_dim > kMaxFlashHeadDim) {
    return cudaErrorInvalidValue;
  }
  if (!flash_attention_is_fast(params, dtype)) return flash_attention_any(params, dtype, stream);
  if (dtype == Dtype::kFloat16) return launch_fast<__half>(params, dtype, stream);
  return launch_fast<__nv_bfloat16>(params, dtype, stream);
}

cudaError_t flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  const auto launch = [=](const FlashAttentionParams& p) { return launch_flash_attention(p, dtype, stream); };
  return launch_movable(params, launch,
                        [](FlashAttentionParams& p, const Moves& moves) { moves(p.k, p.v, p.k_begin); });
}

}  // namespace llmk::kernels

// For tests, which call it through ctypes: whether every GPU takes the kernels for compute capability 8.0.
extern "C" __attribute__((visibility("default"))) void llmk_flash_attention_portable(int value) {
  llmk::kernels::is_portable = value != 0;
}
