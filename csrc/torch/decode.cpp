// decode_layer: one token per sequence through a decoder layer, composed of the library's own ops:
//
//   qkv = rms_norm(hidden) Wqkv^T + b              rms_norm_linear
//   a = attention(rope(q), cache + rope(k), v)     rope_decode_attention: rotates, writes the cache, attends
//   hidden += a Wo^T                               linear_add_
//   m = silu(g) u, [g | u] = rms_norm(hidden) W^T  rms_norm_swiglu_linear
//   hidden += m Wdown^T                            linear_add_
//
// Five launches on a GPU in bfloat16 and for up to 16 sequences. In float16 or for more, the norms are launches of
// their own, which makes seven; where cuBLAS takes over there are more. They are chained by programmatic dependent
// launch: each requests its weights, or the keys and values of old tokens, while its predecessor still runs. The former
// is sound because weights have long been there when a step begins: nothing here writes them, and who has just done so
// did it by kernels that let nothing begin before they have ended, as PyTorch's do. The latter is sound because what a
// step finds in the cache was written before `lengths` was last changed, and because the kernel that changed it is such
// a one, too. It allocates what lies between the launches and is meant to be captured into a CUDA graph.
//
// decode_step: that for every layer, then logits = rms_norm(hidden) Whead^T + b. One launch for all of it, with
// barriers of the whole grid in between, was given up: for one sequence on an H200 it took from 2 % less (a Llama of 8
// billion parameters) over 4 % more (Qwen2.5, 7 billion) to 59 % more (half a billion).
#include <type_traits>

#include "backend.h"
#include "step.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

void decode_layer(const Tensor& hidden, const Tensor& input_norm, const Tensor& qkv_weight,
                  std::optional<Tensor> qkv_bias, const Tensor& o_weight, std::optional<Tensor> o_bias,
                  const Tensor& post_norm, const Tensor& gate_up_weight, const Tensor& down_weight, const Tensor& cos,
                  const Tensor& sin, const Tensor& positions, const Tensor& slots, const Tensor& lengths,
                  std::optional<Tensor> starts, const Tensor& k_cache, const Tensor& v_cache,
                  std::optional<Tensor> block_table, int64_t heads, double eps, double weight_offset,
                  bool cast_before_weight, std::optional<double> scale, int64_t window) {
  constexpr const char* op = "decode_layer";
  LLMK_CHECK(hidden.dim() == 2, op, "hidden must have shape (batch, hidden), got ", shape(hidden));
  LLMK_CHECK(k_cache.dim() == 4, op, "k_cache must have shape (batch or pages, tokens, kv_heads, head_dim), got ",
             shape(k_cache));
  const int64_t columns = (heads + 2 * k_cache.size(2)) * k_cache.size(3);
  LLMK_CHECK(qkv_weight.dim() == 2 && qkv_weight.size(0) == columns, op, "qkv_weight must have shape [", columns, ", ",
             hidden.size(1), "] ((heads + 2 kv_heads) head_dim, hidden), got ", shape(qkv_weight));
  if (hidden.numel() == 0) return;
  constexpr bool kSettled = true;  // weights, tables, and what was in the cache before this step
  const Tensor qkv =
      rms_norm_linear(hidden, input_norm, qkv_weight, qkv_bias, eps, weight_offset, cast_before_weight, kSettled);
  const Tensor attended = rope_decode_attention(qkv, cos, sin, positions, slots, lengths, starts, k_cache, v_cache,
                                                block_table, heads, scale, window, 0.0, kSettled);
  linear_add_(hidden, attended, o_weight, o_bias, kSettled);
  const Tensor activated =
      rms_norm_swiglu_linear(hidden, post_norm, gate_up_weight, eps, weight_offset, cast_before_weight, kSettled);
  linear_add_(hidden, activated, down_weight, std::nullopt, kSettled);
}

Tensor decode_step(const Tensor& hidden, const std::vector<Tensor>& input_norms, const std::vector<Tensor>& qkv_weights,
                   const std::vector<Tensor>& qkv_biases, const std::vector<Tensor>& o_weights,
                   const std::vector<Tensor>& o_biases, const std::vector<Tensor>& post_norms,
                   const std::vector<Tensor>& gate_up_weights, const std::vector<Tensor>& down_weights,
                   const Tensor& norm, const Tensor& head, std::optional<Tensor> head_bias, const Tensor& cos,
                   const Tensor& sin, const Tensor& positions, const Tensor& slots, const Tensor& lengths,
                   std::optional<Tensor> starts, const std::vector<Tensor>& k_caches,
                   const std::vector<Tensor>& v_caches, int64_t heads, double eps, double weight_offset,
                   bool cast_before_weight, std::optional<double> scale, const std::vector<int64_t>& windows) {
  constexpr const char* op = "decode_step";
  const size_t layers = input_norms.size();
  const auto check = [&](const char* name, const auto& list, bool may_be_empty = false) {
    LLMK_CHECK(list.size() == layers || (may_be_empty && list.empty()), op, name, " must have one ",
               std::is_same_v<decltype(list), const std::vector<Tensor>&> ? "tensor" : "number", " per layer (", layers,
               may_be_empty ? ") or none, got " : "), got ", list.size());
  };
  check("qkv_weights", qkv_weights);
  check("qkv_biases", qkv_biases, true);
  check("o_weights", o_weights);
  check("o_biases", o_biases, true);
  check("post_norms", post_norms);
  check("gate_up_weights", gate_up_weights);
  check("down_weights", down_weights);
  check("k_caches", k_caches);
  check("v_caches", v_caches);
  check("windows", windows);
  const auto bias = [](const std::vector<Tensor>& biases, size_t i) {
    return biases.empty() ? std::nullopt : std::optional(biases[i]);
  };
  for (size_t i = 0; i < layers; ++i) {
    decode_layer(hidden, input_norms[i], qkv_weights[i], bias(qkv_biases, i), o_weights[i], bias(o_biases, i),
                 post_norms[i], gate_up_weights[i], down_weights[i], cos, sin, positions, slots, lengths, starts,
                 k_caches[i], v_caches[i], std::nullopt, heads, eps, weight_offset, cast_before_weight, scale,
                 windows[i]);
  }
  return rms_norm_linear(hidden, norm, head, head_bias, eps, weight_offset, cast_before_weight, true);
}

void register_ops(StableLibrary& ops) {
  ops.impl("decode_layer", TORCH_BOX(&decode_layer));
  ops.impl("decode_step", TORCH_BOX(&decode_step));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
