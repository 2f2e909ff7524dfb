// Softmax of the last dimension, or its logarithm:
//
//   z = scale x + mask;  m = max(z);  y = round(e^(z - m) / sum(e^(z - m)))   or   round(z - m - log(sum(e^(z - m))))
//
// x [rows, cols] with rows any distance apart, y contiguous; float32, float16 or bfloat16; float32 arithmetic. Masks:
// the columns after the row's own (causal), a tensor that is added, a tensor of bool. A row without any column gives
// zeros. Moves 2 elements per element, and what there is of a mask: memory is the limit. Short rows are kept in
// registers, also those of any alignment (row_cover.cuh), long ones in the shared memory of a cluster (row_part.cuh),
// with maximum and sum as one reduction (online softmax, Milakov & Gimelshein 2018) where they are aligned; the rest is
// read twice.
#include "softmax.h"

#include "device/mma.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/row_cover.cuh"
#include "kernels/row_part.cuh"
#include "kernels/row_powers.cuh"

namespace llmk::kernels {
namespace {

constexpr int kShortThreads = 256;  // of a block that has rows in registers
constexpr float kLog2E = 1.4426950408889634f, kLogOf2 = 0.6931471805599453f;

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

// The same of a row of any alignment, by the vectors that cover it. The launch bounds leave a thread of up to three
// vectors 64 registers, and of more 80. kAlike: see row_cover.cuh.
template <typename T, int kVectors, bool kMasked, bool kLog, bool kAlike>
__global__ void __launch_bounds__(kVectors > 3 ? kCoverThreads : 512, kMasked ? 1 : 2)
    softmax_cover_kernel(const SoftmaxParams params, const Extent<T> extent, bool keep_inputs) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  constexpr bool kSampled = !kMasked && sizeof(T) == 2;
  __shared__ float maxima[kCoverThreads / 32];
  __shared__ WarpSums<N> sums[2][kCoverThreads / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  if (row >= params.rows) return;  // only a warp that has a row of its own
  const T* const x = static_cast<const T*>(params.x) + row * params.x_stride;
  const Cover<T, kVectors> cover(x, static_cast<int>(params.cols), group);
  pdl_launch_dependents();
  pdl_wait();
  V values[kVectors];
  const uint64_t policy = l2_policy(keep_inputs);
  cover.load(x, extent, values, policy);
  const Scores<T, N, kMasked, kMasked> scores(params, row, false);
  float z[kVectors][N], sum[1];
  // Sums up the powers of the differences that differences_of(v) leaves in z[v], and leaves those that y is made of:
  // the powers, or for the logarithm the differences.
  const auto sum_up = [&](const auto& differences_of, const auto& power_of, WarpSums<N>* shared) {
    float of_elements[1][N] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!cover.warp_has(v)) continue;
      differences_of(v);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float power = power_of(z[v][i]);
        of_elements[0][i] += power;
        if constexpr (!kLog) z[v][i] = power;
      }
    }
    sum_covering(of_elements, cover.shift, sum, group, shared);
  };
  // The shift for the largest number of the row, of those that numbers_of(v) leaves in z[v].
  const auto look_for_max = [&](const auto& numbers_of) {
    float max = -INFINITY;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!cover.warp_has(v)) continue;
      numbers_of(v);
      cover.clear(z[v], v, -INFINITY);
#pragma unroll
      for (int i = 0; i < N; ++i) max = fmaxf(max, z[v][i]);
    }
    return MaxSum::shift(group_reduce(max, -INFINITY, group, maxima, warp_max));
  };
  if constexpr (kSampled) {  // z by the logarithm to base 2; see row_powers.cuh on the shift
    const float factor = scores.scale * kLog2E;
    float shift = largest_of_some(x, params.cols, [&](float number) { return __fmul_rn(number, factor); });
    const auto sum_above = [&](WarpSums<N>* shared) {
      sum_up(
          [&](int v) {
#pragma unroll
            for (int i = 0; i < N; ++i) z[v][i] = fmaf(values[v][i], factor, -shift);
            cover.clear(z[v], v, -INFINITY);
          },
          [](float difference) { return exp2_approximate(difference); }, shared);
    };
    sum_above(sums[0]);
    if (!(sum[0] < kMostPowers)) {
      cover.load(x, extent, values, policy);
      shift = look_for_max([&](int v) {
#pragma unroll
        for (int i = 0; i < N; ++i) z[v][i] = __fmul_rn(values[v][i], factor);
      });
      sum_above(sums[1]);
    }
  } else {
    const float shift =
        look_for_max([&](int v) { scores(values[v], cover.column(v), z[v], cover.cols - cover.column(v)); });
    sum_up(
        [&](int v) {
#pragma unroll
          for (int i = 0; i < N; ++i) z[v][i] -= shift;
        },
        [](float difference) { return exp_approximate(difference); }, sums[0]);
  }
  const Result result({0.f, sum[0]}, kLog);
  T* const y = static_cast<T*>(params.y) + row * params.cols;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!cover.warp_has(v)) continue;
    const V of = V::of([&](int i) {
      if constexpr (!kLog) return z[v][i] * result.factor;
      return kSampled ? fmaf(z[v][i], kLogOf2, -result.log_sum) : z[v][i] - result.log_sum;
    });
    store_covering<kAlike>(cover, of, y, v);
  }
}

// A row in the shared memory of a cluster, or read twice. Where the row may start anywhere, its maximum comes first:
// the powers of a thread's own maximum would depend on which elements it has.
template <typename T, int N, RowPlace kPlace, bool kMasked>
__global__ void __launch_bounds__(kPlace == RowPlace::kGlobal ? 1024 : kCachedThreads)
    softmax_long_kernel(const SoftmaxParams params, const RowSplit split, const Extent<T> extent, bool mask_is_vector,
                        bool keep_inputs) {
  using V = Vec<T, N>;
  constexpr bool kCovered = kPlace == RowPlace::kCovered;
  extern __shared__ int4 cache[];
  __shared__ MaxSum warps[32], blocks[kMaxCluster];
  const RowPosition at(split, params.rows, params.cols);
  const T* const x = static_cast<const T*>(params.x) + at.row * params.x_stride;
  const RowPart<T, N, kPlace> part(x, at, split, cache, extent);
  at.cluster.arrive();
  pdl_launch_dependents();
  pdl_wait();
  part.prefetch(l2_policy(keep_inputs), part);
  constexpr bool kSampled = kCovered && !kMasked && sizeof(T) == 2;  // z by the logarithm to base 2
  [[maybe_unused]] const float factor = static_cast<float>(params.scale) * kLog2E;
  const Scores<T, N, kMasked, kMasked && kCovered> scores(params, at.row, mask_is_vector);
  MaxSum sum = MaxSum::none();
  float z[N];
  const auto left = [&](auto c) {
    return static_cast<int>(min(static_cast<decltype(c)>(params.cols) - c, decltype(c){N}));
  };
  if constexpr (kCovered) {
    const auto load = [&](int c, float shift) {
      if constexpr (kSampled) {
        const V values = part.load(c);
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] = fmaf(values[i], factor, -shift);
      } else {
        scores(part.load(c), c, z, left(c));
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] -= shift;
      }
      part.clear(z, c, -INFINITY);
    };
    const auto largest = [&](int c) {
      load(c, 0.f);
      float max = z[0];
#pragma unroll
      for (int i = 1; i < N; ++i) max = fmaxf(max, z[i]);
      return max;
    };
    const auto add = [&](int c, float shift, float(&of_elements)[1][N]) {
      load(c, shift);
#pragma unroll
      for (int i = 0; i < N; ++i) of_elements[0][i] += kSampled ? exp2_approximate(z[i]) : exp_approximate(z[i]);
    };
    float sampled = 0.f;
    if constexpr (kSampled) {
      sampled = largest_of_some(at.row < params.rows ? x : static_cast<const T*>(params.x), params.cols,
                                [&](float number) { return __fmul_rn(number, factor); });
    }
    const auto of_row = sum_powers<kSampled, 1, N, kCachedThreads / 32>(part, at, sampled, true, largest, add);
    sum = {of_row.shift, of_row.sums[0]};
  } else {
    part.for_each_arriving([&](auto c) {
      scores(part.load(c), c, z, left(c));
      sum.add(z);
    });
    sum = group_reduce(sum, MaxSum::none(), at.group, warps, warp_max_sum);
    sum = cluster_reduce(sum, at.cluster, blocks, warp_max_sum);
  }
  const Result result(sum, params.log);
  part.store_each(static_cast<T*>(params.y) + at.row * params.cols, [&](auto c) {
    if constexpr (kSampled) {
      const V values = part.load(c);
      return V::of([&](int i) {
        const float difference = fmaf(values[i], factor, -sum.max);
        return params.log ? fmaf(difference, kLogOf2, -result.log_sum) : exp2_approximate(difference) * result.factor;
      });
    } else {
      scores(part.load(c), c, z, left(c));
      return V::of([&](int i) { return result(z[i]); });
    }
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
  const Extent<T> extent(params.x, params.rows, params.x_stride, params.cols);
  const bool alike = rows_alike<T>(params.rows, {{params.x, params.x_stride}, {params.y, params.cols}});
  const CoverPlan cover = plan_cover(params.cols, sizeof(T));
  if (!vector && cover.vectors > 0) {
    return dispatch_int<1, 2, 3, 4, kCoverVectors>(cover.vectors, [&](auto number) {
      constexpr int kVectors = decltype(number)::value;
      const auto with_log = [&](auto log) {
        constexpr bool kLog = decltype(log)::value;
        return alike ? softmax_cover_kernel<T, kVectors, kMasked, kLog, true>
                     : softmax_cover_kernel<T, kVectors, kMasked, kLog, false>;
      };
      return launch(params.log ? with_log(std::true_type{}) : with_log(std::false_type{}), cover.shape(params.rows),
                    stream, params, extent, keep);
    });
  }
  RowSplit split = split_row(params.cols, sizeof(T), 1, vector, device, kAloneBytes);
  split.alike = alike;
  return dispatch_split<T>(split, [&](auto width, auto place) {
    return launch(softmax_long_kernel<T, decltype(width)::value, decltype(place)::value, kMasked>,
                  split.shape(params.rows), stream, params, split, extent, vector_mask, keep);
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
