// Attention over prompts on the CPU.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/flash_attention.h"

namespace llmk::cpu {

// How many tasks there are: each is a query tile of a head of a sequence.
int64_t flash_attention_tasks(const FlashAttentionParams& params);

// Runs the tasks [begin, end). The result does not depend on how they are divided among threads.
void flash_attention(const FlashAttentionParams& params, Dtype dtype, int64_t begin, int64_t end);

// The same of its gradients: each task is a tile of keys or of queries, or the sink of a head.
int64_t flash_attention_backward_tasks(const FlashAttentionBackwardParams& params);
void flash_attention_backward(const FlashAttentionBackwardParams& params, Dtype dtype, int64_t begin, int64_t end);

}  // namespace llmk::cpu
