// decode_layer: one token per sequence through a decoder layer, composed of the library's own ops:
//
//   qkv = rms_norm(hidden) Wqkv^T + b              rms_norm_linear
//   a = attention(rope(q), cache + rope(k), v)     rope_decode_attention: rotates, writes the cache, attends; with the
//                                                  weights q_norm and k_norm, RMSNorm of the heads before rope
//   hidden += a Wo^T                               linear_add_
//   m = silu(g) u, [g | u] = rms_norm(hidden) W^T  rms_norm_glu_linear
//   hidden += m Wdown^T                            linear_add_
//
// These are five launches on a GPU of compute capability 9.0 for up to 64 sequences; elsewhere they are more, and
// cuBLAS among them. The norms are folded into the linears: for up to 16 sequences the linear after a norm normalizes x
// itself; for up to 64 the linear_add_ before the norm has done most of it (Scaled in step.h). Then the first norm of
// the first layer is a launch of its own. Intermediate tensors are allocated. The op is meant to be in a CUDA graph.
//
// The launches overlap by programmatic dependent launch: each requests its weights, or the keys and values of earlier
// tokens, while the previous kernel still runs. This is correct because
//
//   weights   were complete when the step began. The step does not write them, and a kernel that has just written them
//             does not let the next one start before it has ended (PyTorch's kernels do not).
//   cache     The keys and values of earlier tokens were written before `cache_seqlens` was last changed, and the
//             kernel that changed it does not let the next one start early either.
//
// decode_step does that for every layer, then logits = rms_norm(hidden) Whead^T + b. A single launch for a whole step,
// with barriers of the grid between the layers, was tried on an H200 with one sequence:
//
//   value       | case                         | result
//   ------------|------------------------------|------------
//   one launch  | Llama, 8 billion parameters  | 2 % faster
//   one launch  | Qwen2.5, 7 billion           | 4 % slower
//   one launch  | Qwen2.5, half a billion      | 59 % slower
#include <type_traits>

#include "backend.h"
#include "step.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// Weights, tables, and the keys and values of earlier tokens are complete when a step begins: see above.
constexpr bool kInStep = true, kPrefetchCache = true;

// One layer: its tensors by the names of the op that was called.
struct Layer {
  Argument input_norm, qkv_weight, qkv_bias, o_weight, o_bias, post_norm, gate_up_weight, down_weight;
  Argument k_cache, v_cache;
  int64_t window_left;
  Argument q_norm, k_norm;

  std::array<Argument, 12> tensors() const {
    return {input_norm,     qkv_weight,  qkv_bias, o_weight, o_bias, post_norm,
            gate_up_weight, down_weight, k_cache,  v_cache,  q_norm, k_norm};
  }
};

// What the layers of a step share.
struct Step {
  const char* op;
  const Tensor& hidden;
  Rotation rotation;
  const Tensor& cache_seqlens;
  const std::optional<Tensor>&cache_leftpad, &block_table;
  int64_t heads;
  RmsNormOptions norm;
  std::optional<double> softmax_scale;

  AttentionInputs attention_inputs(const Layer& layer) const {
    return {layer.k_cache, layer.v_cache, cache_seqlens,     cache_leftpad,
            block_table,   softmax_scale, layer.window_left, 0.0};
  }
  HeadNorms head_norms(const Layer& layer) const { return {layer.q_norm, layer.k_norm, norm}; }
  Linear norm_linear(const Argument& norm_weight, const Argument& weight, const Argument& bias) const {
    return {"rms_norm_linear", *weight, bias.optional(), Norm{norm_weight.optional(), norm}, std::nullopt, kInStep};
  }
  Linear norm_swiglu_linear(const Argument& norm_weight, const Argument& weight) const {
    return {"rms_norm_glu_linear", *weight, std::nullopt, Norm{norm_weight.optional(), norm},
            Activation::kSilu,     kInStep};
  }
};

const Argument kNoBias{"", std::nullopt};

Linear add_linear(const Argument& weight, const Argument& bias) {
  return {"linear_add_", *weight, bias.optional(), std::nullopt, std::nullopt, kInStep};
}

// (rows, cols) of the dtype of hidden, and a bias (rows,) if there is one.
void check_linear(const Step& step, const Argument& weight, const Argument& bias, int64_t rows, int64_t cols,
                  const char* meaning) {
  check_dtype(step.op, weight, {"hidden", step.hidden});
  LLMK_CHECK(weight->dim() == 2 && weight->size(0) == rows && weight->size(1) == cols, step.op, weight.name,
             " must have shape [", rows, ", ", cols, "] (", meaning, "), got ", shape(*weight));
  check_vector(step.op, bias, {"hidden", step.hidden}, rows, "the rows of its weight");
}

// All checks of tensors and numbers, so that nothing is written before an error.
void check(const Step& step, const std::vector<Layer>& layers, const std::vector<Argument>& others) {
  const char* const op = step.op;
  std::vector<Argument> tensors{{"hidden", step.hidden, Access::kWrite}};
  for (const Layer& layer : layers) {
    for (const Argument& tensor : layer.tensors()) tensors.push_back(tensor);
  }
  tensors.insert(tensors.end(), others.begin(), others.end());
  tensors.insert(tensors.end(), {{"cos", step.rotation.cos},
                                 {"sin", step.rotation.sin},
                                 {"positions", step.rotation.positions},
                                 {"cache_seqlens", step.cache_seqlens},
                                 {"cache_leftpad", step.cache_leftpad},
                                 {"block_table", step.block_table}});
  check_tensors(op, tensors.data(), tensors.size());
  const Argument hidden{"hidden", step.hidden};
  to_dtype(op, hidden);
  LLMK_CHECK(hidden->dim() == 2, op, "hidden must have shape (batch, hidden), got ", shape(*hidden));
  check_options(op, step.norm);
  check_not_negative(op, "heads", static_cast<double>(step.heads));
  const int64_t batch = hidden->size(0), size = hidden->size(1);
  for (const Layer& layer : layers) {
    const Argument& cache = layer.k_cache;
    LLMK_CHECK(cache->dim() == 4, op, cache.name, " must have shape (batch or pages, tokens, kv_heads, head_dim), got ",
               shape(*cache));
    const int64_t head_dim = cache->size(3), width = step.heads * head_dim;
    check_vector(op, layer.input_norm, hidden, size, "hidden");
    check_linear(step, layer.qkv_weight, layer.qkv_bias, width + 2 * cache->size(2) * head_dim, size,
                 "(heads + 2 kv_heads) head_dim, hidden");
    check_attention(op, hidden, batch, step.heads, step.attention_inputs(layer));
    check_rotation(op, hidden, batch, head_dim, step.rotation, step.head_norms(layer));
    check_linear(step, layer.o_weight, layer.o_bias, size, width, "hidden, heads head_dim");
    check_vector(op, layer.post_norm, hidden, size, "hidden");
    const Argument& gate_up = layer.gate_up_weight;
    LLMK_CHECK(gate_up->dim() == 2 && gate_up->size(0) % 2 == 0, op, gate_up.name,
               " must have an even number of rows, [gate | up], got shape ", shape(*gate_up));
    check_linear(step, gate_up, kNoBias, gate_up->size(0), size, "2 intermediate, hidden");
    check_linear(step, layer.down_weight, kNoBias, size, gate_up->size(0) / 2, "hidden, intermediate");
  }
}

// `scaled` is from the layer before; returns that for `next`, the linear after this layer, if there is one.
std::optional<Scaled> run(const Step& step, const Layer& layer, const std::optional<Scaled>& scaled,
                          const Linear* next) {
  const Tensor& hidden = step.hidden;
  const Linear qkv = step.norm_linear(layer.input_norm, layer.qkv_weight, layer.qkv_bias);
  const Linear gate_up = step.norm_swiglu_linear(layer.post_norm, layer.gate_up_weight);
  const Tensor attention =
      rope_decode_attention(step.op, linear(hidden, qkv, scaled), step.rotation, step.head_norms(layer),
                            step.attention_inputs(layer), step.heads, kPrefetchCache);
  const auto after_attention = linear_add_(hidden, attention, add_linear(layer.o_weight, layer.o_bias), 1, &gate_up);
  return linear_add_(hidden, linear(hidden, gate_up, after_attention), add_linear(layer.down_weight, kNoBias), 1, next);
}

void decode_layer(const Tensor& hidden, const Tensor& input_norm, const Tensor& qkv_weight,
                  std::optional<Tensor> qkv_bias, const Tensor& o_weight, std::optional<Tensor> o_bias,
                  const Tensor& post_norm, const Tensor& gate_up_weight, const Tensor& down_weight, const Tensor& cos,
                  const Tensor& sin, const Tensor& positions, const Tensor& cache_seqlens,
                  std::optional<Tensor> cache_leftpad, const Tensor& k_cache, const Tensor& v_cache,
                  std::optional<Tensor> block_table, int64_t heads, double eps, double weight_offset,
                  bool cast_before_weight, std::optional<double> softmax_scale, int64_t window_left,
                  std::optional<Tensor> q_norm, std::optional<Tensor> k_norm) {
  const Step step{"decode_layer",
                  hidden,
                  {cos, sin, positions},
                  cache_seqlens,
                  cache_leftpad,
                  block_table,
                  heads,
                  {eps, weight_offset, cast_before_weight},
                  softmax_scale};
  const Layer layer{{"input_norm", input_norm},
                    {"qkv_weight", qkv_weight},
                    {"qkv_bias", qkv_bias},
                    {"o_weight", o_weight},
                    {"o_bias", o_bias},
                    {"post_norm", post_norm},
                    {"gate_up_weight", gate_up_weight},
                    {"down_weight", down_weight},
                    {"k_cache", k_cache, Access::kWrite},
                    {"v_cache", v_cache, Access::kWrite},
                    window_left,
                    {"q_norm", q_norm},
                    {"k_norm", k_norm}};
  check(step, {layer}, {});
  if (hidden.numel() > 0 && !is_meta(hidden)) run(step, layer, std::nullopt, nullptr);
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
                   const std::vector<int64_t>& windows_left, const std::optional<std::vector<Tensor>>& given_q_norms,
                   const std::optional<std::vector<Tensor>>& given_k_norms) {
  constexpr const char* op = "decode_step";
  const size_t count = input_norms.size();
  const auto check_count = [&](const char* name, const auto& list, bool may_be_empty = false) {
    LLMK_CHECK(list.size() == count || (may_be_empty && list.empty()), op, name, " must have one ",
               std::is_same_v<decltype(list), const std::vector<Tensor>&> ? "tensor" : "number", " per layer (", count,
               may_be_empty ? ") or none, got " : "), got ", list.size());
  };
  const std::vector<Tensor> no_tensors;
  const std::vector<Tensor>&q_norms = given_q_norms ? *given_q_norms : no_tensors,
        &k_norms = given_k_norms ? *given_k_norms : no_tensors;
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
  check_count("q_norms", q_norms, true);
  check_count("k_norms", k_norms, true);
  const std::optional<Tensor> block_table;
  const Step step{op,
                  hidden,
                  {cos, sin, positions},
                  cache_seqlens,
                  cache_leftpad,
                  block_table,
                  heads,
                  {eps, weight_offset, cast_before_weight},
                  softmax_scale};
  std::vector<Layer> layers;
  for (size_t i = 0; i < count; ++i) {
    const auto element = [i](const char* name, const std::vector<Tensor>& list, Access access = Access::kRead) {
      const Name element_name(name, static_cast<int64_t>(i));
      return list.empty() ? Argument(element_name, std::nullopt) : Argument(element_name, list[i], access);
    };
    layers.push_back({element("input_norms", input_norms), element("qkv_weights", qkv_weights),
                      element("qkv_biases", qkv_biases), element("o_weights", o_weights), element("o_biases", o_biases),
                      element("post_norms", post_norms), element("gate_up_weights", gate_up_weights),
                      element("down_weights", down_weights), element("k_caches", k_caches, Access::kWrite),
                      element("v_caches", v_caches, Access::kWrite), windows_left[i], element("q_norms", q_norms),
                      element("k_norms", k_norms)});
  }
  const Argument last_norm{"norm", norm}, last_weight{"head", head}, last_bias{"head_bias", head_bias};
  check(step, layers, {last_norm, last_weight, last_bias});
  const int64_t size = hidden.size(1);
  check_vector(op, last_norm, {"hidden", hidden}, size, "hidden");
  check_linear(step, last_weight, last_bias, head.dim() > 0 ? head.size(0) : 0, size, "vocab, hidden");
  const Linear last = step.norm_linear(last_norm, last_weight, last_bias);
  std::optional<Scaled> scaled;
  for (size_t i = 0; i < count && hidden.numel() > 0 && !is_meta(hidden); ++i) {
    const bool is_last = i + 1 == count;
    const Linear next =
        is_last ? last : step.norm_linear(layers[i + 1].input_norm, layers[i + 1].qkv_weight, layers[i + 1].qkv_bias);
    scaled = run(step, layers[i], scaled, &next);
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
