// The largest sizes that the attention kernels take. Plain host code.
#pragma once
#include <cstdint>

namespace llmk::kernels {

constexpr int kMaxHeadDim = 512;  // of decode_attention

// Of attention over prompts.
constexpr int64_t kMaxFlashHeadDim = 256;
constexpr int64_t kMaxFlashTokens = int64_t{1} << 30;  // positions are int

}  // namespace llmk::kernels
