// Parameters of attention over prompts, on either device. Strides count elements; head dimensions are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

// What is added to the scores, behind their softcap: a mask, and -slope times the distance of the query to the key
// (ALiBi, Press et al. 2021).
struct ScoreBias {
  enum class Type : int8_t { kBool, kInput, kFloat };  // kInput: that of q, k and v

  // [batch, heads, q_tokens, k_tokens] by the strides, which may be 0; null: none. Of bool, false hides a key; of
  // numbers so do those below kHidden, such as -inf and the least number of a type.
  const void* mask;
  Type type;
  int64_t batch, head, query, key;
  bool pairs;           // the mask's elements 2i and 2i + 1 of a row are neighbours, aligned to both of them
  const float* slopes;  // [batch, heads], `slopes_batch` apart; null: none
  int64_t slopes_batch;

  explicit operator bool() const { return mask || slopes; }
};

constexpr float kHidden = -1e30f;

// Query i of q_tokens has position p = i + k_tokens - q_tokens, and sees the keys j in [0, k_tokens) with
// p - window_left <= j <= p + window_right and k_begin <= j < k_end. These two are of the sequence or of the query; of
// queries, neither may fall from one to the next. With k_seqlens, these numbers count instead of k_tokens.
struct FlashAttentionParams {
  const void* q;  // [batch, q_tokens, heads, head_dim]
  const void* k;  // [batch, k_tokens, kv_heads, head_dim]: query head h belongs to kv head h / (heads / kv_heads)
  const void* v;  // likewise
  void* y;        // [batch, q_tokens, heads, head_dim], contiguous
  // [batch, heads, q_tokens], contiguous: log(sum of e^score), -inf where there is no score. float; double for float64.
  void* lse;
  int64_t batch, q_tokens, k_tokens, heads, kv_heads, head_dim;
  int64_t q_batch, q_token, q_head;  // strides
  int64_t k_batch, k_token, k_head;
  int64_t v_batch, v_token, v_head;
  double softmax_scale;               // of q k
  double softcap;                     // scores become softcap * tanh(score / softcap); 0: unchanged
  int64_t window_left, window_right;  // -1: to all; causal: window_right is 0
  // [batch] or [batch, q_tokens], by these strides; k_begin null: 0, k_end null: k_tokens.
  const int32_t *k_begin, *k_end;
  int64_t k_begin_batch, k_begin_query, k_end_batch, k_end_query;  // those of queries are 0 or 1
  const void* sinks;  // [heads]: a score of each row without a value; null: none
  ScoreBias bias;

  // Keys and values in a cache, of the forward alone. How many a sequence has, [batch], of k_tokens that there is room
  // for; null: k_tokens.
  const int32_t* k_seqlens;
  // Pages instead of sequences, k_batch apart: key j is row j % page_size of page block_table[b][j / page_size]. Those
  // of a page that does not exist are zeros. Null: none.
  const int32_t* block_table;
  int64_t table_stride, page_size, pages;
};

// The gradients of q, k, v and sinks. y and lse are inputs here.
struct FlashAttentionBackwardParams : FlashAttentionParams {
  const void* grad_y;                               // [batch, q_tokens, heads, head_dim]
  int64_t grad_y_batch, grad_y_token, grad_y_head;  // strides
  const void* grad_lse;                             // as lse; null: zeros
  void *grad_q, *grad_k, *grad_v, *grad_sinks;      // contiguous; grad_sinks: null without sinks
  float* statistics;  // on a GPU: memory for flash_attention_backward_workspace() numbers, aligned to 16 bytes
};

}  // namespace llmk
