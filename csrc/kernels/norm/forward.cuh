// Normalization of rows, alone or after a residual add: RMSNorm (Zhang & Sennrich 2019) and, centered, LayerNorm (Ba,
// Kiros & Hinton 2016), which is the RMSNorm of a row minus its mean, plus a bias:
//
//   s = round(x + residual)                                       (s = x without a residual)
//   RMSNorm:    n = s / sqrt(mean(s^2) + eps)                     fp32
//               y = round(round(n) (offset + w))   or   round(n (offset + w)) the two rounding orders in use
//   LayerNorm:  n = (s - m) / sqrt(mean((s - m)^2) + eps), m = mean(s); y = round(n round(offset + w) + b)
//
// An RMSNorm behind a block is added to the residual, the addend: target = round(addend + round(alpha y)).
//
// x [rows, cols] with rows any distance apart, y contiguous; float32, float16 or bfloat16; float32 accumulation.
// Moves 2 elements per element (4 with a residual): memory is the limit. A group of threads loads a row by 16-byte
// accesses and keeps it in registers from the reductions to the store. Rows that are not aligned to 16 bytes are kept
// there as well (row_cover.cuh), long ones in shared memory (row_part.cuh). Rows that are too long for that, or short
// and not aligned, are read once per reduction and once more; all reads but the first mostly hit the cache.
//
// The mean is that of the differences to an element of the row, or to the mean of a few, so that it is exact where all
// elements are equal, and does not cancel where it is large. If that number is far from the others, the differences
// lose the others' last digits. So in float32, and where a row is read more than once, the variance and a correction of
// the mean are those of the differences to this mean. 16 bits in registers: see scale_of_row() and number_near().
//
// kCentered is a template parameter in all that follows, since the second reduction costs RMSNorm registers and time.
#pragma once
#include "device/ptx.cuh"
#include "forward_cover.cuh"
#include "forward_row.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/row_part.cuh"
#include "plan.h"

namespace llmk::kernels::norm {

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
  __shared__ float shared[(kCentered ? 3 : 1) * kMaxRowsPerBlock * kMaxVirtualWarps];
  constexpr bool kOneRow = kVectors > 1, kResidual = kSum == Sum::kBefore;
  const Group group = kOneRow ? block_group() : row_group();
  const int64_t index = kOneRow ? blockIdx.x : row_index();
  const Row<T> row(params, index);
  // Unsigned, for a shift instead of a division of 64 bits: rows that are kept in registers are short.
  const int count = kOneRow || index < params.rows ? static_cast<int>(static_cast<uint32_t>(params.cols) / N) : 0;
  const auto mine = [&](int v) { return group.rank + v * group.threads < count; };
  // Where a vector is in an operand. In bytes and unsigned, so that the row's address is added by the access itself.
  const auto at = [&](auto* row, int v) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(row)>>, const char, char>;
    const unsigned offset = static_cast<unsigned>(group.rank + v * group.threads) * static_cast<unsigned>(sizeof(V));
    return reinterpret_cast<decltype(row)>(reinterpret_cast<Byte*>(row) + offset);
  };
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
    if (mine(v)) s[v] = load(at(row.x, v));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (kSum != Sum::kNone && mine(v)) r[v] = load(at(kResidual ? row.residual : row.addend, v));
  }
  RowScale of_row{};
  if constexpr (kCentered) {
    constexpr bool kNeedsElement = sizeof(T) == 4 || kVectors == 1;  // see scale_of_row()
    const float element = kNeedsElement && count > 0 ? row.element(kResidual) : 0.f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kResidual && mine(v)) (s[v] = add(s[v], r[v])).store(at(row.sum, v));
    }
    of_row = scale_of_row(s, count, element, inverse_cols, eps, group, shared, mine);
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (params.weight && mine(v)) w[v] = load(at(row.weight, v));  // in flight during the reduction
    }
    float squares[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      squares[v] = 0.f;
      if (!mine(v)) continue;
      if constexpr (kResidual) s[v] = add(s[v], r[v]);
      squares[v] = sum_of_squares(s[v], 0.f);
    }
    of_row.rstd = rsqrtf(row_sum(squares, group, shared) * inverse_cols + eps);
  }
  const Scale scale(params);
  [[maybe_unused]] const float weight_offset = weight_offset_of(params);
  const auto output = [&](int v) {
    if constexpr (kCentered) {  // weight and bias come late, since registers are worth more than their latency
      forget_floats(s[v]);
      const V weight = load_or<T, N>(row.weight != nullptr, at(row.weight, v), 1.f);
      const V bias = load_or<T, N>(row.bias != nullptr, at(row.bias, v), 0.f);
      return Centered<T, N>(s[v], of_row.mean).output(of_row.rstd, with_offset(weight, weight_offset), bias);
    }
    return scale(s[v], w[v], of_row.rstd);
  };
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!mine(v)) continue;
    if constexpr (kResidual) {
      if constexpr (!kCentered) s[v].store(at(row.sum, v));
      output(v).store(at(row.y, v));
    } else if constexpr (kSum == Sum::kAfter) {
      add_scaled(r[v], output(v), static_cast<float>(params.alpha)).store(at(row.target, v));
    } else {
      output(v).assign_to(at(row.y, v));
    }
  }
}

// A row of any length and alignment, read once per reduction and once more.
template <typename T, int N, bool kCentered>
__global__ void __launch_bounds__(1024) norm_long_kernel(const NormParams params) {
  using V = Vec<T, N>;
  __shared__ float shared[kCentered ? 2 : 1][2 * 32];
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
  float number = 0.f;
  if constexpr (kCentered) {
    const float first = end > 0 ? row.template load<1>(params.residual != nullptr, 0)[0] : 0.f;
    float differences[1] = {0.f};
    for (int64_t c = begin; c < end; c += step) differences[0] += Centered<T, N>(load(c), first).sum();
    group_sum(differences, group, shared[0]);
    number = first + differences[0] * inverse_cols;
  }
  float sums[2] = {0.f, 0.f};
  for (int64_t c = begin; c < end; c += step) {
    if constexpr (kCentered) {
      const Centered<T, N> centered(V::load(source + c), number);
      sums[0] += centered.sum();
      sums[1] += centered.sum_of_squares();
    } else {
      sums[1] = sum_of_squares(load(c), sums[1]);
    }
  }
  group_sum(sums, group, shared[kCentered ? 1 : 0]);
  const RowScale of_row = scale_of_sums(number, sums[0], sums[1], inverse_cols, eps);
  const Scale scale(params);
  [[maybe_unused]] const float weight_offset = weight_offset_of(params);
  for (int64_t c = begin; c < end; c += step) {
    const V s = V::load(source + c);
    if constexpr (kCentered) {
      const V w = load_or<T, N>(row.weight != nullptr, row.weight + c, 1.f);
      const V b = load_or<T, N>(row.bias != nullptr, row.bias + c, 0.f);
      Centered<T, N>(s, of_row.mean).output(of_row.rstd, with_offset(w, weight_offset), b).store(row.y + c);
    } else {
      const V w = params.weight ? V::load(row.weight + c) : V{};
      const V y = scale(s, w, of_row.rstd);
      if (params.target) {
        add_scaled(V::load(row.addend + c), y, static_cast<float>(params.alpha)).store(row.target + c);
      } else {
        y.store(row.y + c);
      }
    }
  }
}

// A long row of any alignment, in shared memory. Each output is computed at its own aligned vectors, so that a vector
// of the weight is cut out of two, which the L1 cache has.
template <typename T, bool kCentered>
__global__ void __launch_bounds__(kCachedThreads)
    norm_shifted_kernel(const NormParams params, const RowSplit split, bool keep_inputs) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  using Part = RowPart<T, N, RowPlace::kShifted>;
  extern __shared__ int4 cache[];
  __shared__ float shared[kCentered ? 2 : 1][2 * 32];
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
  float number = 0.f, sums[2] = {0.f, 0.f};
  if constexpr (kCentered) {
    const float first = at.end > 0 ? row.template load<1>(has_residual, 0)[0] : 0.f;
    float differences[1] = {0.f};
    x.for_each_arriving([&](int c) { differences[0] += Centered<T, N>(load(c), first).sum(cols - c); });
    group_sum(differences, at.group, shared[0]);
    number = first + differences[0] * inverse_cols;
    x.for_each([&](int c) {
      const Centered<T, N> centered(load(c), number);
      sums[0] += centered.sum(cols - c);
      sums[1] += centered.sum_of_squares(cols - c);
    });
  } else {
    x.for_each_arriving([&](int c) { sums[1] = sum_of_squares(load(c), sums[1]); });
  }
  group_sum(sums, at.group, shared[kCentered ? 1 : 0]);
  const RowScale of_row = scale_of_sums(number, sums[0], sums[1], inverse_cols, eps);
  const Scale scale(params);
  [[maybe_unused]] const float weight_offset = weight_offset_of(params);
  const auto parameter = [&](const T* values, int c, float otherwise) {
    return values ? load_shifted(values, c, 0, cols) : V::of([=](int) { return otherwise; });
  };
  const auto output = [&](int c) {
    if constexpr (kCentered) {
      const V w = parameter(row.weight, c, 1.f), b = parameter(row.bias, c, 0.f);
      return Centered<T, N>(load(c), of_row.mean).output(of_row.rstd, with_offset(w, weight_offset), b);
    }
    return scale(load(c), parameter(row.weight, c, 0.f), of_row.rstd);
  };
  if (has_residual) x.store_each(row.sum, load);
  if (params.target) {
    x.store_each(row.target, [&](int c) {
      return add_scaled(load_shifted(row.addend, c, 0, cols), output(c), static_cast<float>(params.alpha));
    });
  } else {
    x.store_each(row.y, output);
  }
}

inline RowOperands row_operands(const NormParams& p) {
  return {p.rows,
          p.cols,
          {{p.x, p.x_stride},
           {p.residual, p.residual_stride},
           {p.addend, p.addend_stride},
           {p.target, p.target_stride},
           {p.weight},
           {p.bias},
           {p.y},
           {p.sum}}};
}

// Calls body(std::integral_constant<Sum, sum>{}); a LayerNorm has no sum behind it.
template <bool kCentered, typename Body>
cudaError_t dispatch_sum(Sum sum, Body&& body) {
  if (sum == Sum::kBefore) return body(std::integral_constant<Sum, Sum::kBefore>{});
  if constexpr (!kCentered) {
    if (sum == Sum::kAfter) return body(std::integral_constant<Sum, Sum::kAfter>{});
  }
  return body(std::integral_constant<Sum, Sum::kNone>{});
}

template <bool kCentered>
cudaError_t forward(const NormParams& params, Dtype dtype, cudaStream_t stream, bool may_overlap) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const bool vector = all_rows_aligned<T>(row_operands(params));
    const Sum sum = params.residual ? Sum::kBefore : params.target ? Sum::kAfter : Sum::kNone;
    if (!vector) {
      auto cover = plan_forward_cover<T>(params, sum, kCentered, device);
      if (cover.plan.vectors > 0) {
        cover.shape.may_overlap = may_overlap;
        const int64_t operands = sum == Sum::kNone ? 2 : 4;
        const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * operands);
        const RowOperand other = params.residual ? RowOperand{params.residual, params.residual_stride}
                                                 : RowOperand{params.addend, params.addend_stride};
        const bool alike = rows_alike<T>(params.rows, {{params.x, params.x_stride},
                                                       other,
                                                       {params.target, params.target_stride},
                                                       {params.y, params.cols},
                                                       {params.sum, params.cols}});
        const Extent<T> extent(params.x, params.rows, params.x_stride, params.cols);
        const Extent<T> other_extent(other.pointer, params.rows, other.stride, params.cols);
        const int64_t least_stride = other.pointer ? std::min(params.x_stride, other.stride) : params.x_stride;
        return dispatch_int<1, 2, 3, 4, 5, 6>(cover.plan.vectors, [&](auto vectors) {
          return dispatch_sum<kCentered>(sum, [&](auto sum_tag) {
            constexpr int kVectors = decltype(vectors)::value;
            constexpr Sum kSum = decltype(sum_tag)::value;
            return launch(alike ? norm_cover_kernel<T, kVectors, kCentered, kSum, true>
                                : norm_cover_kernel<T, kVectors, kCentered, kSum, false>,
                          cover.shape, stream, params, extent, other_extent, 1.f / static_cast<float>(params.cols),
                          least_stride, keep);
          });
        });
      }
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
      return dispatch_sum<kCentered>(sum, [&](auto sum_tag) {
        return dispatch_int<0, 1>(keeps_inputs(device, bytes), [&](auto keep) {
          constexpr int kVectors = decltype(vectors)::value;
          return launch(norm_kernel<T, N, kVectors, kCentered, decltype(sum_tag)::value, decltype(keep)::value != 0>,
                        shape, stream, params, 1.f / static_cast<float>(params.cols));
        });
      });
    });
  });
}

}  // namespace llmk::kernels::norm
