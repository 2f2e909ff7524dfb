// Attention over prompts: which kernel.
#include "flash_attention.cuh"

#include "flash_attention.h"
#include "flash_attention_any.h"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

template <typename T, int kDim>
cudaError_t launch_tiles(const FlashAttentionParams& params, cudaStream_t stream) {
  using Size = flash::Tile<kDim>;
  const int64_t tiles = (params.q_tokens + Size::kQueries - 1) / Size::kQueries;
  const LaunchShape shape{tiles * params.batch * params.heads, dim3(Size::kThreads), Size::kSharedBytes};
  return launch(flash::flash_attention_kernel<T, kDim>, shape, stream, params);
}

template <typename T>
cudaError_t launch_fast(const FlashAttentionParams& params, cudaStream_t stream) {
  if (params.head_dim <= 64) return launch_tiles<T, 64>(params, stream);
  if (params.head_dim <= 128) return launch_tiles<T, 128>(params, stream);
  return launch_tiles<T, 256>(params, stream);
}

}  // namespace

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

cudaError_t flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.batch == 0 || params.q_tokens == 0 || params.heads == 0 || params.head_dim == 0) return cudaSuccess;
  if (params.q_tokens > kMaxFlashTokens || params.k_tokens > kMaxFlashTokens || params.head_dim > kMaxFlashHeadDim) {
    return cudaErrorInvalidValue;
  }
  if (!flash_attention_is_fast(params, dtype)) return flash_attention_any(params, dtype, stream);
  if (dtype == Dtype::kFloat16) return launch_fast<__half>(params, stream);
  return launch_fast<__nv_bfloat16>(params, stream);
}

}  // namespace llmk::kernels
