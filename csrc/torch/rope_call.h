// What rope and rms_norm_rope have in common: the checks of their arguments and the parameters of a rotation.
#pragma once
#include <optional>
#include <tuple>

#include "backend.h"
#include "cpu/rope.h"
#include "params/rope.h"
#include "positions.h"
#if LLMK_CUDA
#include "kernels/rope/rope.h"
#endif

namespace llmk {

// The axes of q and k.
struct RopeLayout {
  int64_t tokens, heads;
  explicit RopeLayout(bool heads_first) : tokens(heads_first ? 2 : 1), heads(heads_first ? 1 : 2) {}
};

// All arguments of a rotation but q and k.
struct RopeCall {
  const char* op;
  const Tensor& cos;
  const Tensor& sin;
  const std::optional<Tensor>& position_ids;
  bool heads_first, interleaved;
  std::optional<int64_t> rotary_dim;
  bool transposed = false;
  bool may_have_float_angles = false;  // cos and sin may be float32 whatever q is
};

// The shapes and dtypes of q and k.
inline void check_heads(const RopeCall& call, const Argument& given_q, const Argument& given_k) {
  const Tensor &q = *given_q, &k = *given_k;
  const RopeLayout layout(call.heads_first);
  const char* shape_text = call.heads_first ? "(batch, heads, tokens, head_dim)" : "(batch, tokens, heads, head_dim)";
  for (const Argument& argument : {given_q, given_k}) {
    LLMK_CHECK(argument->dim() == 4, call.op, argument.name, " must have shape ", shape_text, ", got ",
               shape(*argument));
  }
  check_dtype(call.op, given_k, given_q);
  LLMK_CHECK(k.size(0) == q.size(0) && k.size(layout.tokens) == q.size(layout.tokens) && k.size(3) == q.size(3),
             call.op, given_k.name, " must have the batch, tokens and head_dim of ", given_q.name, ", ", shape(q),
             ", got ", shape(k));
}

inline void check_unit_last_stride(const char* op, std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    LLMK_CHECK(has_unit_last_stride(*argument), op, argument.name,
               " must be contiguous along head_dim to be rotated in place, got strides ", text(argument->strides()));
  }
}

// cos and sin must be (tokens, width), (1 or batch, tokens, width), or a table (positions, width) when there are
// position_ids.
inline void check_angles(const RopeCall& call, const Tensor& q, int64_t rotary_dim) {
  const Tensor& cos = call.cos;
  if (!call.may_have_float_angles || cos.scalar_type() != ScalarType::Float) {
    check_dtype(call.op, {"cos", cos}, {"q", q});
  }
  const auto sizes = cos.sizes();
  const int64_t dims = static_cast<int64_t>(sizes.size()), width = dims > 0 ? sizes[dims - 1] : 0;
  LLMK_CHECK(width == rotary_dim || width * 2 == rotary_dim, call.op,
             "cos must have rotary_dim or rotary_dim / 2 columns (rotary_dim is ", rotary_dim, "), got shape ",
             shape(cos));
  const int64_t batch = q.size(0), tokens = q.size(RopeLayout(call.heads_first).tokens);
  if (call.position_ids) {
    LLMK_CHECK(dims == 2 && (sizes[0] > 0 || batch * tokens == 0), call.op, "cos must be a table of shape (positions, ",
               width, ") when position_ids are given, got ", shape(cos));
  } else {
    const bool fits =
        (dims == 2 && sizes[0] == tokens) || (dims == 3 && (sizes[0] == 1 || sizes[0] == batch) && sizes[1] == tokens);
    LLMK_CHECK(fits, call.op, "cos must have shape [", tokens, ", ", width, "], [1, ", tokens, ", ", width, "] or [",
               batch, ", ", tokens, ", ", width, "], got ", shape(cos));
  }
  check_like(call.op, {"sin", call.sin}, {"cos", cos});
}

inline RopeTensor rope_tensor(const Tensor& in, const Tensor& out, const RopeLayout& layout) {
  return {in.const_data_ptr(), out.mutable_data_ptr(),    in.size(layout.heads),
          in.stride(0),        in.stride(layout.tokens),  in.stride(layout.heads),
          out.stride(0),       out.stride(layout.tokens), out.stride(layout.heads)};
}

// The parameters of a rotation, and the angles that they point to.
struct RopeArguments {
  RopeParams params;
  Tensor cos, sin;
};

// Checks the angles and the positions; q and k have been checked.
inline RopeArguments make_rope_arguments(const RopeCall& call, const Tensor& q, const Tensor& k, const Tensor& q_out,
                                         const Tensor& k_out) {
  const int64_t width = call.cos.dim() > 0 ? call.cos.size(call.cos.dim() - 1) : 0;
  const int64_t rotary_dim = call.rotary_dim.value_or(width), head_dim = q.size(3);
  const bool fits = rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= head_dim;
  LLMK_CHECK(fits || call.rotary_dim, call.op, "cos must have an even number of columns, at most head_dim, ", head_dim,
             ", got shape ", shape(call.cos));
  LLMK_CHECK(fits, call.op, "rotary_dim must be even, positive and at most head_dim, ", head_dim, ", got ", rotary_dim);
  check_angles(call, q, rotary_dim);
  RopeArguments arguments{{}, with_unit_last_stride(call.cos), with_unit_last_stride(call.sin)};
  const Tensor &cos = arguments.cos, &sin = arguments.sin;
  const RopeLayout layout(call.heads_first);
  if (call.position_ids) check_position_ids(call.op, *call.position_ids, q.size(0), q.size(layout.tokens));

  RopeParams& params = arguments.params;
  params.q = rope_tensor(q, q_out, layout);
  params.k = rope_tensor(k, k_out, layout);
  params.cos = cos.const_data_ptr();
  params.sin = sin.const_data_ptr();
  if (call.position_ids) {
    const Tensor& position_ids = *call.position_ids;
    params.position_ids = position_ids.const_data_ptr();
    params.position_ids_int64 = position_ids.scalar_type() == ScalarType::Long;
    std::tie(params.positions_batch, params.positions_token) = batch_and_token_strides(position_ids, 0);
    params.cos_row = cos.stride(0);
    params.sin_row = sin.stride(0);
    params.table_rows = cos.size(0);
  } else {
    std::tie(params.cos_batch, params.cos_token) = batch_and_token_strides(cos, 1);
    std::tie(params.sin_batch, params.sin_token) = batch_and_token_strides(sin, 1);
  }
  params.batch = q.size(0);
  params.tokens = q.size(layout.tokens);
  params.head_dim = head_dim;
  params.rotary_dim = rotary_dim;
  params.half_width = cos.size(cos.dim() - 1) != rotary_dim;
  params.interleaved = call.interleaved;
  params.transposed = call.transposed;
  return arguments;
}

// What the kernel of a device can do with these positions and this many tokens.
inline void check_on_cpu(const char* op, const RopeParams& params) {
  if (!params.position_ids) return;
  const int64_t bad = cpu::first_bad_position(params);
  LLMK_CHECK(bad < 0, op, "position_ids must lie in [0, ", params.table_rows, "), the rows of cos, but [",
             bad / params.tokens, ", ", bad % params.tokens, "] does not");
}
#if LLMK_CUDA
inline void check_on_gpu(const char* op, const RopeParams& params) {
  LLMK_CHECK(params.batch * params.tokens <= kernels::kMaxRopeTokens, op,
             "q must have fewer than 2^31 tokens (batch * tokens) on a GPU, got ", params.batch * params.tokens);
}
#endif

// Whether the elements fill a range of memory without gaps or overlaps. Eager elementwise arithmetic then returns a
// tensor of the same strides.
inline bool is_dense(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;  // the stride of the next larger dimension
  for (int remaining = 4; remaining > 0; --remaining) {
    int next = 0;
    while (next < 4 && (sizes[next] <= 1 || strides[next] != expected)) ++next;
    if (next == 4) break;
    expected *= sizes[next];
  }
  return expected == tensor.numel();
}

// In the memory order of `tensor` if that keeps heads contiguous.
inline Tensor output_like(const Tensor& tensor) {
  if (is_dense(tensor) && tensor.stride(3) == 1) {  // the usual case, without a call of the dispatcher
    return aten::empty_strided(tensor.sizes(), tensor.strides().data(), dtype_code(tensor), tensor);
  }
  Tensor out = aten::empty_like(tensor);
  return has_unit_last_stride(out) ? out : empty_rows(tensor);
}

}  // namespace llmk
