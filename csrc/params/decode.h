// What the kernel of a whole decode step is told: one token through every layer of a model. Strides count elements;
// rows of weights are contiguous and follow each other without gaps.
#pragma once
#include <cstdint>

#include "params/attention.h"
#include "params/norm.h"

namespace llmk {

struct DecodeLayer {
  const void* input_norm;  // [hidden]
  const void* qkv;         // [(heads + 2 kv_heads) head_dim, hidden]
  const void* qkv_bias;    // or null
  const void* o;           // [hidden, heads head_dim]
  const void* o_bias;      // or null
  const void* post_norm;   // [hidden]
  const void* gate_up;     // [2 intermediate, hidden]: rows of the gate, then of the up projection
  const void* down;        // [hidden, intermediate]
  void *k, *v;             // the cache [capacity, kv_heads, head_dim] by the strides below
  int64_t window;          // at most so many of the last keys, or 0: all
};

constexpr int kMaxDecodeLayers = 128;

struct DecodeStepParams {
  int64_t layers, hidden_size, intermediate, heads, kv_heads, head_dim, vocab;
  void* hidden;  // [hidden]: the embedding of the token; overwritten
  void* logits;  // [vocab]
  const void* norm;
  const void* head;       // [vocab, hidden]
  const void* head_bias;  // or null
  RmsNormOptions norm_options;
  RopeTables rope;
  const int32_t* position;  // row of the rope tables
  const int32_t* length;    // live keys, the new one included: it goes to token length - 1 of the cache
  const int32_t* start;     // the first key, behind left padding; or null: 0
  int64_t capacity, k_token, k_head, v_token, v_head;
  double scale;
  void* workspace;  // decode_step_workspace_bytes() of them
  DecodeLayer layer[kMaxDecodeLayers];
};

}  // namespace llmk
