// What the kernels of the norms' forward (forward.cuh) have in common: the operands of a row, its scale, its output.
#pragma once
#include "device/reduce.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "params/norm.h"
#include "plan.h"

namespace llmk::kernels::norm {

// What the weight is increased by; without one the scale is 1.
__device__ inline float weight_offset_of(const NormParams& params) {
  return params.weight ? static_cast<float>(params.options.weight_offset) : 0.f;
}

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

// A LayerNorm's weight with its offset, rounded as PyTorch rounds weight + offset.
template <typename T, int N>
__device__ Vec<T, N> with_offset(const Vec<T, N>& w, float offset) {
  return offset == 0.f ? w : Vec<T, N>::of([&](int i) { return offset + w[i]; });
}

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
    float total = count > 0 ? d[0] : 0.f;
#pragma unroll
    for (int i = 1; i < N; ++i) total += i < count ? d[i] : 0.f;
    return total;
  }
  __device__ float sum_of_squares(int count = N) const {
    // By fmaf(), so that all kernels round alike: of a b + c d the compiler may round either product.
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) total = i < count ? fmaf(d[i], d[i], total) : total;
    return total;
  }
  // The vector of a LayerNorm's output; `w` is 1 without a weight, `b` 0 without a bias.
  __device__ Vec<T, N> output(float rstd, const Vec<T, N>& w, const Vec<T, N>& b) const {
    return Vec<T, N>::of([&](int i) { return d[i] * rstd * w[i] + b[i]; });
  }
};

// The vector at `source`, or of this value where there is none.
template <typename T, int N>
__device__ Vec<T, N> load_or(bool there, const T* source, float value) {
  using V = Vec<T, N>;
  const V otherwise = V::of([=](int) { return value; });
  if constexpr (sizeof(V) == sizeof(Words)) {  // word by word: else the compiler picks one element after the other
    Words words = words_of(otherwise);
    if (there) words = words_of(V::load(source));
    return of_words<T>(words);
  }
  return there ? V::load(source) : otherwise;
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
  const T *x, *residual, *addend, *weight, *bias;
  T *y, *sum, *target;

  __device__ Row(const NormParams& params, int64_t row)
      : x(static_cast<const T*>(params.x) + row * params.x_stride),
        residual(static_cast<const T*>(params.residual) + row * params.residual_stride),
        addend(static_cast<const T*>(params.addend) + row * params.addend_stride),
        weight(static_cast<const T*>(params.weight)),
        bias(static_cast<const T*>(params.bias)),
        y(static_cast<T*>(params.y) + row * params.cols),
        sum(static_cast<T*>(params.sum) + row * params.cols),
        target(static_cast<T*>(params.target) + row * params.target_stride) {}

  // Goes on to a row further on.
  __device__ void advance(const NormParams& params, int64_t rows) {
    x += rows * params.x_stride, residual += rows * params.residual_stride, addend += rows * params.addend_stride;
    y += rows * params.cols, sum += rows * params.cols, target += rows * params.target_stride;
  }

  template <int N>
  __device__ Vec<T, N> load(bool has_residual, int64_t c) const {
    using V = Vec<T, N>;
    return has_residual ? add(V::load(x + c), V::load(residual + c)) : V::load(x + c);
  }
  // An element of what is normalized, for rows that are aligned; of 16 bits the median of three, which one load brings.
  __device__ float element(bool has_residual) const {
    if constexpr (sizeof(T) == 2) {
      const Vec<T, 4> s = load<4>(has_residual, 0);
      return median(s[0], s[1], s[3]);
    }
    return load<1>(has_residual, 0)[0];
  }
};

// What a LayerNorm subtracts from a row, and multiplies it by.
struct RowScale {
  float mean, rstd;
};

// From the sums over a row of the differences to a number, and of their squares.
__device__ inline RowScale scale_of_sums(float number, float sum, float squares, float inverse_cols, float eps) {
  const float mean = sum * inverse_cols, mean_square = squares * inverse_cols;
  float variance = mean_square;  // infinite where the squares of finite numbers are: then n is 0, as from eager
  if (mean_square < INFINITY) variance -= mean * mean;
  return {number + mean, rsqrtf((variance < 0.f ? 0.f : variance) + eps)};  // NaN stays NaN
}

// Of parts of a row, in shared memory: an element of each, and the sums of the differences to it and of their squares.
struct PartSums {
  float* numbers;  // three times `pitch` of them
  int pitch;

  // number 0: the element; 1, 2: the sums.
  __device__ void put(int part, int number, float value) const { numbers[part + number * pitch] = value; }
};

// The scale of a row of at most 64 parts, count_of(i) elements in part i. The moments of a part are merged as those of
// Chan, Golub & LeVeque 1983. For a whole warp.
template <typename CountOf>
__device__ RowScale merge_parts(const PartSums& of, int parts, const CountOf& count_of, float inverse_cols, float eps) {
  const int width = parts <= 4 ? 4 : parts <= 8 ? 8 : parts <= 16 ? 16 : 32;
  const int mine = static_cast<int>(threadIdx.x) & (width - 1);
  float first = 0.f, sums[2] = {0.f, 0.f};
  const auto add = [&](int part) {
    float count = 0.f, mean = 0.f, squares = 0.f;
    if (part < parts) {
      const float sum = of.numbers[part + of.pitch];
      count = count_of(part), squares = of.numbers[part + 2 * of.pitch];
      const float difference = sum * __fdividef(1.f, count);
      mean = of.numbers[part] + difference;
      if (squares < INFINITY) squares = fmaxf(fmaf(-sum, difference, squares), 0.f);
    }
    if (part == mine) first = __shfl_sync(0xffffffffu, mean, 0, width);
    const float difference = mean - first, product = count * difference;
    sums[0] += product;
    sums[1] += fmaf(product, difference, squares);
  };
  add(mine);
  if (parts > 32) add(mine + 32);
  warp_sum(sums, width);
  return scale_of_sums(first, sums[0], sums[1], inverse_cols, eps);
}

// The scale of a row of `count` vectors of which a thread has those for which mine(v) is true. `element`: one of the
// row's. `shared` has room for three times what row_sum() needs.
//
// 16 bits: one reduction, of the differences to an element and of their squares. An element is at most sqrt(elements)
// standard deviations from the mean. So what cancels costs the variance of 1024 elements no digit that the result
// shows, but it would that of a long row: there each virtual warp (see row_sums()) takes its own first element.
template <typename T, int N, int kVectors, typename Mine>
__device__ RowScale scale_of_row(const Vec<T, N> (&s)[kVectors], int count, float element, float inverse_cols,
                                 float eps, const Group& group, float* shared, const Mine& mine) {
  float sums[2][kVectors], totals[2];
  const auto add_up = [&](const auto& number) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      sums[0][v] = sums[1][v] = 0.f;
      if (!mine(v)) continue;
      const Centered<T, N> centered(s[v], number(v));
      sums[0][v] = centered.sum();
      sums[1][v] = centered.sum_of_squares();
    }
  };
  if constexpr (sizeof(T) == 2) {
    if constexpr (kVectors == 1) {
      if (group.threads <= kNarrowRow) {
        add_up([&](int) { return element; });
        row_sums(sums, totals, group, shared);
        return scale_of_sums(element, totals[0], totals[1], inverse_cols, eps);
      }
    }
    float elements[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) elements[v] = __shfl_sync(0xffffffffu, s[v][0], 0);
    add_up([&](int v) { return elements[v]; });
    const float sum = warp_sum_each(reinterpret_cast<const float(&)[2 * kVectors]>(sums));
    constexpr unsigned kLanes = 16 / kVectors;  // have the same of these sums
    const unsigned rank = group.rank, lane = rank % 32, vector = lane / kLanes % kVectors;
    const unsigned part = vector * (static_cast<unsigned>(group.threads) / 32) + rank / 32;
    element = elements[0];
#pragma unroll
    for (unsigned v = 1; v < kVectors; ++v) element = vector == v ? elements[v] : element;
    const PartSums parts{shared + group.index * 3 * kMaxVirtualWarps, kMaxVirtualWarps};
    if (lane % kLanes == 0) parts.put(part, 1 + lane / 16, sum);
    if (lane % kLanes == 0 && lane < 16) parts.put(part, 0, element);
    __syncthreads();
    const auto count_of = [&](int i) { return static_cast<float>(min(count - i * 32, 32) * N); };
    return merge_parts(parts, static_cast<int>((static_cast<unsigned>(count) + 31) / 32), count_of, inverse_cols, eps);
  } else {
    add_up([&](int) { return element; });
    const float mean = element + row_sum(sums[0], group, shared) * inverse_cols;
    add_up([&](int) { return mean; });
    row_sums(sums, totals, group, shared + kMaxRowsPerBlock * kMaxVirtualWarps);
    return scale_of_sums(mean, totals[0], totals[1], inverse_cols, eps);
  }
}

// addend + alpha y, with the product and the sum rounded.
template <typename T, int N>
__device__ Vec<T, N> add_scaled(const Vec<T, N>& addend, const Vec<T, N>& y, float alpha) {
  return add(addend, Vec<T, N>::of([&](int i) { return alpha * y[i]; }));
}

// The sum that a norm is a part of.
enum class Sum {
  kNone,
  kBefore,  // x + residual, then its norm
  kAfter,   // addend + alpha norm(x)
};

// The threads that share a row, and which row.
__device__ inline Group row_group() {
  return {static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
}
__device__ inline Group block_group() { return {static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), 0}; }
__device__ inline int64_t row_index() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

}  // namespace llmk::kernels::norm
