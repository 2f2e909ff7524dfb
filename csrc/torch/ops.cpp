// The schemas of all ops. Their bindings, for both devices, are beside this file, one file per family. The public
// functions, with gradients and shape inference, are in llmkernels/ops.
#include <torch/csrc/stable/library.h>

#include <string>

STABLE_TORCH_LIBRARY(llmkernels, ops) {
  // An op with a gradient, and its overload `no_grad`, the same without an autograd kernel. The public functions call
  // that one if no input needs a gradient: an autograd kernel in Python costs 4 us even then.
  const auto differentiable = [&](const std::string& name, const std::string& signature) {
    ops.def((name + signature).c_str());
    ops.def((name + ".no_grad" + signature).c_str());
  };

  // norm.cpp
  differentiable("rms_norm",
                 "(Tensor x, Tensor? weight=None, float eps=1e-6, float weight_offset=0.0, "
                 "bool cast_before_weight=True) -> Tensor");
  differentiable("add_rms_norm",
                 "(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, float weight_offset=0.0, "
                 "bool cast_before_weight=True) -> (Tensor y, Tensor sum)");
  ops.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor? grad_sum, float eps, float weight_offset, "
      "bool cast_before_weight, bool needs_grad_weight) -> (Tensor grad_x, Tensor grad_weight)");
  // residual += alpha rms_norm(x): the norm behind a block
  ops.def(
      "rms_norm_add_(Tensor(a!) residual, Tensor x, Tensor? weight=None, float eps=1e-6, float weight_offset=0.0, "
      "bool cast_before_weight=True, float alpha=1.0) -> ()");
  differentiable(
      "layer_norm",
      "(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, float weight_offset=0.0) -> Tensor");
  differentiable("add_layer_norm",
                 "(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, "
                 "float weight_offset=0.0) -> (Tensor y, Tensor sum)");
  ops.def(
      "layer_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor? grad_sum, float eps, float weight_offset, "
      "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");

  // softmax.cpp
  differentiable("softmax", "(Tensor x, Tensor? mask=None, float scale=1.0, bool causal=False) -> Tensor");
  ops.def("softmax_backward(Tensor grad_y, Tensor y, float scale) -> Tensor");
  differentiable("log_softmax", "(Tensor x, float scale=1.0) -> Tensor");
  ops.def("log_softmax_backward(Tensor grad_y, Tensor y, float scale) -> Tensor");

  // cross_entropy.cpp; `gradient_in_forward`: `grad` is that of the logits, else empty; lse: of each row; sums: what a
  // mean divides by and the sum of the class weights, empty where neither is needed
  differentiable("cross_entropy",
                 "(Tensor logits, Tensor target, Tensor? weight=None, int ignore_index=-100, str reduction=\"mean\", "
                 "float label_smoothing=0.0, float lse_square_scale=0.0, float softcap=0.0, "
                 "bool gradient_in_forward=False) -> (Tensor loss, Tensor lse, Tensor sums, Tensor grad)");
  ops.def(
      "cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? weight=None, int ignore_index=-100, "
      "str reduction=\"mean\", float label_smoothing=0.0, float lse_square_scale=0.0, float softcap=0.0) -> Tensor");
  ops.def(
      "cross_entropy_backward(Tensor grad_loss, Tensor logits, Tensor target, Tensor? weight, Tensor lse, Tensor sums, "
      "int ignore_index, str reduction, float label_smoothing, float lse_square_scale, float softcap) -> Tensor");
  // `grad` is that of a loss whose own gradient is 1, and stays where it is; without `logits`, it is the logits
  ops.def(
      "cross_entropy_backward_(Tensor(a!) grad, Tensor grad_loss, Tensor? logits, Tensor target, Tensor? weight, "
      "Tensor lse, Tensor sums, int ignore_index, str reduction, float label_smoothing, float lse_square_scale, "
      "float softcap) -> ()");
  ops.def("cross_entropy_scale_(Tensor(a!) grad, Tensor grad_loss) -> ()");

  // linear_cross_entropy.cpp; `needs_...`: which gradients the forward computes, of the sum of the losses; those of
  // weight and bias are float32 then, or with `at_once` (no chunks) of the dtype of x; what a mean divides by is
  // divisor[0]
  differentiable("linear_cross_entropy",
                 "(Tensor x, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, Tensor? weight=None, "
                 "int ignore_index=-100, str reduction=\"mean\", float label_smoothing=0.0, "
                 "float lse_square_scale=0.0, float softcap=0.0, int? max_logits_bytes=None, bool at_once=False, "
                 "bool needs_x=False, bool needs_weight=False, bool needs_bias=False) -> "
                 "(Tensor loss, Tensor lse, Tensor divisor, Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  ops.def(
      "linear_cross_entropy_backward(Tensor grad_loss, Tensor x, Tensor linear_weight, Tensor target, "
      "Tensor? linear_bias, Tensor? weight, Tensor lse, int ignore_index, str reduction, float label_smoothing, "
      "float lse_square_scale, float softcap, int? max_logits_bytes, bool at_once, bool needs_x, bool needs_weight, "
      "bool needs_bias) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");

  // rope.cpp
  differentiable("rope",
                 "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? position_ids=None, bool heads_first=False, "
                 "bool interleaved=False, int? rotary_dim=None) -> (Tensor, Tensor)");
  ops.def(
      "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, Tensor? position_ids=None, bool heads_first=False, "
      "bool interleaved=False, int? rotary_dim=None) -> ()");
  ops.def(
      "rope_backward(Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin, Tensor? position_ids, bool heads_first, "
      "bool interleaved, int? rotary_dim) -> (Tensor, Tensor)");

  // rms_norm_rope.cpp; a row of the norm is a head of a token, or all of its heads if row_wise
  differentiable("rms_norm_rope",
                 "(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
                 "Tensor? position_ids=None, float eps=1e-6, float weight_offset=0.0, bool cast_before_weight=True, "
                 "bool row_wise=False, bool heads_first=False, bool interleaved=False, int? rotary_dim=None) -> "
                 "(Tensor, Tensor)");
  ops.def(
      "rms_norm_rope_(Tensor(a!) q, Tensor(b!) k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
      "Tensor? position_ids=None, float eps=1e-6, float weight_offset=0.0, bool cast_before_weight=True, "
      "bool row_wise=False, bool heads_first=False, bool interleaved=False, int? rotary_dim=None) -> ()");
  ops.def(
      "rms_norm_rope_backward(Tensor grad_q, Tensor grad_k, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, "
      "Tensor cos, Tensor sin, Tensor? position_ids, float eps, float weight_offset, bool cast_before_weight, "
      "bool row_wise, bool heads_first, bool interleaved, int? rotary_dim, bool needs_grad_q_weight, "
      "bool needs_grad_k_weight) -> (Tensor, Tensor, Tensor, Tensor)");

  // activation.cpp; activation: see params/glu.h; a packed input is [gate | up] along its last dimension
  differentiable("bias_act", "(Tensor x, Tensor? bias, str activation) -> Tensor");
  ops.def(
      "bias_act_backward(Tensor grad_y, Tensor x, Tensor? bias, str activation, bool needs_grad_bias) -> "
      "(Tensor grad_x, Tensor grad_bias)");
  differentiable("glu",
                 "(Tensor gate, Tensor up, Tensor? gate_bias=None, Tensor? up_bias=None, str activation='silu') -> "
                 "Tensor");
  ops.def(
      "glu_backward(Tensor grad_y, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, str activation, "
      "bool needs_grad_gate_bias, bool needs_grad_up_bias) -> "
      "(Tensor grad_gate, Tensor grad_up, Tensor grad_gate_bias, Tensor grad_up_bias)");
  differentiable("glu_packed", "(Tensor gate_up, Tensor? bias=None, str activation='silu') -> Tensor");
  ops.def(
      "glu_packed_backward(Tensor grad_y, Tensor gate_up, Tensor? bias, str activation, bool needs_grad_bias) -> "
      "(Tensor grad_gate_up, Tensor grad_bias)");
  // Without a bias, y once more and the gradient; in place grad_y becomes y, and gate_up its gradient.
  ops.def(
      "glu_packed_forward_backward(Tensor grad_y, Tensor gate_up, str activation) -> "
      "(Tensor y, Tensor grad_gate_up)");
  ops.def("glu_packed_forward_backward_(Tensor(a!) grad_y, Tensor(b!) gate_up, str activation) -> ()");

  // embed_tokens.cpp; hidden[r] = scale embedding[ids[r]], of as many tokens in each sequence; counters int32
  // (counts, sequences) += advance; positions int32 (sequences, tokens) of the last tokens, where counters[0] is that
  // of the last one, from 0 to max_position; accumulate: hidden[r] += ..., as embeddings of positions have it
  ops.def(
      "embed_tokens_(Tensor(a!) hidden, Tensor embedding, Tensor ids, float scale=1.0, Tensor(b!)? counters=None, "
      "int advance=0, Tensor(c!)? positions=None, int max_position=2147483647, bool accumulate=False) -> ()");

  // softcap.cpp; y = softcap tanh(scale logits / softcap), or scale logits where softcap is 0
  ops.def("scale_softcap(Tensor logits, float scale=1.0, float softcap=0.0) -> Tensor");

  // sampling.cpp; without the tensor of a parameter its `_value` holds for every row
  ops.def(
      "sample(Tensor logits, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
      "Tensor? repetition_penalty, Tensor(b!)? seen, Tensor(a!) rng_state, float temperature_value=1.0, "
      "int top_k_value=0, float top_p_value=1.0, float min_p_value=0.0, float repetition_penalty_value=1.0) -> Tensor");

  // linear.cpp; of a glu_linear, y = act(gate) up, the weight is [gate rows | up rows]; `in_step`: a launch of a decode
  // step, see params/linear.h. linear_add_: residual += alpha (x weight^T + bias). linear_add_scale_ also does most of
  // the norm of the new residual, for a linear after it with `next_weight`, with `next_glu` a glu_linear: its results
  // are the `scaled` and `squares` of that linear, whose x is the residual. They have no elements where this cannot be
  // done or does not pay.
  differentiable("linear", "(Tensor x, Tensor weight, Tensor? bias=None, bool in_step=False) -> Tensor");
  differentiable("rms_norm_linear",
                 "(Tensor x, Tensor? norm_weight, Tensor weight, Tensor? bias=None, float eps=1e-6, "
                 "float weight_offset=0.0, bool cast_before_weight=True, bool in_step=False, Tensor? scaled=None, "
                 "Tensor? squares=None) -> Tensor");
  ops.def("glu_linear(Tensor x, Tensor weight, str activation='silu', bool in_step=False) -> Tensor");
  ops.def(
      "rms_norm_glu_linear(Tensor x, Tensor? norm_weight, Tensor weight, str activation='silu', float eps=1e-6, "
      "float weight_offset=0.0, bool cast_before_weight=True, bool in_step=False, Tensor? scaled=None, "
      "Tensor? squares=None) -> Tensor");
  ops.def(
      "linear_add_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? bias=None, float alpha=1.0, "
      "bool in_step=False) -> ()");
  ops.def(
      "linear_add_scale_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? bias, Tensor next_weight, "
      "Tensor? next_norm_weight=None, float next_weight_offset=0.0, float alpha=1.0, bool in_step=False, "
      "bool next_glu=False) -> (Tensor scaled, Tensor squares)");
  // sum = residual + alpha rms_norm(x) with `add_weight`, the norm behind a block; the result is the linear of the sum,
  // or with `normalize` of its norm, whose options the last ones are; or with an activation act(gate) up of that
  ops.def(
      "rms_norm_add_linear(Tensor(a!) sum, Tensor residual, Tensor x, Tensor? add_weight, float add_eps, "
      "float add_weight_offset, bool add_cast_before_weight, float alpha, Tensor weight, Tensor? bias=None, "
      "str activation='', bool normalize=False, Tensor? norm_weight=None, float eps=1e-6, float weight_offset=0.0, "
      "bool cast_before_weight=True, bool in_step=False) -> Tensor");

  // fp8.cpp; granularity: an element of scale per "token" (row), per "block" of 128 elements of a row, or one per
  // "tensor"; without `up`, gate is [gate | up]
  ops.def(
      "fp8_quantize(Tensor x, str granularity='token', str fp8_dtype='float8_e4m3fn', bool power_of_two=False) -> "
      "(Tensor q, Tensor scale)");
  ops.def(
      "rms_norm_fp8_quantize(Tensor x, Tensor? weight=None, float eps=1e-6, float weight_offset=0.0, "
      "bool cast_before_weight=True, str granularity='token', str fp8_dtype='float8_e4m3fn', "
      "bool power_of_two=False) -> (Tensor q, Tensor scale)");
  ops.def(
      "swiglu_fp8_quantize(Tensor gate, Tensor? up=None, str granularity='token', str fp8_dtype='float8_e4m3fn', "
      "bool power_of_two=False) -> (Tensor q, Tensor scale)");

  // fp8_linear.cpp
  ops.def(
      "fp8_linear(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias=None, "
      "str out_dtype='bfloat16', bool use_fast_accum=False) -> Tensor");
  // int8_linear.cpp; weight_scale: [N]
  differentiable("int8_linear", "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None) -> Tensor");
  // gated_mlp.cpp; without save_gate_up the returned gate_up has no columns, with it the backward may overwrite it
  differentiable("gated_mlp",
                 "(Tensor x, Tensor gate_up_weight, Tensor down_weight, Tensor? gate_up_bias=None, "
                 "Tensor? down_bias=None, str activation='silu', bool save_gate_up=False) -> "
                 "(Tensor y, Tensor gate_up)");

  // attention.cpp; a cache is (batch, capacity, kv_heads, head_dim), or pages with a block table
  ops.def(
      "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? cache_leftpad=None, "
      "Tensor? block_table=None, float? softmax_scale=None, int window_left=-1, float softcap=0.0) -> Tensor");
  ops.def(
      "rope_kv_write(Tensor(a!) q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor position_ids, "
      "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor cache_seqlens, Tensor? block_table=None, bool interleaved=False, "
      "Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, float eps=1e-6, float weight_offset=0.0, "
      "bool cast_before_weight=True, bool row_wise=False, int? rotary_dim=None) -> ()");
  ops.def(
      "rope_decode_attention(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor positions, Tensor cache_seqlens, "
      "Tensor? cache_leftpad, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor? block_table, int heads, "
      "float? softmax_scale=None, int window_left=-1, float softcap=0.0, bool prefetch_cache=False, "
      "Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, float eps=1e-6, float weight_offset=0.0, "
      "bool cast_before_weight=True, bool row_wise=False, int? rotary_dim=None) -> Tensor");

  // flash_attention.cpp; lse: log-sum-exp of the scores, (batch, heads, q_tokens), float32, or float64 for float64
  differentiable("attention",
                 "(Tensor q, Tensor k, Tensor v, Tensor? k_begin=None, Tensor? k_end=None, Tensor? sinks=None, "
                 "float? softmax_scale=None, int window_left=-1, int window_right=-1, float softcap=0.0, "
                 "Tensor? attn_mask=None, Tensor? alibi_slopes=None) -> (Tensor y, Tensor lse)");
  ops.def(
      "attention_backward(Tensor grad_y, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, "
      "Tensor? k_begin, Tensor? k_end, Tensor? sinks, float? softmax_scale, int window_left, int window_right, "
      "float softcap, Tensor? attn_mask=None, Tensor? alibi_slopes=None) -> "
      "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)");

  // lora.cpp; `split`: a float32 lora_a and lora_b, and what is made of them, as sums of two bfloat16 numbers. The
  // backward takes the last three results of the forward; what is not needed of its own is empty
  differentiable("lora_linear",
                 "(Tensor x, Tensor weight, Tensor lora_a, Tensor lora_b, Tensor? bias=None, float scaling=1.0, "
                 "bool split=False) -> (Tensor y, Tensor h, Tensor a_parts, Tensor b_parts)");
  differentiable("add_lora",
                 "(Tensor y, Tensor x, Tensor lora_a, Tensor lora_b, float scaling=1.0, bool split=False) -> "
                 "(Tensor sum, Tensor h, Tensor a_parts, Tensor b_parts)");
  ops.def(
      "lora_linear_backward(Tensor grad_y, Tensor? x, Tensor? weight, Tensor lora_a, Tensor lora_b, Tensor h, "
      "Tensor a_parts, Tensor b_parts, float scaling, bool split, bool needs_x, bool needs_a, bool needs_b) -> "
      "(Tensor grad_x, Tensor grad_a, Tensor grad_b)");

  // y[:, begin : begin + N] += scaling (x lora_a^T) lora_b^T for each adapter
  ops.def(
      "add_adapters_(Tensor(a!) y, Tensor x, Tensor[] lora_a, Tensor[] lora_b, int[] begins, float[] scalings) -> ()");

  // optim.cpp; lists with an entry per parameter. `lr` replaces lr_value; with a `grad_norm` gradients are clipped to
  // max_norm; `counter` is 0 before and after; with a `rounding_seed` parameters of 16 bits are rounded at random, by
  // numbers of (seed, step, index)
  ops.def(
      "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] steps, Tensor? lr, Tensor? grad_scale, Tensor? found_inf, "
      "Tensor? grad_norm, Tensor(f!)? counter, int? rounding_seed, int[] indices, float lr_value, float beta1, "
      "float beta2, float eps, float weight_decay, float max_norm, bool decoupled_weight_decay, bool maximize) -> ()");
  ops.def("grad_norm(Tensor[] grads, float norm_type=2.0) -> Tensor");
  ops.def("clip_grads_(Tensor(a!)[] grads, Tensor norm, float max_norm) -> ()");
}
