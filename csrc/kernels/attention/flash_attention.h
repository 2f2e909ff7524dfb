#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"
#include "params/flash_attention.h"

namespace llmk::kernels {

constexpr int64_t kMaxFlashHeadDim = 256;
constexpr int64_t kMaxFlashTokens = int64_t{1} << 30;  // positions are int

// Whether the tensor-core kernel supports this: 16-bit, head_dim a multiple of 8, everything aligned to 16 bytes.
// flash_attention() runs anything else by a slow kernel.
bool flash_attention_is_fast(const FlashAttentionParams& params, Dtype dtype);

// Whether that is the kernel for Hopper.
bool flash_attention_is_sm90(const FlashAttentionParams& params);

cudaError_t flash_attention(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
