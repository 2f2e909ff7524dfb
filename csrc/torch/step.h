// What decode_layer and the linears are composed of, from norm.cpp, linear.cpp, glu.cpp and attention.cpp. Called
// directly, since an error that passes through the dispatcher loses its text, by ops that have checked their arguments.
#pragma once
#include "binding.h"
#include "params/linear.h"

namespace llmk {

struct Norm {
  std::optional<Tensor> weight;
  RmsNormOptions options;
};

// epilogue(norm(x) weight^T + bias)
struct Linear {
  const char* op;  // that errors name
  Tensor weight;
  std::optional<Tensor> bias;
  std::optional<Norm> norm;
  LinearEpilogue epilogue;
  bool prefetch_weights;
};

// What linear_add_ leaves to a linear behind a norm where that saves the norm's launch: the new residual times the
// norm's weight, and sums of its squares (params/linear.h).
struct Scaled {
  Tensor x, squares;
  int parts;
};

// `scaled`: of x, by a linear_add_ that was told of this linear.
Tensor linear(const Tensor& x, const Linear& f, const std::optional<Scaled>& scaled = std::nullopt);

// residual += x weight^T + bias; `next`: what follows.
std::optional<Scaled> linear_add_(Tensor residual, const Tensor& x, const Linear& f, const Linear* next = nullptr);

void check_options(const char* op, const RmsNormOptions& options);

// rms_norm between kernels that are not of this library: without the overlap with its neighbours, which then costs
// 0.3 us instead of saving some.
Tensor rms_norm_between(const Tensor& x, const std::optional<Tensor>& weight, const RmsNormOptions& options);

Tensor swiglu_packed(const Tensor& gate_up);

// What a query attends to: the caches of one layer, and how.
struct Attended {
  Argument k_cache, v_cache;  // (batch, capacity, kv_heads, head_dim), or pages with a block table
  const Tensor& cache_seqlens;
  const std::optional<Tensor>&cache_leftpad, &block_table;
  std::optional<double> softmax_scale;
  int64_t window_left;
  double softcap;
};

// The rotation of one new token per sequence.
struct Rotation {
  const Tensor &cos, &sin, &positions;
};

// For `heads` query heads of one token in each of `batch` sequences; `model` has their dtype.
void check_attention(const char* op, const Argument& model, int64_t batch, int64_t heads, const Attended& attended);
void check_rotation(const char* op, const Argument& model, int64_t batch, int64_t head_dim, const Rotation& rotation);

Tensor rope_decode_attention(const char* op, const Tensor& qkv, const Rotation& rotation, const Attended& attended,
                             int64_t heads, bool prefetch_cache);

}  // namespace llmk
