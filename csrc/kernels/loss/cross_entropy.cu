// Cross-entropy of rows of logits with one target class each, and its gradient in the same pass (row_terms.cuh has the
// formulas):
//
//   losses[row] = loss of the row, lse[row];   grad = round(d losses / d logits / divisor)     where it is wanted
//
// logits [rows, vocab] with rows any distance apart; float32, float16 or bfloat16; float32 arithmetic, losses and lse.
// The gradient may be written over the logits. Reads the logits once and writes the gradient once: a row is kept in the
// shared memory of a cluster (row_part.cuh) from the reduction to the gradient. Rows that do not fit are read twice.
// Before it, one block sums the weights of the targets, which a mean divides by; after it, one block sums the losses.
// Idea of the gradient in the forward: Liger-Kernel.
#include "cross_entropy.h"

#include "kernels/row_part.cuh"
#include "kernels/row_powers.cuh"
#include "row_terms.cuh"

namespace llmk::kernels {
namespace {

constexpr int kThreads = 256;  // of a block that has a part of a row in shared memory

// What is reduced over a row.
struct RowSums {
  MaxSum exponentials;
  float weighted;  // sum of w z

  __device__ static RowSums none() { return {MaxSum::none(), 0.f}; }
};

__device__ RowSums warp_row_sums(const RowSums& sums, int threads) {
  return {warp_max_sum(sums.exponentials, threads), warp_sum(sums.weighted, threads)};
}

// Template parameter kGeneral: see is_general().
template <typename T, int N, RowPlace kPlace, bool kGeneral>
__global__ void __launch_bounds__(kPlace == RowPlace::kGlobal ? 1024 : kThreads)
    cross_entropy_kernel(const CrossEntropyParams params, const RowSplit split, const Extent<T> extent,
                         bool keep_inputs) {
  using V = Vec<T, N>;
  constexpr bool kCovered = kPlace == RowPlace::kCovered;
  extern __shared__ int4 cache[];
  __shared__ RowSums warps[32], blocks[kMaxCluster];
  const RowPosition at(split, params.rows, params.vocab);
  const bool exists = at.row < params.rows;
  const T* const logits = static_cast<const T*>(params.logits) + at.row * params.logits_stride;
  const RowPart<T, N, kPlace> part(logits, at, split, cache, extent);
  at.cluster.arrive();
  pdl_launch_dependents();
  pdl_wait();
  const int64_t target = exists ? params.target[at.row] : params.options.ignore_index;
  const bool ignored = target == params.options.ignore_index;
  if (!ignored) part.prefetch(l2_policy(keep_inputs), part);
  const LossTerms terms(params);
  const float a = ignored ? 0.f : terms.of_target(target, params.vocab);
  const bool writes_loss = exists && at.cluster.rank == 0 && at.group.rank == 0;
  float z_target = 0.f;
  if (writes_loss && target >= 0 && target < params.vocab) z_target = terms.score<kGeneral>(to_float(logits[target]));
  __syncwarp();  // the gradient may overwrite it
  RowSums sums = RowSums::none();
  if constexpr (kCovered) {  // see row_powers.cuh; a cap does not change which number is the largest
    constexpr int kSums = kGeneral ? 2 : 1;
    constexpr bool kSampled = sizeof(T) == 2;
    const auto score = [&](float x) { return terms.score<kGeneral>(x); };
    const auto largest = [&](int c) {
      const V x = part.load(c);
      float numbers[N];
#pragma unroll
      for (int i = 0; i < N; ++i) numbers[i] = score(x[i]);
      part.clear(numbers, c, -INFINITY);
      float max = numbers[0];
#pragma unroll
      for (int i = 1; i < N; ++i) max = fmaxf(max, numbers[i]);
      return max;
    };
    const auto add = [&](int c, float shift, float(&of_elements)[kSums][N]) {
      const V x = part.load(c);
      float powers[N];
      [[maybe_unused]] float weighted[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float z = score(x[i]);
        powers[i] = exp_approximate(z - shift);
        if constexpr (kGeneral) weighted[i] = __fmul_rn(terms.class_weight<kGeneral, true>(c + i), z);
      }
      part.clear(powers, c, 0.f);
      if constexpr (kGeneral) part.clear(weighted, c, 0.f);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        of_elements[0][i] += powers[i];
        if constexpr (kGeneral) of_elements[1][i] += weighted[i];
      }
    };
    float sampled = 0.f;
    if (kSampled && !ignored) sampled = largest_of_some(logits, params.vocab, score);
    const auto of_row = sum_powers<kSampled, kSums, N, kThreads / 32>(part, at, sampled, !ignored, largest, add);
    sums.exponentials = {of_row.shift, of_row.sums[0]};
    if constexpr (kGeneral) sums.weighted = of_row.sums[1];
  } else {
    const auto add = [&](auto c) {
      const V x = part.load(c);
      float z[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        z[i] = terms.score<kGeneral>(x[i]);
        if constexpr (kGeneral) sums.weighted += terms.class_weight<kGeneral>(c + i) * z[i];
      }
      sums.exponentials.add(z);
    };
    part.for_each_arriving(add, !ignored);
    sums = group_reduce(sums, RowSums::none(), at.group, warps, warp_row_sums);
    sums = cluster_reduce(sums, at.cluster, blocks, warp_row_sums);
  }
  const float shift = sums.exponentials.shift(), log_sum = logf(sums.exponentials.sum);
  const float lse = shift + log_sum;
  if (writes_loss) {
    float loss = a * (log_sum + (shift - z_target)) + terms.lse_square_scale * lse * lse;
    if (terms.smoothing > 0.f) loss += terms.smoothing * (terms.class_weights * lse - sums.weighted);
    static_cast<float*>(params.losses)[at.row] = ignored ? 0.f : loss;
    static_cast<float*>(params.lse)[at.row] = ignored ? 0.f : lse;
  }
  if (!params.grad) return;
  const float scale = 1.f / terms.divisor;
  const RowGradient gradient{shift, terms.probability_factor(a, lse) * scale / sums.exponentials.sum,
                             terms.smoothing * scale, a * scale};
  part.store_each(static_cast<T*>(params.grad) + at.row * params.grad_stride, [&](auto c) {
    return ignored ? V::of([](int) { return 0.f; })
                   : gradient.template operator()<kGeneral, kCovered>(part.load(c), c, target, terms);
  });
}

constexpr int kSumThreads = 1024;

__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_sums_kernel(const CrossEntropyParams params, bool mean, float* sums) {
  __shared__ float shared[2 * 32];
  const Group group{kSumThreads, static_cast<int>(threadIdx.x), 0};
  const auto* const weight = static_cast<const float*>(params.weight);
  pdl_launch_dependents();
  pdl_wait();
  float values[2] = {0.f, 0.f};
  if (mean) {
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < params.rows; row += kSumThreads) {
      const int64_t target = params.target[row];
      if (target == params.options.ignore_index) continue;
      const bool is_class = target >= 0 && target < params.vocab;
      values[0] += !weight ? 1.f : is_class ? weight[target] : NAN;
    }
  }
  if (weight) {
    for (int64_t c = threadIdx.x; c < params.vocab; c += kSumThreads) values[1] += weight[c];
  }
  group_sum(values, group, shared);
  if (threadIdx.x == 0) {
    sums[0] = mean ? values[0] : 1.f;
    sums[1] = weight ? values[1] : static_cast<float>(params.vocab);
  }
}

__global__ void __launch_bounds__(kSumThreads)
    cross_entropy_reduce_kernel(const CrossEntropyParams params, float* loss) {
  __shared__ float shared[32];
  const Group group{kSumThreads, static_cast<int>(threadIdx.x), 0};
  pdl_launch_dependents();
  pdl_wait();
  const auto* const losses = static_cast<const float*>(params.losses);
  float sum[1] = {0.f};
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < params.rows; row += kSumThreads) sum[0] += losses[row];
  group_sum(sum, group, shared);
  if (threadIdx.x == 0) loss[0] = sum[0] / (params.sums ? static_cast<const float*>(params.sums)[0] : 1.f);
}

template <typename T, bool kGeneral>
cudaError_t launch_cross_entropy(const CrossEntropyParams& params, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const bool vector = all_rows_aligned<T>(row_operands(params));
  RowSplit split = split_row(params.vocab, sizeof(T), 1, vector, device, kPartBytes, kThreads);
  split.alike = rows_alike<T>(params.rows, {{params.logits, params.logits_stride}, {params.grad, params.grad_stride}});
  const Extent<T> extent(params.logits, params.rows, params.logits_stride, params.vocab);
  const bool keep = keeps_inputs(device, params.rows * params.vocab * sizeof(T) * (params.grad ? 2 : 1));
  return dispatch_split<T>(split, [&](auto width, auto place) {
    return launch(cross_entropy_kernel<T, decltype(width)::value, decltype(place)::value, kGeneral>,
                  split.shape(params.rows), stream, params, split, extent, keep);
  });
}

}  // namespace

cudaError_t cross_entropy_sums(const CrossEntropyParams& params, bool mean, float* sums, cudaStream_t stream) {
  return launch(cross_entropy_sums_kernel, {1, dim3(kSumThreads)}, stream, params, mean, sums);
}

cudaError_t cross_entropy_reduce(const CrossEntropyParams& params, float* loss, cudaStream_t stream) {
  return launch(cross_entropy_reduce_kernel, {1, dim3(kSumThreads)}, stream, params, loss);
}

cudaError_t cross_entropy(const CrossEntropyParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.vocab == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return is_general(params) ? launch_cross_entropy<T, true>(params, stream)
                              : launch_cross_entropy<T, false>(params, stream);
  });
}

}  // namespace llmk::kernels
