// The functions of norm.cpp, linear.cpp, glu.cpp and attention.cpp that other ops are composed of: those of decode
// steps, of FP8, gated_mlp. Called without the dispatcher, since an error that passes through it loses its text, and
// with checked arguments.
#pragma once
#include "binding.h"
#include "params/glu.h"
#include "params/linear.h"

namespace llmk {

struct Norm {
  std::optional<Tensor> weight;
  RmsNormOptions options;
};

// norm(x) weight^T + bias, or act(gate) up with [gate | up] = norm(x) weight^T.
struct Linear {
  const char* op;  // for errors
  Tensor weight;
  std::optional<Tensor> bias;
  std::optional<Norm> norm;
  std::optional<Activation> glu;
  bool in_step;  // params/linear.h
};

// The norm hand-off (params/linear.h): for the linear after the next norm linear_add_ writes the new residual times the
// norm's weight, and sums of its squares. This saves the norm's launch.
struct Scaled {
  Tensor x, squares;
  int parts;
};

// `scaled`: from the linear_add_ that made x, if this linear was its `next`.
Tensor linear(const Tensor& x, const Linear& f, const std::optional<Scaled>& scaled = std::nullopt);

// residual += alpha (x weight^T + bias). `next`: the linear after the next norm, for a hand-off.
std::optional<Scaled> linear_add_(Tensor residual, const Tensor& x, const Linear& f, double alpha = 1,
                                  const Linear* next = nullptr);

// Here, so that ops with a norm of their own do not depend on norm.cpp.
inline void check_options(const char* op, const RmsNormOptions& options) {
  check_not_negative(op, "eps", options.eps);
  check_finite(op, "weight_offset", options.weight_offset);
}

// rms_norm between kernels of other libraries, without programmatic dependent launch:
//
//   value        | case                              | result
//   -------------|-----------------------------------|--------------
//   with overlap | between kernels of other libraries | 0.3 us slower
Tensor rms_norm_between(const Tensor& x, const std::optional<Tensor>& weight, const RmsNormOptions& options);

Tensor swiglu(const Tensor& gate, const Tensor& up);
// act(gate) up, from a packed [gate | up].
Tensor glu_packed(const char* op, const Tensor& gate_up, Activation activation);
Activation to_activation(const char* op, const std::string& name);

// The arguments of an attention besides the queries.
struct AttentionInputs {
  Argument k_cache, v_cache;  // (batch, capacity, kv_heads, head_dim), or pages with a block table
  const Tensor& cache_seqlens;
  const std::optional<Tensor>&cache_leftpad, &block_table;
  std::optional<double> softmax_scale;
  int64_t window_left;
  double softcap;
};

// The tables and positions by which one new token per sequence is rotated.
struct Rotation {
  const Tensor &cos, &sin, &positions;
};

// RMSNorm of the heads of q or k before their rotation, where there is a weight.
struct HeadNorms {
  Argument q_weight, k_weight;  // (head_dim,)
  RmsNormOptions options;
};

// Checks them for `heads` query heads of one token in each of `batch` sequences; `model` has their dtype.
void check_attention(const char* op, const Argument& model, int64_t batch, int64_t heads,
                     const AttentionInputs& inputs);
void check_rotation(const char* op, const Argument& model, int64_t batch, int64_t head_dim, const Rotation& rotation,
                    const HeadNorms& norms);

Tensor rope_decode_attention(const char* op, const Tensor& qkv, const Rotation& rotation, const HeadNorms& norms,
                             const AttentionInputs& inputs, int64_t heads, bool prefetch_cache);

}  // namespace llmk
