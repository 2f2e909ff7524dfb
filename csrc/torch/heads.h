// Checks of tensors of heads, shared by the attentions.
#pragma once
#include "binding.h"

namespace llmk {

inline void check_heads(const char* op, const Argument& argument, const char* axes) {
  LLMK_CHECK(argument->dim() == 4, op, argument.name, " must have shape ", axes, ", got ", shape(*argument));
}

// A multiple of the key heads for each query head; `q` and `k` may be packed with other heads.
inline void check_head_counts(const char* op, const Argument& q, int64_t heads, const Argument& k, int64_t kv_heads) {
  LLMK_CHECK(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, op, q.name, " must have a multiple of the heads of ",
             k.name, ", got ", heads, " and ", kv_heads);
}

// int32 (batch,)
inline void check_per_sequence(const char* op, const Argument& argument, int64_t batch) {
  if (!argument) return;
  LLMK_CHECK(argument->scalar_type() == ScalarType::Int, op, argument.name, " must be int32, got ",
             name(argument->scalar_type()));
  LLMK_CHECK(argument->dim() == 1 && argument->size(0) == batch, op, argument.name, " must have shape [", batch,
             "] (the batch), got ", shape(*argument));
}

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(with_unit_last_stride(*tensor)) : std::nullopt;
}

}  // namespace llmk
