// Parameters of the attention kernels of a decode step, on either device. Strides count elements; head dimensions are
// contiguous.
#pragma once
#include <cstdint>

#include "params/norm.h"

namespace llmk {

// Keys and values of all sequences. Contiguous: page b is sequence b, as long as its capacity. Paged: the pages of
// sequence b are block_table[b * table_stride ...].
struct KvCache {
  void* k;  // [pages, page_size, kv_heads, head_dim] by the strides below
  void* v;
  int64_t k_page, k_token, k_head;  // strides
  int64_t v_page, v_token, v_head;
  int64_t pages, page_size;
  const int32_t* block_table;  // [batch, table_stride], or null: contiguous
  int64_t table_stride;
  int64_t capacity;  // keys per sequence: page_size, or page_size times the columns of the block table
};

// Tables of cos and sin by position: rotary_dim columns, or rotary_dim / 2 with `half_width`.
struct RopeTables {
  const void *cos, *sin;
  int64_t cos_row, sin_row;  // strides between rows
  int64_t rows;              // valid positions are [0, rows)
  int64_t rotary_dim;        // the first elements of a head, which are rotated
  bool half_width;
};

// RMSNorm of the queries and of the new keys, before their rotation: of each head, or of all heads of a token together.
struct QkNorm {
  const void *q_weight, *k_weight;  // [head_dim]; row_wise [heads, head_dim], [kv_heads, head_dim]; null: no norm
  RmsNormOptions options;
  bool row_wise;
};

struct DecodeAttentionParams {
  const void* q;  // [batch, tokens, heads, head_dim]
  int64_t q_batch, q_token, q_head;
  KvCache cache;
  const int32_t* cache_seqlens;  // [batch]: keys in the cache, those of the new tokens included
  const int32_t* cache_leftpad;  // [batch]: index of the first key after left padding; null: 0 for all
  void* out;                     // [batch, tokens, heads, head_dim], contiguous
  int64_t batch, tokens, heads, kv_heads, head_dim;
  double softmax_scale;
  int64_t window_left;  // a query attends to at most this many keys before its own; -1: to all
  double softcap;       // scores become softcap * tanh(score / softcap); 0: unchanged

  // The fused form, for one new token per sequence: the kernel rotates q and the new key, writes the new key and value
  // to token cache_seqlens[b] - 1 of the cache, and attends to them too. Null: q is rotated, the cache is complete.
  const void *new_k, *new_v;  // [batch, kv_heads, head_dim]
  int64_t new_k_batch, new_k_head, new_v_batch, new_v_head;
  RopeTables rope;           // else without elements that are rotated
  const int32_t* positions;  // [batch]: rows of the rope tables
  QkNorm norm;

  // CUDA only. With `prefetch_cache` all inputs but q, new_k and new_v may be read before the previous kernels of the
  // stream have ended. The caller promises that none of those that may still run then writes them: see ptx.cuh.
  bool prefetch_cache;
  int64_t max_seqlen;  // expected maximum of cache_seqlens, or 0: unknown; a hint for the plan, no limit
  void* workspace;     // DecodeRoute::workspace_bytes
  int* counters;       // kDecodeAttentionCounters of them: zero before the launch, and zero again after it
};

struct RopeKvWriteParams {
  void* q;        // [batch, tokens, heads, head_dim], rotated in place
  const void* k;  // [batch, tokens, kv_heads, head_dim]
  const void* v;
  int64_t q_batch, q_token, q_head;
  int64_t k_batch, k_token, k_head;
  int64_t v_batch, v_token, v_head;
  QkNorm norm;
  RopeTables rope;
  const void* position_ids;  // [batch, tokens] by the strides below, int32 or int64
  bool position_ids_int64;
  int64_t positions_batch, positions_token;
  const int32_t* cache_seqlens;  // [batch]: token t becomes key cache_seqlens[b] - tokens + t of its sequence
  KvCache cache;
  int64_t batch, tokens, heads, kv_heads, head_dim;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + head_dim / 2)
};

}  // namespace llmk
