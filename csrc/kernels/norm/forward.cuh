// Normalization of rows, alone or after a residual add: RMSNorm (Zhang & Sennrich 2019) and, centered, LayerNorm (Ba,
// Kiros & Hinton 2016), which is the RMSNorm of a row minus its mean, plus a bias:
//
//   s = round(x + residual)                                       (s = x without a residual)
//   RMSNorm:    n = s / sqrt(mean(s^2) + eps)                     fp32
//               y = round(round(n) (offset + w))   or   round(n (offset + w)) the two rounding orders in use
//   LayerNorm:  n = (s - m) / sqrt(mean((s - m)^2) + eps), m = mean(s); y = round(n w + b)
//
// An RMSNorm behind a block is added to the residual, its target: target = round(target + round(alpha y)).
//
// x [rows, cols] with rows any distance apart, y contiguous; float32, float16 or bfloat16; float32 accumulation.
// Moves 2 elements per element (4 with a residual): memory is the limit. A group of threads loads a row by 16-byte
// accesses and keeps it in registers from the reductions to the store. Rows that are not aligned to 16 bytes are kept
// in shared memory (row_part.cuh). Rows that are too long for that, or short and not aligned, are read once per
// reduction and once more; all reads but the first mostly hit the cache.
//
// The mean is that of the differences to an element of the row, and the variance that of the differences to the mean:
// exact where all elements are equal, and without cancellation where the mean is large. The element is the median of
// three, since next to one that is far larger than the others these would lose their last digits.
//
// kCentered is a template parameter in all that follows, since the second reduction costs RMSNorm registers and time.
#pragma once
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/row_part.cuh"
#include "params/norm.h"
#include "plan.h"

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

// Has the elements converted to float once more where they are used next. Else the compiler keeps them as they are and
// as floats, in three times the registers.
template <typename T, int N>
__device__ void forget_floats(Vec<T, N>& s) {
  if constexpr (Vec<T, N>::kPaired) {
#pragma unroll
    for (int i = 0; i < N; i += 2) asm volatile("" : "+r"(reinterpret_cast<unsigned&>(s.data[i])));
  }
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
    const float mean = totals[0] * inverse_cols, mean_square = totals[1] * inverse_cols;
    float variance = mean_square;  // infinite where the squares of finite numbers are: then n is 0, as from eager
    if (mean_square < INFINITY) variance -= mean * mean;
    const float rstd = rsqrtf((variance < 0.f ? 0.f : variance) + eps);  // NaN stays NaN
    return {typical, rstd, -mean * rstd};
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

// A row in registers: kVectors vectors of N elements per thread. Blocks of several rows have one vector per thread.
// Template parameters: kSum, since its registers would cost the plain norm occupancy; kKeepInputs, since an L2
// policy on a load has a cost:
//
//   value              | case     | result
//   -------------------|----------|-------------------------------
//   the default policy | rms_norm | 2 % slower than a load without
template <typename T, int N, int kVectors, bool kCentered, Sum kSum, bool kKeepInputs>
__global__ void __launch_bounds__(kVectors == 4 ? kMaxRowVectors / 4 : 1024)
    norm_kernel(const NormParams params, float inverse_cols) {
  using V = Vec<T, N>;
  __shared__ float shared[2][kMaxRowsPerBlock * kMaxVirtualWarps];  // LayerNorm of 16 bits: all of it for one reduction
  constexpr bool kOneRow = kVectors > 1, kResidual = kSum == Sum::kBefore;
  const Group group = row_group();
  const int64_t index = kOneRow ? blockIdx.x : row_index();
  const Row<T> row(params, index);
  const int count = kOneRow || index < params.rows ? static_cast<int>(params.cols / N) : 0;
  const auto mine = [&](int v) { return group.rank + v * group.threads < count; };
  const auto offset = [&](int v) { return (group.rank + v * group.threads) * N; };
  const float eps = static_cast<float>(params.options.eps);
  [[maybe_unused]] const uint64_t policy = kKeepInputs ? l2_policy(true) : 0;
  const auto load = [&](const T* source) {
    if constexpr (kKeepInputs) return V::load(source, policy);
    return V::load(source);
  };
  pdl_launch_dependents();
  pdl_wait();
  V s[kVectors], r[kVectors], w[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) s[v] = load(row.x + offset(v));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (kSum != Sum::kNone && mine(v)) r[v] = load((kResidual ? row.residual : row.target) + offset(v));
  }
  RowScale of_row{};
  if constexpr (kCentered) {
    const float typical = count > 0 ? row.template typical<N>(kResidual, params.cols) : 0.f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kResidual && mine(v)) (s[v] = add(s[v], r[v])).store(row.sum + offset(v));
    }
    of_row = scale_of_row(s, typical, inverse_cols, eps, group, shared[0], shared[1], mine);
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (params.weight && mine(v)) w[v] = load(row.weight + offset(v));  // in flight during the reduction
    }
    float squares[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      squares[v] = 0.f;
      if (!mine(v)) continue;
      if constexpr (kResidual) s[v] = add(s[v], r[v]);
      squares[v] = sum_of_squares(s[v], 0.f);
    }
    of_row.rstd = rsqrtf(row_sum(squares, group, shared[0]) * inverse_cols + eps);
  }
  const Scale scale(params);
  const auto output = [&](int v) {
    if constexpr (kCentered) {  // weight and bias come late, since registers are worth more than their latency
      forget_floats(s[v]);
      const V weight = load_or<T, N>(row.weight, offset(v), 1.f), bias = load_or<T, N>(row.bias, offset(v), 0.f);
      return Centered<T, N>(s[v], of_row.number).scale_and_shift(of_row.rstd, of_row.shift, weight, bias);
    }
    return scale(s[v], w[v], of_row.rstd);
  };
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!mine(v)) continue;
    if constexpr (kResidual) {
      if constexpr (!kCentered) s[v].store(row.sum + offset(v));
      output(v).store(row.y + offset(v));
    } else if constexpr (kSum == Sum::kAfter) {
      add_scaled(r[v], output(v), static_cast<float>(params.alpha)).store(row.target + offset(v));
    } else {
      output(v).assign_to(row.y + offset(v));
    }
  }
}

// A row of any length and alignment, read once per reduction and once more.
template <typename T, int N, bool kCentered>
__global__ void __launch_bounds__(1024) norm_long_kernel(const NormParams params) {
  using V = Vec<T, N>;
  __shared__ float shared[kCentered ? 2 : 1][32];
  const Group group = row_group();
  const int64_t index = row_index();
  const Row<T> row(params, index);
  const int64_t end = index < params.rows ? params.cols : 0;
  const int64_t begin = static_cast<int64_t>(group.rank) * N, step = static_cast<int64_t>(group.threads) * N;
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  pdl_launch_dependents();
  pdl_wait();
  const auto load = [&](int64_t c) {  // at the first reading
    V s = V::load(row.x + c);
    if (params.residual) (s = add(s, V::load(row.residual + c))).store(row.sum + c);
    return s;
  };
  const T* source = params.residual ? row.sum : row.x;  // each thread reads back what it wrote itself
  float mean = 0.f;
  if constexpr (kCentered) {
    const float shift = end > 0 ? row.template typical<N>(params.residual != nullptr, params.cols) : 0.f;
    float differences[1] = {0.f};
    for (int64_t c = begin; c < end; c += step) differences[0] = sum_of_differences(load(c), shift, differences[0]);
    group_sum(differences, group, shared[0]);
    mean = shift + differences[0] * inverse_cols;
  }
  float squares[1] = {0.f};
  for (int64_t c = begin; c < end; c += step) {
    if constexpr (kCentered) {
      squares[0] += Centered<T, N>(V::load(source + c), mean).sum_of_squares();
    } else {
      squares[0] = sum_of_squares(load(c), squares[0]);
    }
  }
  group_sum(squares, group, shared[kCentered ? 1 : 0]);
  const float rstd = rsqrtf(squares[0] * inverse_cols + eps);
  const Scale scale(params);
  for (int64_t c = begin; c < end; c += step) {
    const V s = V::load(source + c);
    if constexpr (kCentered) {
      const V w = load_or<T, N>(row.weight, c, 1.f), b = load_or<T, N>(row.bias, c, 0.f);
      Centered<T, N>(s, mean).scale_and_shift(rstd, 0.f, w, b).store(row.y + c);
    } else {
      const V w = params.weight ? V::load(row.weight + c) : V{};
      const V y = scale(s, w, rstd);
      if (params.target) {
        add_scaled(V::load(row.target + c), y, static_cast<float>(params.alpha)).store(row.target + c);
      } else {
        y.store(row.y + c);
      }
    }
  }
}

// A row of any alignment, in shared memory. Each output is computed at its own aligned vectors, so that a vector of the
// weight is cut out of two, which the L1 cache has.
template <typename T, bool kCentered>
__global__ void __launch_bounds__(kCachedThreads)
    norm_shifted_kernel(const NormParams params, const RowSplit split, bool keep_inputs) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  using Part = RowPart<T, N, RowPlace::kShifted>;
  extern __shared__ int4 cache[];
  __shared__ float shared[kCentered ? 2 : 1][32];
  const RowPosition at(split, params.rows, params.cols);
  const Row<T> row(params, at.row);
  const bool has_residual = params.residual != nullptr;
  const Part x(row.x, at, split, cache), residual(row.residual, at, split, cache, 1);
  const int cols = static_cast<int>(params.cols);
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t policy = l2_policy(keep_inputs);
  if (has_residual) {
    Part::prefetch(policy, x, residual);
  } else {
    Part::prefetch(policy, x);
  }
  const auto load = [&](int c) { return has_residual ? add(x.load(c), residual.load(c)) : x.load(c); };
  float mean = 0.f, squares[1] = {0.f};
  if constexpr (kCentered) {
    const float shift = at.end > 0 ? row.template typical<1>(has_residual, params.cols) : 0.f;
    float differences[1] = {0.f};
    x.for_each_arriving([&](int c) { differences[0] += Centered<T, N>(load(c), shift).sum(cols - c); });
    group_sum(differences, at.group, shared[0]);
    mean = shift + differences[0] * inverse_cols;
    x.for_each([&](int c) { squares[0] += Centered<T, N>(load(c), mean).sum_of_squares(cols - c); });
  } else {
    x.for_each_arriving([&](int c) { squares[0] = sum_of_squares(load(c), squares[0]); });
  }
  group_sum(squares, at.group, shared[kCentered ? 1 : 0]);
  const float rstd = rsqrtf(squares[0] * inverse_cols + eps);
  const Scale scale(params);
  const auto parameter = [&](const T* values, int c, float otherwise) {
    return values ? load_shifted(values, c, 0, cols) : V::of([=](int) { return otherwise; });
  };
  const auto output = [&](int c) {
    if constexpr (kCentered) {
      const V w = parameter(row.weight, c, 1.f), b = parameter(row.bias, c, 0.f);
      return Centered<T, N>(load(c), mean).scale_and_shift(rstd, 0.f, w, b);
    }
    return scale(load(c), parameter(row.weight, c, 0.f), rstd);
  };
  if (has_residual) x.store_each(row.sum, load);
  if (params.target) {
    x.store_each(row.target, [&](int c) {
      return add_scaled(load_aligned(row.target, c, 0, cols), output(c), static_cast<float>(params.alpha));
    });
  } else {
    x.store_each(row.y, output);
  }
}

template <typename T>
bool is_vector(const NormParams& p) {
  return all_rows_aligned<T>(p.rows, p.cols,
                             {{p.x, p.x_stride},
                              {p.residual, p.residual_stride},
                              {p.target, p.target_stride},
                              {p.weight},
                              {p.bias},
                              {p.y},
                              {p.sum}});
}

template <bool kCentered>
cudaError_t forward(const NormParams& params, Dtype dtype, cudaStream_t stream, bool may_overlap) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const bool vector = is_vector<T>(params);
    if (!vector) {
      const int operands = params.residual ? 2 : 1;
      const RowSplit split = split_row(params.cols, sizeof(T), operands, false, device, kAloneBytes, kCachedThreads, 1);
      if (split.place == RowPlace::kShifted) {
        LaunchShape shape = split.shape(params.rows);
        shape.may_overlap = may_overlap;
        const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * operands * 2);
        return launch(norm_shifted_kernel<T, kCentered>, shape, stream, params, split, keep);
      }
    }
    const bool few_rows = params.rows <= kFewRowsPerSm * device.sm_count;
    const Sum sum = params.residual ? Sum::kBefore : params.target ? Sum::kAfter : Sum::kNone;
    const RowPlan plan = plan_norm(params.cols, sizeof(T), vector, sum != Sum::kNone, few_rows, kCentered);
    LaunchShape shape{(params.rows + plan.rows_per_block - 1) / plan.rows_per_block,
                      dim3(plan.threads_per_row, plan.rows_per_block)};
    shape.may_overlap = may_overlap;
    if (plan.vectors == 0) {
      const auto kernel = plan.width == 1 ? norm_long_kernel<T, 1, kCentered> : norm_long_kernel<T, N, kCentered>;
      return launch(kernel, shape, stream, params);
    }
    const int operands = sum == Sum::kBefore ? 4 : sum == Sum::kAfter ? 3 : 2;
    const int64_t bytes = params.rows * params.cols * sizeof(T) * operands;
    constexpr int kMany = kCentered ? 4 : 2;
    return dispatch_int<1, kMany>(plan.vectors, [&](auto vectors) {
      const auto launch_with = [&](auto sum_tag) {
        return dispatch_int<0, 1>(keeps_inputs(device, bytes), [&](auto keep) {
          constexpr int kVectors = decltype(vectors)::value;
          return launch(norm_kernel<T, N, kVectors, kCentered, decltype(sum_tag)::value, decltype(keep)::value != 0>,
                        shape, stream, params, 1.f / static_cast<float>(params.cols));
        });
      };
      if (sum == Sum::kBefore) return launch_with(std::integral_constant<Sum, Sum::kBefore>{});
      if constexpr (!kCentered) {
        if (sum == Sum::kAfter) return launch_with(std::integral_constant<Sum, Sum::kAfter>{});
      }
      return launch_with(std::integral_constant<Sum, Sum::kNone>{});
    });
  });
}

}  // namespace llmk::kernels::norm
