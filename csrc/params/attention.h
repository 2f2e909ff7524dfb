// What the attention kernels of a decode step are told, on either device. Strides count elements; head dimensions are
// contiguous.
#pragma once
#include <cstdint>

namespace llmk {

// Keys and values of all sequences. Contiguous: page b is sequence b and holds all of its capacity. Paged: the pages
// of sequence b are block_table[b * table_stride ...].
struct KvCache {
  void* k;  // [pages, page_size, kv_heads, head_dim] by the strides below
  void* v;
  int64_t k_page, k_token, k_head;  // strides
  int64_t v_page, v_token, v_head;
  int64_t pages, page_size;
  const int32_t* block_table;  // [batch, table_stride], or null: contiguous
  int64_t table_stride;
  int64_t capacity;  // keys per sequence: page_size, times the columns of the block table if there is one
};

// Rotary angles: tables of head_dim columns, or of head_dim / 2 when `half_width`.
struct RopeTables {
  const void *cos, *sin;
  int64_t cos_row, sin_row;  // strides between rows
  int64_t rows;              // valid positions are [0, rows)
  bool half_width;
};

struct DecodeAttentionParams {
  const void* q;  // [batch, tokens, heads, head_dim]
  int64_t q_batch, q_token, q_head;
  KvCache cache;
  const int32_t* cache_seqlens;  // [batch]: live keys, the new ones included
  const int32_t* cache_leftpad;  // [batch]: the first key, behind left padding; or null: 0
  void* out;                     // [batch, tokens, heads, head_dim], contiguous
  int64_t batch, tokens, heads, kv_heads, head_dim;
  double softmax_scale;
  int64_t window_left;  // a query sees so many keys before its own, or -1: all
  double softcap;       // scores become softcap * tanh(score / softcap), or 0: they stay

  // The fused form, for one new token per sequence; null: q is rotated and the cache is complete. q is rotated on its
  // way, and the new key (rotated) and value are written to token cache_seqlens[b] - 1 of the cache and attended to.
  const void *new_k, *new_v;  // [batch, kv_heads, head_dim]
  int64_t new_k_batch, new_k_head, new_v_batch, new_v_head;
  RopeTables rope;
  const int32_t* positions;  // [batch]: rows of the rope tables

  // CUDA only. `prefetch_cache` promises that everything but q, new_k and new_v was complete before the kernel that
  // precedes this one in the stream could begin: see decode_attention.cuh.
  bool prefetch_cache;
  int64_t max_seqlen;  // what cache_seqlens will not exceed, as far as the caller knows, or 0: for speed alone
  void* workspace;     // decode_attention_workspace_bytes() of them
  int* counters;       // kDecodeAttentionCounters of them; zero, and zero again afterwards
};

struct RopeKvWriteParams {
  void* q;        // [batch, tokens, heads, head_dim], rotated in place
  const void* k;  // [batch, tokens, kv_heads, head_dim]
  const void* v;
  int64_t q_batch, q_token, q_head;
  int64_t k_batch, k_token, k_head;
  int64_t v_batch, v_token, v_head;
  RopeTables rope;
  const void* position_ids;  // [batch, tokens] by the strides below, int32 or int64
  bool position_ids_int64;
  int64_t positions_batch, positions_token;
  const int32_t* cache_seqlens;  // [batch]: token t is written to place cache_seqlens[b] - tokens + t
  KvCache cache;
  int64_t batch, tokens, heads, kv_heads, head_dim;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + head_dim / 2)
};

}  // namespace llmk
