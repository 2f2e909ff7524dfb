// Parameters of the optimizer kernels, on either device. Every tensor is a run of `size` elements of memory; tensors of
// one entry lie in the same order.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace llmk {

struct AdamTensor {
  void* param;
  const void* grad;  // of the dtype of param
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // with amsgrad
  float* step;           // how many steps were taken; the kernel counts up
  int64_t size;
  Dtype dtype, state_dtype;  // of param and grad; of exp_avg, exp_avg_sq and max_exp_avg_sq: float32 or bfloat16
  int index;                 // of the parameter, for its random numbers
};

struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  double max_norm;  // gradients are scaled down to it, where there is a grad_norm
  bool decoupled_weight_decay, maximize;
};

// One value for all tensors, in memory; null: none. `step` of a tensor is read before it is counted up.
struct AdamParams {
  const AdamTensor* tensors;
  int64_t count;
  const float* lr;          // replaces options.lr
  const float* grad_scale;  // gradients are divided by it
  const float* found_inf;   // not 0: no tensor changes, no step is counted
  const float* grad_norm;   // the norm of the gradients as they are, before the division
  int* counter;             // 0 before and after
  bool amsgrad;
  bool stochastic;  // parameters of 16 bits are rounded at random, by numbers of (seed, step, index)
  uint64_t seed;
  AdamOptions options;
};

struct GradTensor {
  void* data;
  int64_t size;
  Dtype dtype;
};

struct GradNormParams {
  const GradTensor* tensors;
  int64_t count;
  bool infinity;    // the largest magnitude, instead of the square root of the sum of squares
  float* partials;  // workspace of grad_norm_partials() floats
  float* norm;
};

struct ClipGradParams {
  const GradTensor* tensors;
  int64_t count;
  const float* norm;
  double max_norm;
};

}  // namespace llmk
