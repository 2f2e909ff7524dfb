// attention, over prompts, and its backward.
#include "cpu/flash_attention.h"

#include "backend.h"
#include "heads.h"
#if LLMK_CUDA
#include "kernels/attention/flash_attention.h"
#include "kernels/attention/flash_attention_backward.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// The options of both ops.
struct Options {
  const std::optional<Tensor>&k_begin, &k_end, &sinks;
  std::optional<double> softmax_scale;
  int64_t window_left, window_right;
  double softcap;
  const std::optional<Tensor>&attn_mask, &alibi_slopes;
};

void check_window(const char* op, const char* name, int64_t window) {
  LLMK_CHECK(window >= -1, op, name, " must be at least -1 (unlimited), got ", window);
}

// int32 (batch,) or (batch, q_tokens)
void check_keys(const char* op, const Argument& argument, const Argument& q) {
  if (!argument) return;
  LLMK_CHECK(argument->scalar_type() == ScalarType::Int, op, argument.name, " must be int32, got ",
             name(argument->scalar_type()));
  const int64_t dim = argument->dim();
  LLMK_CHECK((dim == 1 || (dim == 2 && argument->size(1) == q->size(1))) && argument->size(0) == q->size(0), op,
             argument.name, " must have shape [", q->size(0), "] (the batch) or [", q->size(0), ", ", q->size(1),
             "] (the batch and its queries), got ", shape(*argument));
}

// What can be expanded to (batch, heads, q_tokens, k_tokens).
void check_mask(const char* op, const Argument& mask, const Argument& q, int64_t k_tokens) {
  if (!mask) return;
  const ScalarType type = mask->scalar_type();
  LLMK_CHECK(type == ScalarType::Bool || type == ScalarType::Float || type == q->scalar_type(), op, mask.name,
             " must be bool, float32 or of the dtype of q, ", name(q->scalar_type()), ", got ", name(type));
  const int64_t sizes[] = {q->size(0), q->size(2), q->size(1), k_tokens};
  const int64_t dims = mask->dim();
  bool fits = dims <= 4;
  for (int64_t i = 0; fits && i < dims; ++i) fits = mask->size(i) == 1 || mask->size(i) == sizes[4 - dims + i];
  LLMK_CHECK(fits, op, mask.name, " must be broadcastable to ", text({sizes, 4}),
             " (batch, heads, q_tokens, k_tokens), got shape ", shape(*mask));
}

// float32 (heads,) or (batch, heads)
void check_slopes(const char* op, const Argument& slopes, const Argument& q) {
  if (!slopes) return;
  LLMK_CHECK(slopes->scalar_type() == ScalarType::Float, op, slopes.name, " must be float32, got ",
             name(slopes->scalar_type()));
  const int64_t batch = q->size(0), heads = q->size(2), dim = slopes->dim();
  LLMK_CHECK((dim == 1 || (dim == 2 && slopes->size(0) == batch)) && slopes->size(dim - 1) == heads, op, slopes.name,
             " must have shape [", heads, "] (heads) or [", batch, ", ", heads, "] (batch and heads), got ",
             shape(*slopes));
}

void check_inputs(const char* op, const Argument& q, const Argument& k, const Argument& v, const Options& options) {
  check_heads(op, q, "(batch, q_tokens, heads, head_dim)");
  LLMK_CHECK(q->size(3) > 0, op, "q must have a head_dim of at least 1, got shape ", shape(*q));
  check_heads(op, k, "(batch, k_tokens, kv_heads, head_dim)");
  check_dtype(op, k, q);
  LLMK_CHECK(k->size(0) == q->size(0), op, "k must have the batch of q, ", q->size(0), ", got shape ", shape(*k));
  LLMK_CHECK(k->size(3) == q->size(3), op, "k must have the head_dim of q, ", q->size(3), ", got shape ", shape(*k));
  check_like(op, v, k);
  check_head_counts(op, q, q->size(2), k, k->size(2));
  check_keys(op, {"k_begin", options.k_begin}, q);
  check_keys(op, {"k_end", options.k_end}, q);
  check_vector(op, {"sinks", options.sinks}, q, q->size(2), "heads");
  check_mask(op, {"attn_mask", options.attn_mask}, q, k->size(1));
  check_slopes(op, {"alibi_slopes", options.alibi_slopes}, q);
  check_finite(op, "softmax_scale", options.softmax_scale.value_or(1));
  check_window(op, "window_left", options.window_left);
  check_window(op, "window_right", options.window_right);
  check_not_negative(op, "softcap", options.softcap);
#if LLMK_CUDA
  LLMK_CHECK(!q->is_cuda() || q->size(3) <= kernels::kMaxFlashHeadDim || q->numel() == 0, op,
             "q must have a head_dim of at most ", kernels::kMaxFlashHeadDim, " on a GPU, got ", q->size(3));
#endif
}

// The first or the last keys, of each sequence or of each of its queries, and their strides.
void describe_keys(const std::optional<Tensor>& keys, const int32_t*& pointer, int64_t& of_batch, int64_t& of_query) {
  pointer = static_cast<const int32_t*>(data(keys));
  of_batch = keys ? keys->stride(0) : 0;
  of_query = keys && keys->dim() == 2 ? 1 : 0;
}

// `slopes`: contiguous.
ScoreBias describe_bias(const std::optional<Tensor>& mask, const std::optional<Tensor>& slopes, ScalarType input) {
  ScoreBias bias{};
  if (slopes) {
    bias.slopes = static_cast<const float*>(slopes->const_data_ptr());
    bias.slopes_batch = slopes->dim() == 2 ? slopes->size(1) : 0;
  }
  if (!mask) return bias;
  bias.mask = mask->const_data_ptr();
  const ScalarType type = mask->scalar_type();
  bias.type = type == ScalarType::Bool ? ScoreBias::Type::kBool
              : type == input          ? ScoreBias::Type::kInput
                                       : ScoreBias::Type::kFloat;
  int64_t* const strides[] = {&bias.key, &bias.query, &bias.head, &bias.batch};
  const int64_t dims = mask->dim();
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t dim = dims - 1 - i;
    *strides[i] = mask->size(dim) == 1 ? 0 : mask->stride(dim);
  }
  const auto even = [](int64_t stride) { return stride % 2 == 0; };
  bias.pairs = bias.key == 1 && even(bias.query) && even(bias.head) && even(bias.batch) &&
               reinterpret_cast<uintptr_t>(bias.mask) % (2 * mask->element_size()) == 0;
  return bias;
}

// The inputs, with contiguous heads, and the options, whose tensors but the mask have a last stride of 1.
void describe(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options, FlashAttentionParams& params) {
  params.q = q.const_data_ptr();
  params.k = k.const_data_ptr();
  params.v = v.const_data_ptr();
  params.batch = q.size(0);
  params.q_tokens = q.size(1);
  params.k_tokens = k.size(1);
  params.heads = q.size(2);
  params.kv_heads = k.size(2);
  params.head_dim = q.size(3);
  params.q_batch = q.stride(0), params.q_token = q.stride(1), params.q_head = q.stride(2);
  params.k_batch = k.stride(0), params.k_token = k.stride(1), params.k_head = k.stride(2);
  params.v_batch = v.stride(0), params.v_token = v.stride(1), params.v_head = v.stride(2);
  params.softmax_scale = options.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(params.head_dim)));
  params.softcap = options.softcap;
  // A window that hides nothing is none: the first query is at k_tokens - q_tokens, the last one at k_tokens - 1.
  params.window_left = options.window_left >= params.k_tokens - 1 ? -1 : options.window_left;
  params.window_right = options.window_right >= params.q_tokens - 1 ? -1 : options.window_right;
  describe_keys(options.k_begin, params.k_begin, params.k_begin_batch, params.k_begin_query);
  describe_keys(options.k_end, params.k_end, params.k_end_batch, params.k_end_query);
  params.sinks = data(options.sinks);
  params.bias = describe_bias(options.attn_mask, options.alibi_slopes, q.scalar_type());
}

std::array<int64_t, 3> lse_sizes(const Tensor& q) { return {q.size(0), q.size(2), q.size(1)}; }
ScalarType lse_type(Dtype dtype) { return dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float; }

std::tuple<Tensor, Tensor> attention(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v,
                                     std::optional<Tensor> given_k_begin, std::optional<Tensor> given_k_end,
                                     std::optional<Tensor> given_sinks, std::optional<double> softmax_scale,
                                     int64_t window_left, int64_t window_right, double softcap,
                                     std::optional<Tensor> attn_mask, std::optional<Tensor> given_alibi_slopes) {
  constexpr const char* kOp = "attention";
  check_tensors(kOp, {{"q", given_q},
                      {"k", given_k},
                      {"v", given_v},
                      {"k_begin", given_k_begin},
                      {"k_end", given_k_end},
                      {"sinks", given_sinks},
                      {"attn_mask", attn_mask},
                      {"alibi_slopes", given_alibi_slopes}});
  const Dtype dtype = to_dtype(kOp, {"q", given_q});
  check_inputs(kOp, {"q", given_q}, {"k", given_k}, {"v", given_v},
               {given_k_begin, given_k_end, given_sinks, softmax_scale, window_left, window_right, softcap, attn_mask,
                given_alibi_slopes});
  Tensor y = empty_rows(given_q);
  const auto sizes = lse_sizes(given_q);
  Tensor lse = empty({sizes.data(), sizes.size()}, lse_type(dtype), given_q);
  if (y.numel() == 0) return {y, lse};

  const Tensor q = with_unit_last_stride(given_q), k = with_unit_last_stride(given_k),
               v = with_unit_last_stride(given_v);
  const std::optional<Tensor> k_begin = contiguous(given_k_begin), k_end = contiguous(given_k_end),
                              sinks = contiguous(given_sinks);
  const std::optional<Tensor> alibi_slopes =
      given_alibi_slopes ? std::optional(aten::contiguous(*given_alibi_slopes)) : std::nullopt;
  FlashAttentionParams params{};
  describe(q, k, v, {k_begin, k_end, sinks, softmax_scale, window_left, window_right, softcap, attn_mask, alibi_slopes},
           params);
  params.y = y.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  on_device(kOp, q, LLMK_CUDA_ONLY([&](auto stream) { return kernels::flash_attention(params, dtype, stream); }), [&] {
    const int64_t tasks = cpu::flash_attention_tasks(params);
    const int64_t work = params.batch * params.heads * params.q_tokens * params.k_tokens / tasks * params.head_dim;
    parallel_for(tasks, work, [&](int64_t begin, int64_t end) { cpu::flash_attention(params, dtype, begin, end); });
  });
  return {y, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& given_grad_y, std::optional<Tensor> given_grad_lse, const Tensor& given_q, const Tensor& given_k,
    const Tensor& given_v, const Tensor& given_y, const Tensor& given_lse, std::optional<Tensor> given_k_begin,
    std::optional<Tensor> given_k_end, std::optional<Tensor> given_sinks, std::optional<double> softmax_scale,
    int64_t window_left, int64_t window_right, double softcap, std::optional<Tensor> attn_mask,
    std::optional<Tensor> given_alibi_slopes) {
  constexpr const char* kOp = "attention_backward";
  const Argument q_argument("q", given_q), lse_argument("lse", given_lse),
      grad_lse_argument("grad_lse", given_grad_lse);
  check_tensors(kOp, {{"grad_y", given_grad_y},
                      grad_lse_argument,
                      q_argument,
                      {"k", given_k},
                      {"v", given_v},
                      {"y", given_y},
                      lse_argument,
                      {"k_begin", given_k_begin},
                      {"k_end", given_k_end},
                      {"sinks", given_sinks},
                      {"attn_mask", attn_mask},
                      {"alibi_slopes", given_alibi_slopes}});
  const Dtype dtype = to_dtype(kOp, q_argument);
  check_inputs(kOp, q_argument, {"k", given_k}, {"v", given_v},
               {given_k_begin, given_k_end, given_sinks, softmax_scale, window_left, window_right, softcap, attn_mask,
                given_alibi_slopes});
  check_like(kOp, {"grad_y", given_grad_y}, q_argument);
  check_like(kOp, {"y", given_y}, q_argument);
  const auto sizes = lse_sizes(given_q);
  const IntHeaderOnlyArrayRef lse_shape{sizes.data(), sizes.size()};
  LLMK_CHECK(given_lse.scalar_type() == lse_type(dtype) && given_lse.sizes().equals(lse_shape), kOp, "lse must be ",
             name(lse_type(dtype)), " of shape ", text(lse_shape), ", got ", name(given_lse.scalar_type()),
             " of shape ", shape(given_lse));
  if (given_grad_lse) check_like(kOp, grad_lse_argument, lse_argument);

  Tensor grad_q = empty_rows(given_q), grad_k = empty_rows(given_k), grad_v = empty_rows(given_v);
  const int64_t count = given_sinks ? given_q.size(2) : 0;
  Tensor grad_sinks = empty({&count, 1}, dtype_code(given_q), given_q);
  if (grad_q.numel() + grad_k.numel() + count == 0) return {grad_q, grad_k, grad_v, grad_sinks};

  const Tensor q = with_unit_last_stride(given_q), k = with_unit_last_stride(given_k),
               v = with_unit_last_stride(given_v), grad_y = with_unit_last_stride(given_grad_y),
               y = aten::contiguous(given_y), lse = aten::contiguous(given_lse);
  const std::optional<Tensor> k_begin = contiguous(given_k_begin), k_end = contiguous(given_k_end),
                              sinks = contiguous(given_sinks);
  const std::optional<Tensor> alibi_slopes =
      given_alibi_slopes ? std::optional(aten::contiguous(*given_alibi_slopes)) : std::nullopt;
  const std::optional<Tensor> grad_lse =
      given_grad_lse ? std::optional(aten::contiguous(*given_grad_lse)) : std::nullopt;
  FlashAttentionBackwardParams params{};
  describe(q, k, v, {k_begin, k_end, sinks, softmax_scale, window_left, window_right, softcap, attn_mask, alibi_slopes},
           params);
  params.y = const_cast<void*>(y.const_data_ptr());
  params.lse = const_cast<void*>(lse.const_data_ptr());
  params.grad_y = grad_y.const_data_ptr();
  params.grad_y_batch = grad_y.stride(0), params.grad_y_token = grad_y.stride(1), params.grad_y_head = grad_y.stride(2);
  params.grad_lse = data(grad_lse);
  params.grad_q = grad_q.mutable_data_ptr();
  params.grad_k = grad_k.mutable_data_ptr();
  params.grad_v = grad_v.mutable_data_ptr();
  params.grad_sinks = given_sinks ? grad_sinks.mutable_data_ptr() : nullptr;
#if LLMK_CUDA
  std::optional<Tensor> statistics;
  if (q.is_cuda()) {
    const int64_t numbers = kernels::flash_attention_backward_workspace(params, dtype);
    statistics = empty({&numbers, 1}, ScalarType::Float, q);
    params.statistics = static_cast<float*>(statistics->mutable_data_ptr());
  }
#endif
  on_device(kOp, q,
            LLMK_CUDA_ONLY([&](auto stream) { return kernels::flash_attention_backward(params, dtype, stream); }), [&] {
              const int64_t tasks = cpu::flash_attention_backward_tasks(params);
              const int64_t pairs = params.batch * params.heads * params.q_tokens * params.k_tokens;
              parallel_for(tasks, 4 * pairs / tasks * params.head_dim, [&](int64_t begin, int64_t end) {
                cpu::flash_attention_backward(params, dtype, begin, end);
              });
            });
  return {grad_q, grad_k, grad_v, grad_sinks};
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "attention", TORCH_BOX(&attention));
  ops.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
