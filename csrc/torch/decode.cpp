// decode_layer: one token per sequence through a decoder layer, composed of the library's own ops:
//
//   qkv = rms_norm(hidden) Wqkv^T + b              rms_norm_linear
//   a = attention(rope(q), cache + rope(k), v)     rope_decode_attention: rotates, writes the cache, attends
//   hidden += a Wo^T                               linear_add_
//   m = silu(g) u, [g | u] = rms_norm(hidden) W^T  rms_norm_swiglu_linear
//   hidden += m Wdown^T                            linear_add_
//
// Five launches on a GPU, chained by programmatic dependent launch: each requests its weights, or the keys and values
// of old tokens, while its predecessor still runs. The latter is sound because what a step finds in the cache was
// written before `lengths` was last changed, and because the kernel that changed it (PyTorch's) lets nothing begin
// before it has ended. It allocates what lies between the launches and is meant to be captured into a CUDA graph.
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
  const Tensor qkv = rms_norm_linear(hidden, input_norm, qkv_weight, qkv_bias, eps, weight_offset, cast_before_weight);
  const Tensor attended = rope_decode_attention(qkv, cos, sin, positions, slots, lengths, starts, k_cache, v_cache,
                                                block_table, heads, scale, window, 0.0, true);
  linear_add_(hidden, attended, o_weight, o_bias);
  const Tensor activated =
      rms_norm_swiglu_linear(hidden, post_norm, gate_up_weight, eps, weight_offset, cast_before_weight);
  linear_add_(hidden, activated, down_weight, std::nullopt);
}

void register_ops(StableLibrary& ops) { ops.impl("decode_layer", TORCH_BOX(&decode_layer)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
