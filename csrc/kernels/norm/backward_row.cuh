// What the kernels of the norms' backward (backward.cuh) have in common: the operands of a row, and its gradient.
#pragma once
#include "device/vec.cuh"
#include "kernels/launch.h"
#include "number_near.cuh"
#include "params/norm.h"

namespace llmk::kernels::norm {

// Of a row; the means are of LayerNorm only, and 0 otherwise.
struct Scalars {
  float mean, rstd;
  float mean_g, mean_gn;
};

// Whether one reduction gives all that a LayerNorm needs of a row: of d = x - number_near(), d^2, g d and g. Otherwise
// there is one of x and g before it, and d = x - mean.
template <typename T, bool kCentered>
constexpr bool kSumsOnce = kCentered && sizeof(T) == 2;
template <typename T, bool kCentered>
constexpr int kRowSums = 2 + kCentered + kSumsOnce<T, kCentered>;

// sums: of d^2, g d and, centered, d, where d = x - mean, the mean or a number near it: the sum of d corrects the mean
// and all that was made from it. What the compiler may contract is said outright, so that all kernels get the same from
// the same sums.
template <bool kCentered, int kSums>
__device__ inline Scalars row_scalars(const float (&sums)[kSums], float mean, float mean_g, float inverse_cols,
                                      float eps) {
  if constexpr (kCentered) {
    const float error = __fmul_rn(sums[2], inverse_cols);
    float variance = __fmul_rn(sums[0], inverse_cols);  // infinite where the squares of finite numbers are
    if (variance < INFINITY) variance = fmaf(-error, error, variance);
    const float rstd = rsqrtf(fmaxf(variance, 0.f) + eps);
    return {mean + error, rstd, mean_g, fmaf(-error, mean_g, __fmul_rn(sums[1], inverse_cols)) * rstd};
  } else {
    const float rstd = rsqrtf(fmaf(sums[0], inverse_cols, eps));
    return {0.f, rstd, 0.f, sums[1] * inverse_cols * rstd};
  }
}

template <bool kCentered>
__device__ inline float centered(float x, float mean) {
  return kCentered ? x - mean : x;
}

// g - mean(g) - n mean(g n)
template <bool kCentered>
__device__ inline float without_means(float g, float n, const Scalars& scalars) {
  return kCentered ? g - scalars.mean_g - n * scalars.mean_gn : g - n * scalars.mean_gn;
}

// What the forward multiplied by the weight.
template <typename T>
__device__ float weighted(float n, bool cast_before_weight) {
  return cast_before_weight ? to_float(from_float<T>(n)) : n;
}

// Where a row begins in each operand.
template <typename T>
struct Rows {
  const T *x, *grad_y, *grad_sum, *weight;
  T* grad_x;
  __device__ Rows(const NormBackwardParams& params, int64_t row)
      : x(static_cast<const T*>(params.x) + row * params.x_stride),
        grad_y(static_cast<const T*>(params.grad_y) + row * params.grad_y_stride),
        grad_sum(static_cast<const T*>(params.grad_sum) + row * params.grad_sum_stride),
        weight(static_cast<const T*>(params.weight)),
        grad_x(static_cast<T*>(params.grad_x) + row * params.cols) {}
};

// How many of grad_w and grad_b are wanted.
inline int wanted_sums(const NormBackwardParams& p) { return (p.grad_weight != nullptr) + (p.grad_bias != nullptr); }

inline RowOperands row_operands(const NormBackwardParams& p) {
  return {p.rows,
          p.cols,
          {{p.x, p.x_stride}, {p.grad_y, p.grad_y_stride}, {p.grad_sum, p.grad_sum_stride}, {p.weight}, {p.grad_x}}};
}

}  // namespace llmk::kernels::norm
