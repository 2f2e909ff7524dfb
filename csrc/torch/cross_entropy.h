// What cross_entropy and linear_cross_entropy share: a call with its arguments checked, and each of its kernels, on the
// device of the target.
#pragma once
#include "backend.h"
#include "params/cross_entropy.h"

namespace llmk {

// The dtype of losses, log-sum-exp and class weights.
inline ScalarType wide(Dtype dtype) { return dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float; }

// `params` holds pointers to the tensors beside it.
struct CrossEntropyCall {
  const char* op;
  Dtype dtype;
  bool reduced, mean;
  Tensor target;
  std::optional<Tensor> weight, sums;
  CrossEntropyParams params;
};

// What has a row for every target (the logits, or what they are made of), and what says how many classes there are.
struct LossRows {
  Argument rows;
  const char* classes;
  int64_t vocab;
  const char* vocab_text;
};

// Checks what all variants have, after check_tensors(), and fills in the parameters but those of the logits and of the
// results.
CrossEntropyCall begin_cross_entropy(const char* op, const LossRows& of, const Tensor& target,
                                     const std::optional<Tensor>& weight, const std::string& reduction,
                                     const CrossEntropyOptions& options);

void check_wide(const char* op, const Argument& argument, Dtype dtype);
// Checks that `argument` has the shape of `rows` without its last dimension.
void check_per_row(const char* op, const Argument& argument, const Argument& rows);
// The gradient of the loss, of the right shape, contiguous.
Tensor check_grad_loss(const char* op, const Tensor& grad_loss, const Argument& rows, bool reduced, Dtype dtype);

// What a mean divides by, and the sum of the class weights, where they are needed: see CrossEntropyParams::sums.
void run_sums(const CrossEntropyCall& call, bool mean, const Tensor& sums);
// Losses, log-sum-exp and, if there is room for it, the gradient of the rows of `params`.
void run_rows(const CrossEntropyCall& call, const CrossEntropyParams& params);
// The mean or sum of the losses of `params`.
void run_reduce(const CrossEntropyCall& call, const CrossEntropyParams& params, const Tensor& loss);
// The gradient of the rows of `params` from their log-sum-exp.
void run_backward(const CrossEntropyCall& call, const CrossEntropyParams& params);

}  // namespace llmk
