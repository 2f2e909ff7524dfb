// The functions of norm.cpp, linear.cpp and activation.cpp that ops of other files are composed of: those of FP8,
// gated_mlp. Called without the dispatcher, since an error that passes through it loses its text, and with checked
// arguments.
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
  bool in_step;                                       // params/linear.h
  std::optional<Tensor> weight_scale = std::nullopt;  // [N], float32, contiguous: of a weight of int8
};

Tensor linear(const Tensor& x, const Linear& f);

// Here, so that ops with a norm of their own do not depend on norm.cpp.
inline void check_options(const char* op, const RmsNormOptions& options) {
  check_not_negative(op, "eps", options.eps);
  check_finite(op, "weight_offset", options.weight_offset);
}

// target = addend + alpha rms_norm(x): checked arguments, not empty, as the kernels take them.
class NormSum {
 public:
  NormSum(const Tensor& target, const Tensor& addend, const Tensor& x, const Norm& norm, double alpha);
  void run(const char* op) const;

  NormParams params;

 private:
  Rows x_, addend_;  // keep the memory of copies
  std::optional<Tensor> weight_;
};

// rms_norm between kernels of other libraries, without programmatic dependent launch:
//
//   value        | case                              | result
//   -------------|-----------------------------------|--------------
//   with overlap | between kernels of other libraries | 0.3 us slower
Tensor rms_norm_between(const Tensor& x, const std::optional<Tensor>& weight, const RmsNormOptions& options);

// act(gate) up, separate or from a packed [gate | up].
Tensor glu(const char* op, const Tensor& gate, const Tensor& up, Activation activation);
Tensor glu_packed(const char* op, const Tensor& gate_up, Activation activation);
Activation to_activation(const char* op, const std::string& name);

}  // namespace llmk
