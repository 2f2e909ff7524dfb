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
// decode_step: that for every layer, then logits = rms_norm(hidden) Whead^T + b. One launch for a single sequence where
// there is a kernel for it, csrc/kernels/decode; else, or if the device does not run all of its blocks at once,
// composed.
#include <cmath>

#include "backend.h"
#if LLMK_CUDA
#include "kernels/decode/decode_step.h"
#endif
#include "params/norm.h"
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

// The arguments of decode_step.
struct Step {
  const Tensor& hidden;
  const std::vector<Tensor>&input_norms, &qkv_weights, &qkv_biases, &o_weights, &o_biases, &post_norms,
      &gate_up_weights, &down_weights;
  const Tensor &norm, &head;
  const std::optional<Tensor>& head_bias;
  const Tensor &cos, &sin, &positions, &slots, &lengths;
  const std::optional<Tensor>& starts;
  const std::vector<Tensor>&k_caches, &v_caches;
  int64_t heads;
  RmsNormOptions norm_options;
  std::optional<double> scale;
  const std::vector<int64_t>& windows;

  size_t layers() const { return input_norms.size(); }
};

void check_lists(const char* op, const Step& step) {
  const size_t layers = step.layers();
  const auto check = [&](const char* name, const auto& list, bool may_be_empty = false) {
    LLMK_CHECK(list.size() == layers || (may_be_empty && list.empty()), op, name, " must have one ",
               std::is_same_v<decltype(list), const std::vector<Tensor>&> ? "tensor" : "number", " per layer (", layers,
               may_be_empty ? ") or none, got " : "), got ", list.size());
  };
  check("qkv_weights", step.qkv_weights);
  check("qkv_biases", step.qkv_biases, true);
  check("o_weights", step.o_weights);
  check("o_biases", step.o_biases, true);
  check("post_norms", step.post_norms);
  check("gate_up_weights", step.gate_up_weights);
  check("down_weights", step.down_weights);
  check("k_caches", step.k_caches);
  check("v_caches", step.v_caches);
  check("windows", step.windows);
}

#if LLMK_CUDA
// What the kernel is told, but for its output and workspace, if all tensors are as it takes them: it reads whatever it
// is told. If not, the ops of the composed way cope, or say what is wrong.
bool to_params(const Step& step, DecodeStepParams& p) {
  const size_t layers = step.layers();
  if (layers < 1 || layers > kMaxDecodeLayers || step.heads < 1 || step.hidden.dim() != 2 || step.hidden.size(0) != 1 ||
      step.down_weights[0].dim() != 2 || step.head.dim() != 2 || step.head.numel() == 0 || step.cos.dim() != 2 ||
      step.k_caches[0].dim() != 4 || step.v_caches[0].dim() != 4 || step.k_caches[0].numel() == 0) {
    return false;
  }
  const Tensor &k = step.k_caches[0], &v = step.v_caches[0];
  const int64_t hidden = step.hidden.size(1), intermediate = step.down_weights[0].size(1), vocab = step.head.size(0);
  const int64_t capacity = k.size(1), kv_heads = k.size(2), head_dim = k.size(3);
  const int64_t width = step.heads * head_dim, columns = width + 2 * kv_heads * head_dim;

  const int32_t device = step.hidden.get_device_index(), float_code = dtype_code(step.hidden);
  const int32_t int_code = dtype_code(ScalarType::Int);
  const auto is = [&](const Tensor& x, int32_t code, IntHeaderOnlyArrayRef sizes) {
    return x.is_cuda() && x.get_device_index() == device && dtype_code(x) == code && x.sizes().equals(sizes);
  };
  const auto is_contiguous = [&](const Tensor& x, IntHeaderOnlyArrayRef sizes) {
    return is(x, float_code, sizes) && x.is_contiguous();
  };
  const auto is_bias = [&](const std::vector<Tensor>& list, size_t i, int64_t size) {
    return list.empty() || is_contiguous(list[i], {size});
  };
  const auto is_table = [&](const Tensor& x) {
    return is(x, float_code, {step.cos.size(0), step.cos.size(1)}) && has_unit_last_stride(x);
  };
  const auto is_cache = [&](const Tensor& x, const Tensor& first) {
    return is(x, float_code, {1, capacity, kv_heads, head_dim}) && x.stride(3) == 1 && x.stride(1) == first.stride(1) &&
           x.stride(2) == first.stride(2);
  };
  const bool half_width = 2 * step.cos.size(1) == head_dim;
  bool fits = is_contiguous(step.hidden, {1, hidden}) && is_contiguous(step.norm, {hidden}) &&
              is_contiguous(step.head, {vocab, hidden}) &&
              (!step.head_bias || is_contiguous(*step.head_bias, {vocab})) && is_table(step.cos) &&
              is_table(step.sin) && (half_width || step.cos.size(1) == head_dim) && is(step.positions, int_code, {1}) &&
              is(step.slots, int_code, {1}) && is(step.lengths, int_code, {1}) &&
              (!step.starts || is(*step.starts, int_code, {1}));
  for (size_t i = 0; fits && i < layers; ++i) {
    fits = is_contiguous(step.input_norms[i], {hidden}) && is_contiguous(step.qkv_weights[i], {columns, hidden}) &&
           is_bias(step.qkv_biases, i, columns) && is_contiguous(step.o_weights[i], {hidden, width}) &&
           is_bias(step.o_biases, i, hidden) && is_contiguous(step.post_norms[i], {hidden}) &&
           is_contiguous(step.gate_up_weights[i], {2 * intermediate, hidden}) &&
           is_contiguous(step.down_weights[i], {hidden, intermediate}) && is_cache(step.k_caches[i], k) &&
           is_cache(step.v_caches[i], v) && step.windows[i] >= 0;
  }
  if (!fits) return false;

  const auto integers = [](const Tensor& x) { return static_cast<const int32_t*>(x.const_data_ptr()); };
  p.layers = static_cast<int64_t>(layers);
  p.hidden_size = hidden;
  p.intermediate = intermediate;
  p.heads = step.heads;
  p.kv_heads = kv_heads;
  p.head_dim = head_dim;
  p.vocab = vocab;
  p.hidden = step.hidden.mutable_data_ptr();
  p.norm = step.norm.const_data_ptr();
  p.head = step.head.const_data_ptr();
  p.head_bias = data(step.head_bias);
  p.norm_options = step.norm_options;
  p.rope = {step.cos.const_data_ptr(), step.sin.const_data_ptr(), step.cos.stride(0),
            step.sin.stride(0),        step.cos.size(0),          half_width};
  p.position = integers(step.positions);
  p.length = integers(step.lengths);
  p.start = step.starts ? integers(*step.starts) : nullptr;
  p.capacity = capacity;
  p.k_token = k.stride(1);
  p.k_head = k.stride(2);
  p.v_token = v.stride(1);
  p.v_head = v.stride(2);
  p.scale = step.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
  for (size_t i = 0; i < layers; ++i) {
    p.layer[i] = {step.input_norms[i].const_data_ptr(),
                  step.qkv_weights[i].const_data_ptr(),
                  step.qkv_biases.empty() ? nullptr : step.qkv_biases[i].const_data_ptr(),
                  step.o_weights[i].const_data_ptr(),
                  step.o_biases.empty() ? nullptr : step.o_biases[i].const_data_ptr(),
                  step.post_norms[i].const_data_ptr(),
                  step.gate_up_weights[i].const_data_ptr(),
                  step.down_weights[i].const_data_ptr(),
                  step.k_caches[i].mutable_data_ptr(),
                  step.v_caches[i].mutable_data_ptr(),
                  step.windows[i]};
  }
  return true;
}

// The logits by the kernel, if there is one for this, and if the device runs all of its blocks at once: it may not
// where it is shared by processes, each with a part of it.
std::optional<Tensor> run_kernel(const char* op, const Step& step) {
  DecodeStepParams params{};
  if (!step.hidden.is_cuda() || !to_params(step, params)) return std::nullopt;
  const Dtype dtype = to_dtype(op, {"hidden", step.hidden});
  std::optional<Tensor> logits;
  on_device(
      op, step.hidden,
      [&](auto stream) {
        if (!kernels::decode_step_supported(params, dtype)) return cudaSuccess;
        size_t bytes = 0;
        check_cuda(op, kernels::decode_step_workspace_bytes(params, bytes));
        const int64_t size = static_cast<int64_t>(bytes);
        const Tensor workspace = empty({&size, 1}, ScalarType::Byte, step.hidden);  // its reuse is ordered behind
        logits = empty({1, params.vocab}, dtype_code(step.hidden), step.hidden);
        params.workspace = workspace.mutable_data_ptr();
        params.logits = logits->mutable_data_ptr();
        const cudaError_t status = kernels::decode_step(params, stream);
        if (status != cudaErrorCooperativeLaunchTooLarge && status != cudaErrorNotSupported) return status;
        logits.reset();
        return cudaSuccess;
      },
      [] {});
  return logits;
}
#endif

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
  const Step step{hidden,       input_norms,
                  qkv_weights,  qkv_biases,
                  o_weights,    o_biases,
                  post_norms,   gate_up_weights,
                  down_weights, norm,
                  head,         head_bias,
                  cos,          sin,
                  positions,    slots,
                  lengths,      starts,
                  k_caches,     v_caches,
                  heads,        {eps, weight_offset, cast_before_weight},
                  scale,        windows};
  check_lists(op, step);
#if LLMK_CUDA
  if (const std::optional<Tensor> logits = run_kernel(op, step)) return *logits;
#endif
  const auto bias = [](const std::vector<Tensor>& biases, size_t i) {
    return biases.empty() ? std::nullopt : std::optional(biases[i]);
  };
  for (size_t i = 0; i < step.layers(); ++i) {
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
