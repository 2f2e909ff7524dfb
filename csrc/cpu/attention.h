// Decode attention and its cache writes on the CPU.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "params/attention.h"

namespace llmk::cpu {

// Split-KV: how decode attention is divided among threads. Neither the plan nor the bits of the result depend on the
// number of threads.
struct AttentionPlan {
  int64_t query_tiles;  // per sequence and kv head; the queries of a tile share one reading of the keys
  int64_t splits;       // of the keys of a work tile; their partial outputs are merged if there is more than one
  int64_t tasks;        // number ((b * kv_heads + kv_head) * query_tiles + query_tile) * splits + split is that split
};

// `longest`: the most keys of a sequence.
AttentionPlan plan_decode_attention(const DecodeAttentionParams& params, int64_t longest);

// Bytes of the partial outputs of all tasks.
size_t attention_partials_bytes(const DecodeAttentionParams& params, const AttentionPlan& plan, Dtype dtype);

// Runs the tasks [begin, end). They write partial outputs, or the output if there is one split. No fused form.
void decode_attention(const DecodeAttentionParams& params, const AttentionPlan& plan, Dtype dtype, int64_t begin,
                      int64_t end);

// Merges the partial outputs of the queries at the flat indices (b * tokens + token) * heads + head in [begin, end).
void merge_attention(const DecodeAttentionParams& params, const AttentionPlan& plan, Dtype dtype, int64_t begin,
                     int64_t end);

// The tokens at the flat indices batch * tokens + token in [begin, end).
void rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, int64_t begin, int64_t end);

// The offset of a key or value in the cache: of the first element of head `head` of token `token`.
inline int64_t cache_offset(const KvCache& cache, int64_t b, int64_t token, int64_t head, bool is_value) {
  int64_t page = b, in_page = token;
  if (cache.block_table != nullptr) {
    page = cache.block_table[b * cache.table_stride + token / cache.page_size];
    in_page = token % cache.page_size;
  }
  return is_value ? page * cache.v_page + in_page * cache.v_token + head * cache.v_head
                  : page * cache.k_page + in_page * cache.k_token + head * cache.k_head;
}

}  // namespace llmk::cpu
