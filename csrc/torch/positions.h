// position_ids of rope and rope_kv_write, and other tensors with a row for each token or for each token of a sequence.
#pragma once
#include <utility>

#include "binding.h"

namespace llmk {

inline void check_position_ids(const char* op, const Tensor& position_ids, int64_t batch, int64_t tokens) {
  const ScalarType type = position_ids.scalar_type();
  LLMK_CHECK(type == ScalarType::Int || type == ScalarType::Long, op, "position_ids must be int32 or int64, got ",
             name(type));
  const bool fits = (position_ids.dim() == 1 && position_ids.size(0) == tokens) ||
                    (position_ids.dim() == 2 && (position_ids.size(0) == 1 || position_ids.size(0) == batch) &&
                     position_ids.size(1) == tokens);
  LLMK_CHECK(fits, op, "position_ids must have shape [", tokens, "], [1, ", tokens, "] or [", batch, ", ", tokens,
             "], got ", shape(position_ids));
}

// Strides over (batch, tokens) of a tensor of shape (tokens, ...), (1, tokens, ...) or (batch, tokens, ...) that has
// `inner` dimensions after the tokens.
inline std::pair<int64_t, int64_t> batch_and_token_strides(const Tensor& tensor, int64_t inner) {
  const bool has_batch = tensor.dim() == 2 + inner;
  const int64_t token = tensor.stride(has_batch ? 1 : 0);
  return {has_batch && tensor.size(0) > 1 ? tensor.stride(0) : 0, token};
}

}  // namespace llmk
