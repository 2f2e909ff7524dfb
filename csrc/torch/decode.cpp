// decode_layer: one token per sequence through a decoder layer, composed of the library's own ops:
//
//   qkv = rms_norm(hidden) Wqkv^T + b              rms_norm_linear
//   a = attention(rope(q), cache + rope(k), v)     rope_decode_attention: rotates, writes the cache, attends
//   hidden += a Wo^T                               linear_add_
//   m = silu(g) u, [g | u] = rms_norm(hidden) W^T  rms_norm_swiglu_linear
//   hidden += m Wdown^T                            linear_add_
//
// Five launches on a GPU. For up to 16 sequences the linears behind a norm normalize on the way; for up to 64 the
// linear_add_ before has done the most of it (Scaled in step.h), but for the first norm, which is a launch of its own
// unless there is a layer before. Where cuBLAS takes over there are more. They are chained by programmatic dependent
// launch: each requests its weights, or the keys and values of old tokens, while its predecessor still runs. The former
// is sound because weights have long been there when a step begins: nothing here writes them, and who has just done so
// did it by kernels that let nothing begin before they have ended, as PyTorch's do. The latter is sound because what a
// step finds in the cache was written before `cache_seqlens` was last changed, and because the kernel that changed it
// is such a one, too. It allocates what lies between the launches and is meant to be captured into a CUDA graph.
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

// Weights, tables, and what was in the cache before this step, are complete when it begins.
constexpr bool kPrefetch = true;

Linear norm_linear(const Norm& norm, const Tensor& weight, const std::optional<Tensor>& bias) {
  return {"rms_norm_linear", weight, bias, norm, LinearEpilogue::kNone, kPrefetch};
}
Linear norm_swiglu_linear(const Norm& norm, const Tensor& weight) {
  return {"rms_norm_swiglu_linear", weight, std::nullopt, norm, LinearEpilogue::kSwiglu, kPrefetch};
}
Linear add_linear(const Tensor& weight, const std::optional<Tensor>& bias) {
  return {"linear_add_", weight, bias, std::nullopt, LinearEpilogue::kNone, kPrefetch};
}

struct Layer {
  Linear qkv, o, gate_up, down;
  const Tensor &k_cache, &v_cache;
  int64_t window_left;
};

// What the layers of a step share.
struct Step {
  const Tensor &cos, &sin, &positions, &cache_seqlens;
  std::optional<Tensor> cache_leftpad, block_table;
  int64_t heads;
  std::optional<double> softmax_scale;
};

void check(const char* op, const Tensor& hidden, const Layer& layer, int64_t heads) {
  LLMK_CHECK(hidden.dim() == 2, op, "hidden must have shape (batch, hidden), got ", shape(hidden));
  LLMK_CHECK(layer.k_cache.dim() == 4, op, "k_cache must have shape (batch or pages, tokens, kv_heads, head_dim), got ",
             shape(layer.k_cache));
  const Tensor& weight = layer.qkv.weight;
  const int64_t columns = (heads + 2 * layer.k_cache.size(2)) * layer.k_cache.size(3);
  LLMK_CHECK(weight.dim() == 2 && weight.size(0) == columns, op, "qkv_weight must have shape [", columns, ", ",
             hidden.size(1), "] ((heads + 2 kv_heads) head_dim, hidden), got ", shape(weight));
}

// `scaled`: what the layer before has left; returns what this one leaves to `next`, if there is one.
std::optional<Scaled> run(const Tensor& hidden, const Layer& layer, const Step& step,
                          const std::optional<Scaled>& scaled, const Linear* next) {
  if (hidden.numel() == 0) return std::nullopt;
  const Tensor qkv = linear(hidden, layer.qkv, scaled);
  const Tensor attended = rope_decode_attention(qkv, step.cos, step.sin, step.positions, step.cache_seqlens,
                                                step.cache_leftpad, layer.k_cache, layer.v_cache, step.block_table,
                                                step.heads, step.softmax_scale, layer.window_left, 0.0, kPrefetch);
  const Tensor activated = linear(hidden, layer.gate_up, linear_add_(hidden, attended, layer.o, &layer.gate_up));
  return linear_add_(hidden, activated, layer.down, next);
}

void decode_layer(const Tensor& hidden, const Tensor& input_norm, const Tensor& qkv_weight,
                  std::optional<Tensor> qkv_bias, const Tensor& o_weight, std::optional<Tensor> o_bias,
                  const Tensor& post_norm, const Tensor& gate_up_weight, const Tensor& down_weight, const Tensor& cos,
                  const Tensor& sin, const Tensor& positions, const Tensor& cache_seqlens,
                  std::optional<Tensor> cache_leftpad, const Tensor& k_cache, const Tensor& v_cache,
                  std::optional<Tensor> block_table, int64_t heads, double eps, double weight_offset,
                  bool cast_before_weight, std::optional<double> softmax_scale, int64_t window_left) {
  const RmsNormOptions options{eps, weight_offset, cast_before_weight};
  const Layer layer{norm_linear({input_norm, options}, qkv_weight, qkv_bias),
                    add_linear(o_weight, o_bias),
                    norm_swiglu_linear({post_norm, options}, gate_up_weight),
                    add_linear(down_weight, std::nullopt),
                    k_cache,
                    v_cache,
                    window_left};
  check("decode_layer", hidden, layer, heads);
  run(hidden, layer, {cos, sin, positions, cache_seqlens, cache_leftpad, block_table, heads, softmax_scale},
      std::nullopt, nullptr);
}

Tensor decode_step(const Tensor& hidden, const std::vector<Tensor>& input_norms, const std::vector<Tensor>& qkv_weights,
                   const std::vector<Tensor>& qkv_biases, const std::vector<Tensor>& o_weights,
                   const std::vector<Tensor>& o_biases, const std::vector<Tensor>& post_norms,
                   const std::vector<Tensor>& gate_up_weights, const std::vector<Tensor>& down_weights,
                   const Tensor& norm, const Tensor& head, std::optional<Tensor> head_bias, const Tensor& cos,
                   const Tensor& sin, const Tensor& positions, const Tensor& cache_seqlens,
                   std::optional<Tensor> cache_leftpad, const std::vector<Tensor>& k_caches,
                   const std::vector<Tensor>& v_caches, int64_t heads, double eps, double weight_offset,
                   bool cast_before_weight, std::optional<double> softmax_scale,
                   const std::vector<int64_t>& windows_left) {
  constexpr const char* op = "decode_step";
  const size_t count = input_norms.size();
  const auto check_count = [&](const char* name, const auto& list, bool may_be_empty = false) {
    LLMK_CHECK(list.size() == count || (may_be_empty && list.empty()), op, name, " must have one ",
               std::is_same_v<decltype(list), const std::vector<Tensor>&> ? "tensor" : "number", " per layer (", count,
               may_be_empty ? ") or none, got " : "), got ", list.size());
  };
  check_count("qkv_weights", qkv_weights);
  check_count("qkv_biases", qkv_biases, true);
  check_count("o_weights", o_weights);
  check_count("o_biases", o_biases, true);
  check_count("post_norms", post_norms);
  check_count("gate_up_weights", gate_up_weights);
  check_count("down_weights", down_weights);
  check_count("k_caches", k_caches);
  check_count("v_caches", v_caches);
  check_count("windows_left", windows_left);
  const auto bias = [](const std::vector<Tensor>& biases, size_t i) {
    return biases.empty() ? std::nullopt : std::optional(biases[i]);
  };
  const RmsNormOptions options{eps, weight_offset, cast_before_weight};
  const Linear last = norm_linear({norm, options}, head, head_bias);
  std::vector<Layer> layers;
  for (size_t i = 0; i < count; ++i) {
    layers.push_back({norm_linear({input_norms[i], options}, qkv_weights[i], bias(qkv_biases, i)),
                      add_linear(o_weights[i], bias(o_biases, i)),
                      norm_swiglu_linear({post_norms[i], options}, gate_up_weights[i]),
                      add_linear(down_weights[i], std::nullopt), k_caches[i], v_caches[i], windows_left[i]});
    check(op, hidden, layers[i], heads);
  }
  const Step step{cos, sin, positions, cache_seqlens, cache_leftpad, std::nullopt, heads, softmax_scale};
  std::optional<Scaled> scaled;
  for (size_t i = 0; i < count; ++i) {
    scaled = run(hidden, layers[i], step, scaled, i + 1 < count ? &layers[i + 1].qkv : &last);
  }
  return linear(hidden, last, scaled);
}

void register_ops(StableLibrary& ops) {
  ops.impl("decode_layer", TORCH_BOX(&decode_layer));
  ops.impl("decode_step", TORCH_BOX(&decode_step));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
