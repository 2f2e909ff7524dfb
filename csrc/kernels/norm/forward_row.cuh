// What the kernels of the norms' forward (forward.cuh) have in common: the operands of a row, its scale, its output.
#pragma once
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "params/norm.h"

namespace llmk::kernels::norm {

// How a vector of an RMSNorm is scaled; `w` is read only where there is a weight.
struct Scale {
  bool has_weight, cast_before_weight;
  float weight_offset;

  __device__ explicit Scale(const NormParams& params)
      : has_weight(params.weight != nullptr),
        cast_before_weight(params.options.cast_before_weight),
        weight_offset(static_cast<float>(params.options.weight_offset)) {}

  template <typename T, int N>
  __device__ Vec<T, N> operator()(const Vec<T, N>& s, const Vec<T, N>& w, float rstd) const {
    using V = Vec<T, N>;
    if (has_weight && !cast_before_weight) {
      return V::of([&](int i) { return s[i] * rstd * (weight_offset + w[i]); });
    }
    const V n = V::of([&](int i) { return s[i] * rstd; });
    if (!has_weight) return n;
    if (weight_offset == 0.f) return mul(n, w);
    return V::of([&](int i) { return n[i] * (weight_offset + w[i]); });
  }
};

// The differences d of a vector to a number.
template <typename T, int N>
struct Centered {
  float d[N];

  __device__ Centered(const Vec<T, N>& s, float number) {
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] = s[i] - number;
  }
  // Of the first `count`.
  __device__ float sum(int count = N) const {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) total += i < count ? d[i] : 0.f;
    return total;
  }
  __device__ float sum_of_squares(int count = N) const {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) total += i < count ? d[i] * d[i] : 0.f;
    return total;
  }
  // The vector of a LayerNorm's output, of which n = d rstd + shift; `w` is 1 without a weight, `b` 0 without a bias.
  __device__ Vec<T, N> scale_and_shift(float rstd, float shift, const Vec<T, N>& w, const Vec<T, N>& b) const {
    return Vec<T, N>::of([&](int i) { return fmaf(d[i], rstd, shift) * w[i] + b[i]; });
  }
};

template <typename T, int N>
__device__ Vec<T, N> load_or(const T* source, int64_t offset, float value) {
  return source ? Vec<T, N>::load(source + offset) : Vec<T, N>::of([=](int) { return value; });
}

template <typename T, int N>
__device__ float sum_of_differences(const Vec<T, N>& s, float shift, float total) {
#pragma unroll
  for (int i = 0; i < N; ++i) total += s[i] - shift;
  return total;
}

template <typename T, int N>
__device__ float sum_of_squares(const Vec<T, N>& s, float total) {
#pragma unroll
  for (int i = 0; i < N; ++i) total += s[i] * s[i];
  return total;
}

__device__ inline float median(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }

// Where a row begins in each operand.
template <typename T>
struct Row {
  const T *x, *residual, *weight, *bias;
  T *y, *sum, *target;

  __device__ Row(const NormParams& params, int64_t row)
      : x(static_cast<const T*>(params.x) + row * params.x_stride),
        residual(static_cast<const T*>(params.residual) + row * params.residual_stride),
        weight(static_cast<const T*>(params.weight)),
        bias(static_cast<const T*>(params.bias)),
        y(static_cast<T*>(params.y) + row * params.cols),
        sum(static_cast<T*>(params.sum) + row * params.cols),
        target(static_cast<T*>(params.target) + row * params.target_stride) {}

  template <int N>
  __device__ Vec<T, N> load(bool has_residual, int64_t c) const {
    using V = Vec<T, N>;
    return has_residual ? add(V::load(x + c), V::load(residual + c)) : V::load(x + c);
  }
  // The median of three elements of what is normalized: the first, the middle and the last. In 16 bits, where the
  // kernel has time for no more than one load, they are of the first vector.
  template <int N>
  __device__ float typical(bool has_residual, int64_t cols) const {
    if constexpr (sizeof(T) == 2 && N >= 4) {
      const Vec<T, 4> s = load<4>(has_residual, 0);
      return median(s[0], s[1], s[3]);
    }
    const auto at = [&](int64_t c) { return load<1>(has_residual, c)[0]; };
    return median(at(0), at(cols / 2), at(cols - 1));
  }
};

// Of a row: n = (s - number) rstd + shift.
struct RowScale {
  float number, rstd, shift;
};

// The scale of a row from the sums of the differences to `typical` and of their squares.
__device__ inline RowScale scale_of_sums(float typical, float sum, float squares, float inverse_cols, float eps) {
  const float mean = sum * inverse_cols, mean_square = squares * inverse_cols;
  float variance = mean_square;  // infinite where the squares of finite numbers are: then n is 0, as from eager
  if (mean_square < INFINITY) variance -= mean * mean;
  const float rstd = rsqrtf((variance < 0.f ? 0.f : variance) + eps);  // NaN stays NaN
  return {typical, rstd, -mean * rstd};
}

// The scale of a row of which a thread has the vectors for which mine(v) is true. `typical`: see Row::typical().
// `first` and `second` are what row_sum() needs, one behind the other.
//
// 16 bits: one reduction, of the differences to `typical` and of their squares. That is an element of the row, so at
// most sqrt(cols) standard deviations from the mean: what cancels costs the variance no digit that the result shows.
template <typename T, int N, int kVectors, typename Mine>
__device__ RowScale scale_of_row(const Vec<T, N> (&s)[kVectors], float typical, float inverse_cols, float eps,
                                 const Group& group, float* first, float* second, const Mine& mine) {
  float sums[2][kVectors];
  const auto add_up = [&](float number) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      sums[0][v] = sums[1][v] = 0.f;
      if (!mine(v)) continue;
      const Centered<T, N> centered(s[v], number);
      sums[0][v] = centered.sum();
      sums[1][v] = centered.sum_of_squares();
    }
  };
  add_up(typical);
  if constexpr (sizeof(T) == 2) {
    float totals[2];
    row_sums(sums, totals, group, first);
    return scale_of_sums(typical, totals[0], totals[1], inverse_cols, eps);
  } else {
    const float mean = typical + row_sum(sums[0], group, first) * inverse_cols;
    add_up(mean);
    return {mean, rsqrtf(row_sum(sums[1], group, second) * inverse_cols + eps), 0.f};
  }
}

// target + alpha y, with the product and the sum rounded.
template <typename T, int N>
__device__ Vec<T, N> add_scaled(const Vec<T, N>& target, const Vec<T, N>& y, float alpha) {
  return add(target, Vec<T, N>::of([&](int i) { return alpha * y[i]; }));
}

// The sum that a norm is a part of.
enum class Sum {
  kNone,
  kBefore,  // x + residual, then its norm
  kAfter,   // target + alpha norm(x)
};

// The threads that share a row, and which row.
__device__ inline Group row_group() {
  return {static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
}
__device__ inline int64_t row_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

}  // namespace llmk::kernels::norm
