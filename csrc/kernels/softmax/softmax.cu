// Softmax of the last dimension, or its logarithm:
//
//   z = scale x + mask;  m = max(z);  y = round(e^(z - m) / sum(e^(z - m)))   or   round(z - m - log(sum(e^(z - m))))
//
// x [rows, cols] with rows any distance apart, y contiguous; float32, float16 or bfloat16; float32 arithmetic. Masks:
// the columns after the row's own (causal), a tensor that is added, a tensor of bool. A row without any column gives
// zeros. Moves 2 elements per element, and what there is of a mask: memory is the limit. Short rows are kept in
// registers, also those of any alignment (row_words.cuh), long ones in the shared memory of a cluster (row_part.cuh),
// with maximum and sum as one reduction (online softmax, Milakov & Gimelshein 2018); the rest is read twice.
#include "softmax.h"

#include "kernels/dispatch.cuh"
#include "kernels/row_part.cuh"
#include "kernels/row_words.cuh"

namespace llmk::kernels {
namespace {

constexpr int kShortThreads = 256;  // of a block that has rows in registers

// The numbers z of a row. kPartial: of a vector, some columns may lie outside of the row; behind it z is -inf.
template <typename T, int N, bool kMasked, bool kPartial = false>
struct Scores {
  float scale;
  int64_t cols;
  int64_t visible;      // columns before this one may take part
  const T* bias;        // of the row, or null
  const uint8_t* keep;  // likewise
  int64_t col_stride;
  bool is_vector;

  __device__ Scores(const SoftmaxParams& params, int64_t row, bool mask_is_vector)
      : scale(static_cast<float>(params.scale)), cols(params.cols), visible(params.cols), bias(nullptr), keep(nullptr) {
    if constexpr (kMasked) {
      const SoftmaxMask& mask = params.mask;
      if (params.causal_rows > 0) {
        const int64_t below = params.causal_rows - 1 - row % params.causal_rows;  // rows of its matrix after it
        visible = max(int64_t{0}, params.cols - below);
      }
      const int64_t middle = row / mask.sizes[1], offset = middle / mask.sizes[0] * mask.strides[0] +
                                                           middle % mask.sizes[0] * mask.strides[1] +
                                                           row % mask.sizes[1] * mask.strides[2];
      if (mask.data && mask.is_bool) keep = static_cast<const uint8_t*>(mask.data) + offset;
      if (mask.data && !mask.is_bool) bias = static_cast<const T*>(mask.data) + offset;
      col_stride = mask.col_stride;
      is_vector = mask_is_vector;
    }
  }

  // Of the vector at column c, the first `left` elements lie in the row, and with kPartial no others.
  __device__ void operator()(const Vec<T, N>& x, int64_t c, float (&z)[N], [[maybe_unused]] int left = N) const {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = x[i] * scale;
    if constexpr (kMasked && kPartial) {
      const auto exists = [&](int i) { return c + i >= 0 && i < left; };
      if (bias && (col_stride != 1 || N <= 2)) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (exists(i)) z[i] += to_float(bias[(c + i) * col_stride]);
        }
      } else if (bias) {
        const auto values = load_shifted(bias, c, int64_t{0}, cols);
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] += values[i];
      } else if (keep) {
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] = exists(i) && keep[(c + i) * col_stride] ? z[i] : -INFINITY;
      }
    } else if constexpr (kMasked) {
      if (bias && is_vector) {
        const auto values = Vec<T, N>::load(bias + c);
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] += values[i];
      } else if (bias) {
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] += to_float(bias[(c + i) * col_stride]);
      } else if (keep && N > 1 && is_vector) {
        const auto flags = Vec < uint8_t, N == 1 ? 2 : N > ::load(keep + c);
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] = flags.data[i] ? z[i] : -INFINITY;
      } else if (keep) {
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] = keep[(c + i) * col_stride] ? z[i] : -INFINITY;
      }
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < N; ++i) z[i] = c + i < visible ? z[i] : -INFINITY;
    } else if (kPartial) {
      if (left < N) {
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] = i < left ? z[i] : -INFINITY;
      }
    }
  }
};

// From the numbers of a row to y.
struct Result {
  float shift, factor, log_sum;
  bool log;

  __device__ Result(const MaxSum& total, bool log) : shift(total.shift()), log(log) {
    factor = total.sum == 0.f ? 0.f : 1.f / total.sum;
    log_sum = log ? logf(total.sum) : 0.f;
  }
  __device__ float operator()(float z) const { return log ? z - shift - log_sum : exp_approximate(z - shift) * factor; }
};

// A row in registers: kVectors vectors per thread. Maximum and sum are two reductions, so that each power is computed
// once. An H200, us; in brackets by kernels on the way to this one. One reduction takes the powers of the thread's
// maximum and corrects them:
//
//   vectors          | 2048 x 4096 float32 | 8192 x 4096 float32 | 8192 x 8192 bfloat16
//   -----------------|---------------------|---------------------|---------------------
//   2                |        19.6         |        71.3         |       (71.1)
//   4                |        17.7         |        66.0         |        68.9
//   8                |        19.2         |        67.7         |        97.2
//   4, one reduction |                     |                     |       (69.1)
//
// Template parameter kMasked, since the masks' branches and pointers would cost the plain softmax registers.
template <typename T, int kVectors, bool kMasked>
__global__ void __launch_bounds__(kShortThreads, kMasked ? 1 : 4)
    softmax_kernel(const SoftmaxParams params, bool mask_is_vector) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  __shared__ float maxima[kShortThreads / 32], sums[kShortThreads / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  const T* const x = static_cast<const T*>(params.x) + row * params.x_stride;
  T* const y = static_cast<T*>(params.y) + row * params.cols;
  const int cols = row < params.rows ? static_cast<int>(params.cols) : 0;
  const auto column = [&](int v) { return (group.rank + v * group.threads) * N; };
  pdl_launch_dependents();
  pdl_wait();
  V values[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) < cols) values[v] = V::load(x + column(v));
  }
  const Scores<T, N, kMasked> scores(params, row, mask_is_vector);
  float z[kVectors][N];
  MaxSum total = MaxSum::none();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= cols) continue;
    scores(values[v], column(v), z[v]);
#pragma unroll
    for (int i = 0; i < N; ++i) total.max = fmaxf(total.max, z[v][i]);
  }
  total.max = group_reduce(total.max, -INFINITY, group, maxima, warp_max);
  const float shift = total.shift();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= cols) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float power = exp_approximate(z[v][i] - shift);
      total.sum += power;
      z[v][i] = params.log ? z[v][i] - shift : power;
    }
  }
  float sum[1] = {total.sum};
  group_sum(sum, group, sums);
  total.sum = sum[0];
  const Result result(total, params.log);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= cols) continue;
    V::of([&](int i) { return params.log ? z[v][i] - result.log_sum : z[v][i] * result.factor; }).store(y + column(v));
  }
}

// The same of a row of any alignment, by words.
template <typename T, int kWords, bool kMasked>
__global__ void __launch_bounds__(kMaxWordThreads, 2)
    softmax_words_kernel(const SoftmaxParams params, const WordPlan plan, bool keep_inputs) {
  using Slot = RowSlot<T, kWords>;
  using W = typename Slot::Word;
  constexpr int N = Slot::kPerWord;
  extern __shared__ int4 slots[];
  __shared__ float maxima[kMaxWordThreads / 32], sums[kMaxWordThreads / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  const int cols = row < params.rows ? static_cast<int>(params.cols) : 0;
  Slot slot(slots, 0, group, plan.rows_per_block, cols);
  pdl_launch_dependents();
  pdl_wait();
  slot.copy(static_cast<const T*>(params.x) + row * params.x_stride, l2_policy(keep_inputs));
  cp_async_commit();
  const Scores<T, N, kMasked, /*kPartial=*/true> scores(params, row, false);
  Slot::arrived();
  W values[kWords];
  slot.load(values);
  float z[kWords][N];
  MaxSum total = MaxSum::none();
  const auto score = [&](auto full) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      scores(values[i], slot.column(i), z[i], decltype(full)::value ? N : cols - slot.column(i));
#pragma unroll
      for (int k = 0; k < N; ++k) total.max = fmaxf(total.max, z[i][k]);
    }
  };
  if (!kMasked && slot.is_full()) {
    score(std::true_type{});
  } else {
    score(std::false_type{});
  }
  total.max = group_reduce(total.max, -INFINITY, group, maxima, warp_max);
  const float shift = total.shift();
  float sum[1] = {0.f};
  const auto add_powers = [&](auto log) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float difference = z[i][k] - shift, power = exp_approximate(difference);
        sum[0] += power;
        z[i][k] = decltype(log)::value ? difference : power;
      }
    }
  };
  if (params.log) {
    add_powers(std::true_type{});
  } else {
    add_powers(std::false_type{});
  }
  group_sum(sum, group, sums);
  total.sum = sum[0];
  const Result result(total, params.log);
  T* const y = static_cast<T*>(params.y) + row * params.cols;
  if (params.log) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) values[i] = W::of([&](int k) { return z[i][k] - result.log_sum; });
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) values[i] = W::of([&](int k) { return z[i][k] * result.factor; });
  }
  slot.put(y, values);
  slot.store(y);
}

// A row in the shared memory of a cluster, or read twice.
template <typename T, int N, RowPlace kPlace, bool kMasked>
__global__ void __launch_bounds__(kPlace == RowPlace::kGlobal ? 1024 : kCachedThreads)
    softmax_long_kernel(const SoftmaxParams params, const RowSplit split, bool mask_is_vector, bool keep_inputs) {
  using V = Vec<T, N>;
  extern __shared__ int4 cache[];
  __shared__ MaxSum warps[32], blocks[kMaxCluster];
  const RowPosition at(split, params.rows, params.cols);
  const RowPart<T, N, kPlace> part(static_cast<const T*>(params.x) + at.row * params.x_stride, at, split, cache);
  at.cluster.arrive();
  pdl_launch_dependents();
  pdl_wait();
  part.prefetch(l2_policy(keep_inputs), part);
  const Scores<T, N, kMasked, kPlace == RowPlace::kShifted> scores(params, at.row, mask_is_vector);
  MaxSum sum = MaxSum::none();
  float z[N];
  const auto left = [&](auto c) {
    return static_cast<int>(min(static_cast<decltype(c)>(params.cols) - c, decltype(c){N}));
  };
  part.for_each_arriving([&](auto c) {
    scores(part.load(c), c, z, left(c));
    sum.add(z);
  });
  sum = group_reduce(sum, MaxSum::none(), at.group, warps, warp_max_sum);
  const Result result(cluster_reduce(sum, at.cluster, blocks, warp_max_sum), params.log);
  part.store_each(static_cast<T*>(params.y) + at.row * params.cols, [&](auto c) {
    scores(part.load(c), c, z, left(c));
    return V::of([&](int i) { return result(z[i]); });
  });
}

RowOperands row_operands(const SoftmaxParams& p) { return {p.rows, p.cols, {{p.x, p.x_stride}, {p.y}}}; }

// Whether every row of the mask can be read by vectors of as many elements as x is.
template <typename T>
bool mask_is_vector(const SoftmaxMask& mask) {
  constexpr int N = kVecWidth<T>;
  if (!mask.data || mask.col_stride != 1) return false;
  return is_aligned(mask.data, mask.is_bool ? N : 16) &&
         std::all_of(mask.strides, mask.strides + 3, [](int64_t stride) { return stride % N == 0; });
}

// Of a row in registers: vectors, at most, threads of a group, at least, and vectors of a thread, at most.
constexpr int64_t kShortCount = 1024;
constexpr int kLeastThreads = 8, kMostVectors = 4;
static_assert(kShortCount <= kMostVectors * kShortThreads);

template <typename T, bool kMasked>
cudaError_t launch_softmax(const SoftmaxParams& params, cudaStream_t stream) {
  constexpr int N = kVecWidth<T>;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const bool vector = all_rows_aligned<T>(row_operands(params)), vector_mask = vector && mask_is_vector<T>(params.mask);
  const int64_t count = params.cols / N;
  if (vector && count <= kShortCount) {
    int vectors = kMostVectors;
    while (vectors > 1 && count < kLeastThreads * vectors) vectors /= 2;
    const int threads = group_threads(count, vectors, kShortThreads), groups = kShortThreads / threads;
    const LaunchShape shape{(params.rows + groups - 1) / groups, dim3(threads, groups)};
    return dispatch_int<1, 2, kMostVectors>(vectors, [&](auto number) {
      return launch(softmax_kernel<T, decltype(number)::value, kMasked>, shape, stream, params, vector_mask);
    });
  }
  const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * 2);
  const WordPlan words = plan_words(params.cols, sizeof(T), 1);
  if (!vector && words.words > 0) {
    return dispatch_int<4, 8, 12, 16>(words.words, [&](auto number) {
      return launch(softmax_words_kernel<T, decltype(number)::value, kMasked>, words.shape(params.rows), stream, params,
                    words, keep);
    });
  }
  const RowSplit split = split_row(params.cols, sizeof(T), 1, vector, device, kAloneBytes);
  return dispatch_split<T>(split, [&](auto width, auto place) {
    return launch(softmax_long_kernel<T, decltype(width)::value, decltype(place)::value, kMasked>,
                  split.shape(params.rows), stream, params, split, vector_mask, keep);
  });
}

}  // namespace

cudaError_t softmax(const SoftmaxParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool masked = params.mask.data || params.causal_rows > 0;
    return masked ? launch_softmax<T, true>(params, stream) : launch_softmax<T, false>(params, stream);
  });
}

}  // namespace llmk::kernels
