// Tensor maps of queries, keys and values of a prompt, for kernels that copy by TMA.
#pragma once
#include <cuda.h>

#include "dtype.h"
#include "kernels/tensor_map.h"
#include "params/flash_attention.h"

namespace llmk::kernels::flash {

// A tensor [batch, tokens, heads, head_dim], of which a box has some tokens of one head and 64 columns. Of a paged
// cache a batch is a page.
struct Operand {
  const void* data;
  int64_t batch, tokens, heads, batch_stride, token_stride, head_stride;
};

inline Operand q_operand(const FlashAttentionParams& p) {
  return {p.q, p.batch, p.q_tokens, p.heads, p.q_batch, p.q_token, p.q_head};
}
inline Operand keys_operand(const FlashAttentionParams& p, const void* data, int64_t batch, int64_t token,
                            int64_t head) {
  const bool paged = p.block_table != nullptr;
  return {data, paged ? p.pages : p.batch, paged ? p.page_size : p.k_tokens, p.kv_heads, batch, token, head};
}
inline Operand k_operand(const FlashAttentionParams& p) { return keys_operand(p, p.k, p.k_batch, p.k_token, p.k_head); }
inline Operand v_operand(const FlashAttentionParams& p) { return keys_operand(p, p.v, p.v_batch, p.v_token, p.v_head); }
inline Operand grad_y_operand(const FlashAttentionBackwardParams& p) {
  return {p.grad_y, p.batch, p.q_tokens, p.heads, p.grad_y_batch, p.grad_y_token, p.grad_y_head};
}

// Heads and sequences that share their memory, by a stride of 0, are one in the map: see map_index().
inline cudaError_t make_map(CUtensorMap& map, const FlashAttentionParams& p, const Operand& x, int rows, Dtype dtype) {
  const auto size = [](int64_t size, int64_t stride) { return stride == 0 ? 1 : size; };
  const auto stride = [&](int64_t size, int64_t stride) { return size == 1 || stride == 0 ? p.head_dim : stride; };
  const TensorBox tensor{
      .dims = 4,
      .sizes = {p.head_dim, x.tokens, size(x.heads, x.head_stride), size(x.batch, x.batch_stride)},
      .strides = {1, stride(x.tokens, x.token_stride), stride(x.heads, x.head_stride), stride(x.batch, x.batch_stride)},
      .box = {64, rows, 1, 1}};
  return make_tensor_map(map, x.data, tensor, element_type(dtype));
}

// The index in the map of head or sequence i, whose stride this is.
__host__ __device__ inline int map_index(int64_t i, int64_t stride) { return stride == 0 ? 0 : static_cast<int>(i); }

}  // namespace llmk::kernels::flash
