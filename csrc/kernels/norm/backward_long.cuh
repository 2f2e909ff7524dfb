// The norms' backward (backward.cuh) for rows that do not fit a block: one kernel over rows for grad_x, m and rstd, one
// over column strips for grad_w and grad_b. Rows that are not aligned have their vectors cut out of two (shifted.cuh);
// the shortest, which are not for words either, are read element by element. The sums over a row take its own vectors,
// so that their order does not depend on where it starts.
//
// A product that could be fused into more than one sum, or into none, is written as __fmul_rn(): an element has the
// same bits in every copy of the code.
#pragma once
#include <algorithm>

#include "backward_row.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/shifted.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/launch.h"
#include "kernels/row_words.cuh"
#include "plan.h"

namespace llmk::kernels::norm {

// How a thread of these kernels accesses N columns of a row.
template <typename T, int N, bool kShifted>
struct LongAccess {
  using V = Vec<T, N>;
  using Loaded = std::conditional_t<kShifted, Uncut<T>, V>;  // under way, until its vector is wanted

  // Columns outside of [0, end) are 0, of a row that is not shifted all or none.
  __device__ static Loaded load(const T* row, int64_t c, int64_t end) {
    if constexpr (kShifted) {
      return Loaded(row, c, int64_t{0}, end);
    } else {
      return c < end ? V::load(row + c) : V{};
    }
  }
  __device__ static V vector(const Loaded& loaded) {
    if constexpr (kShifted) {
      return loaded.vector();
    } else {
      return loaded;
    }
  }
  // To a row that is aligned at c.
  __device__ static void store(const V& value, T* row, int64_t c, int64_t end) {
    if constexpr (kShifted) {
      store_aligned(value, row, c, int64_t{0}, end);
    } else {
      value.store(row + c);
    }
  }
};

// grad_x of a row of any length and alignment, read twice, or three times if centered. `statistics`: where to leave
// rstd [rows] and, if centered, the mean [rows]; or null.
template <typename T, int N, bool kShifted, bool kCentered>
__global__ void __launch_bounds__(1024) norm_backward_long_kernel(const NormBackwardParams params, float* statistics) {
  using Access = LongAccess<T, N, kShifted>;
  using V = typename Access::V;
  using Loaded = typename Access::Loaded;
  struct Vectors {
    V x, grad_y, w;
  };
  constexpr int kSums = kCentered ? 3 : 2;
  __shared__ float shared[kCentered ? 2 : 1][kSums * 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  pdl_launch_dependents();
  pdl_wait();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  const Rows<T> rows(params, row);
  const float weight_offset = rows.weight ? static_cast<float>(params.options.weight_offset) : 0.f;
  const V ones = V::of([](int) { return 1.f; });
  const int64_t end = row < params.rows ? params.cols : 0;
  const int64_t begin = static_cast<int64_t>(group.rank) * N, step = static_cast<int64_t>(group.threads) * N;
  const auto load_vectors = [&](int64_t c) {
    const Loaded x = Access::load(rows.x, c, end), grad_y = Access::load(rows.grad_y, c, end);
    const Loaded w = rows.weight ? Access::load(rows.weight, c, end) : Loaded{};
    return Vectors{Access::vector(x), Access::vector(grad_y), rows.weight ? Access::vector(w) : ones};
  };
  const auto g = [&](const V& grad_y, const V& w, int i) { return __fmul_rn(grad_y[i], weight_offset + w[i]); };
  // Calls body(x, g, whether there are such): behind the end of the row they are 0.
  const auto for_elements = [&](const auto& body) {
    for (int64_t c = begin; c < end; c += step) {
      const auto [x, grad_y, w] = load_vectors(c);
      const int count = kShifted ? static_cast<int>(min(int64_t{N}, end - c)) : N;
#pragma unroll
      for (int i = 0; i < N; ++i) body(x[i], g(grad_y, w, i), i < count);
    }
  };
  float mean = 0.f, mean_g = 0.f;
  if constexpr (kCentered) {
    float sums[2] = {0.f, 0.f};
    for_elements([&](float x, float g, bool) { sums[0] += x, sums[1] = __fadd_rn(sums[1], g); });
    group_sum(sums, group, shared[1]);
    mean = sums[0] * inverse_cols, mean_g = sums[1] * inverse_cols;
  }
  float sums[kSums] = {};
  for_elements([&](float x, float g, bool exists) {
    const float d = kCentered && !exists ? 0.f : centered<kCentered>(x, mean);
    sums[0] += d * d;
    sums[1] += g * d;
    if constexpr (kCentered) sums[2] += d;
  });
  group_sum(sums, group, shared[0]);
  const Scalars scalars = row_scalars<kCentered>(sums, mean, mean_g, inverse_cols, eps);
  if (statistics && group.rank == 0 && row < params.rows) {
    statistics[row] = scalars.rstd;
    if constexpr (kCentered) statistics[params.rows + row] = scalars.mean;
  }
  for (int64_t c = begin - (kShifted ? misalignment(rows.grad_x) : 0); c < end; c += step) {
    const Loaded grad_sum = rows.grad_sum ? Access::load(rows.grad_sum, c, end) : Loaded{};
    const auto [x, grad_y, w] = load_vectors(c);
    const V extra = Access::vector(grad_sum);
    const V result = V::of([&, &x = x, &grad_y = grad_y, &w = w](int i) {
      const float n = centered<kCentered>(x[i], scalars.mean) * scalars.rstd;
      const float grad = __fmul_rn(scalars.rstd, without_means<kCentered>(g(grad_y, w, i), n, scalars));
      return rows.grad_sum ? grad + extra[i] : grad;
    });
    Access::store(result, rows.grad_x, c, end);
  }
}

constexpr int kStripThreads = 256;  // of a block of the kernel below

// Partial grad_w and grad_b after the kernel above: block (s, p) sums strip s of the columns, N of a thread, over the
// p-th range of rows.
template <typename T, int N, bool kShifted, bool kCentered>
__global__ void __launch_bounds__(kStripThreads)
    partial_sums_kernel(const NormBackwardParams params, const float* statistics, int64_t strips) {
  using Access = LongAccess<T, N, kShifted>;
  using V = typename Access::V;
  struct LoadedRow {
    typename Access::Loaded x, grad_y;
    float mean, rstd;
  };
  __shared__ float sums_of_warps[kStripThreads * N];
  pdl_launch_dependents();
  pdl_wait();
  const int warp = threadIdx.x / 32;
  const int64_t first = (blockIdx.x % strips * kStripThreads + warp * 32) * N, part = blockIdx.x / strips;
  const int64_t col = first + threadIdx.x % 32 * N;
  if (first >= params.cols) return;
  const int64_t begin = params.rows * part / params.partial_rows, end = params.rows * (part + 1) / params.partial_rows;
  const bool rounds = !kCentered && params.options.cast_before_weight;
  float grad_weight[N] = {}, grad_bias[N] = {};
  const auto load = [&](int64_t row) {
    const Rows<T> rows(params, row);
    return LoadedRow{Access::load(rows.x, col, params.cols), Access::load(rows.grad_y, col, params.cols),
                     kCentered ? statistics[params.rows + row] : 0.f, statistics[row]};
  };
  const auto add = [&](int64_t, const LoadedRow& row) {
    const V x = Access::vector(row.x), grad_y = Access::vector(row.grad_y);
    float n[N];
#pragma unroll
    for (int i = 0; i < N; ++i) n[i] = centered<kCentered>(x[i], row.mean) * row.rstd;
    const V rounded = V::of([&](int i) { return n[i]; });
#pragma unroll
    for (int i = 0; i < N; ++i) {
      grad_weight[i] += grad_y[i] * (rounds ? rounded[i] : n[i]);
      grad_bias[i] += grad_y[i];
    }
  };
  if constexpr (kShifted) {
    for_rows_ahead(begin, end, load, add);
  } else {
#pragma unroll(N > 1 ? 2 : 4)
    for (int64_t row = begin; row < end; ++row) add(row, load(row));
  }
  auto* partial = static_cast<float*>(params.partials) + part * params.cols;
  const auto store = [&](const float(&sums)[N]) {
    store_sums(sums, sums_of_warps + warp * 32 * N, partial, first, 0, params.cols);
    partial += params.partial_rows * params.cols;
  };
  if (params.grad_weight) store(grad_weight);
  if (params.grad_bias) store(grad_bias);
}

template <typename T, bool kCentered>
cudaError_t launch_long(const NormBackwardParams& params, cudaStream_t stream) {
  const int sums = wanted_sums(params);
  float* const statistics =
      sums > 0 ? static_cast<float*>(params.partials) + sums * params.partial_rows * params.cols : nullptr;
  const auto launch_by = [&](auto width, auto shifted) {
    constexpr int N = decltype(width)::value;
    constexpr bool kShifted = decltype(shifted)::value;
    const int64_t count = (params.cols + N - 1) / N;
    const int threads = group_threads(count, 4, 1024), groups = std::max(1, 256 / threads);
    const LaunchShape shape{(params.rows + groups - 1) / groups, dim3(threads, groups)};
    const cudaError_t status =
        launch(norm_backward_long_kernel<T, N, kShifted, kCentered>, shape, stream, params, statistics);
    if (status != cudaSuccess || sums == 0) return status;
    const int64_t strips = (count + kStripThreads - 1) / kStripThreads;
    return launch(partial_sums_kernel<T, N, kShifted, kCentered>, {strips * params.partial_rows, dim3(kStripThreads)},
                  stream, params, statistics, strips);
  };
  const std::integral_constant<int, kVecWidth<T>> wide;
  if (all_rows_aligned<T>(row_operands(params))) return launch_by(wide, std::false_type{});
  const bool is_long = params.cols * static_cast<int64_t>(sizeof(T)) >= 4 * kLeastWords;
  return is_long ? launch_by(wide, std::true_type{}) : launch_by(std::integral_constant<int, 1>{}, std::false_type{});
}

}  // namespace llmk::kernels::norm
