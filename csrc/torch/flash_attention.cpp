// attention: over prompts.
#include "cpu/flash_attention.h"

#include "backend.h"
#include "heads.h"
#if LLMK_CUDA
#include "kernels/attention/flash_attention.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

constexpr const char* kOp = "attention";

void check_window(const char* name, int64_t window) {
  LLMK_CHECK(window >= -1, kOp, name, " must be at least -1 (unlimited), got ", window);
}

// Checks q, k and v.
void check_inputs(const Argument& q, const Argument& k, const Argument& v) {
  check_heads(kOp, q, "(batch, q_tokens, heads, head_dim)");
  LLMK_CHECK(q->size(3) > 0, kOp, "q must have a head_dim of at least 1, got shape ", shape(*q));
  check_heads(kOp, k, "(batch, k_tokens, kv_heads, head_dim)");
  check_dtype(kOp, k, q);
  LLMK_CHECK(k->size(0) == q->size(0), kOp, "k must have the batch of q, ", q->size(0), ", got shape ", shape(*k));
  LLMK_CHECK(k->size(3) == q->size(3), kOp, "k must have the head_dim of q, ", q->size(3), ", got shape ", shape(*k));
  check_like(kOp, v, k);
  check_head_counts(kOp, q, q->size(2), k, k->size(2));
}

// The inputs, with contiguous heads.
FlashAttentionParams describe(const Tensor& q, const Tensor& k, const Tensor& v) {
  FlashAttentionParams params{};
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
  return params;
}

std::tuple<Tensor, Tensor> attention(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v,
                                     std::optional<Tensor> given_k_begin, std::optional<Tensor> given_sinks,
                                     std::optional<double> softmax_scale, int64_t window_left, int64_t window_right,
                                     double softcap) {
  check_tensors(kOp,
                {{"q", given_q}, {"k", given_k}, {"v", given_v}, {"k_begin", given_k_begin}, {"sinks", given_sinks}});
  const Dtype dtype = to_dtype(kOp, {"q", given_q});
  check_inputs({"q", given_q}, {"k", given_k}, {"v", given_v});
  const int64_t batch = given_q.size(0), q_tokens = given_q.size(1), heads = given_q.size(2), dim = given_q.size(3);
  const int64_t k_tokens = given_k.size(1);
  check_per_sequence(kOp, {"k_begin", given_k_begin}, batch);
  check_vector(kOp, {"sinks", given_sinks}, {"q", given_q}, heads, "heads");
  check_finite(kOp, "softmax_scale", softmax_scale.value_or(1));
  check_window("window_left", window_left);
  check_window("window_right", window_right);
  check_not_negative(kOp, "softcap", softcap);

  Tensor y = empty_rows(given_q);
  const std::array<int64_t, 3> lse_sizes{batch, heads, q_tokens};
  Tensor lse = empty({lse_sizes.data(), 3}, ScalarType::Float, given_q);
  if (y.numel() == 0) return {y, lse};

  const Tensor q = with_unit_last_stride(given_q), k = with_unit_last_stride(given_k),
               v = with_unit_last_stride(given_v);
  const std::optional<Tensor> k_begin = contiguous(given_k_begin), sinks = contiguous(given_sinks);
  FlashAttentionParams params = describe(q, k, v);
  params.y = y.mutable_data_ptr();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  params.softmax_scale = softmax_scale.value_or(1 / std::sqrt(static_cast<double>(dim)));
  params.softcap = softcap;
  // A window that hides nothing is none: the first query is at k_tokens - q_tokens, the last one at k_tokens - 1.
  params.window_left = window_left >= k_tokens - 1 ? -1 : window_left;
  params.window_right = window_right >= q_tokens - 1 ? -1 : window_right;
  params.k_begin = static_cast<const int32_t*>(data(k_begin));
  params.sinks = data(sinks);
#if LLMK_CUDA
  LLMK_CHECK(!q.is_cuda() || dim <= kernels::kMaxFlashHeadDim, kOp, "q must have a head_dim of at most ",
             kernels::kMaxFlashHeadDim, " on a GPU, got ", dim);
#endif
  on_device(kOp, q, LLMK_CUDA_ONLY([&](auto stream) { return kernels::flash_attention(params, dtype, stream); }), [&] {
    const int64_t tasks = cpu::flash_attention_tasks(params), work = batch * heads * q_tokens * k_tokens / tasks * dim;
    parallel_for(tasks, work, [&](int64_t begin, int64_t end) { cpu::flash_attention(params, dtype, begin, end); });
  });
  return {y, lse};
}

void register_ops(StableLibrary& ops) { ops.impl("attention", TORCH_BOX(&attention)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
