// FP8 quantization with one scale per row or per 128 elements of a row:
//
//   scale = max(amax(|x|) / max, 2^-126), rounded up to a power of two on request        fp32
//   q = round(x / scale), computed as x * (1 / scale) and saturated                      e4m3: max 448; e5m2: 57344
//
// of x, or of the SwiGLU r(r(silu(gate)) up), r being rounding to the dtype. x [rows, cols] with rows any distance
// apart; float32, float16 or bfloat16; q contiguous. Moves 3 bytes per 16-bit element (5 for a SwiGLU): memory is the
// limit. The threads of a group load it by 16-byte accesses and keep it in registers from the maximum to the store:
//
//   row    |---- group 0 ----|---- group 1 ----|-- group 2 --|      128 columns each, or the row is one group
//   group  |t0|t1|..|tn|t0|t1|..|tn|                                vectors of 16 bytes
//
// Rows that are not aligned go by the vectors that cover them (row_cover.cuh) if the row is one group, there are many,
// and q starts where x does; else vectors are cut out of two (device/shifted.cuh), and a warp puts together what it
// stores. Groups that are too long for that are
// read twice, the second time mostly from cache. A SwiGLU is then computed twice. That of rows that are not aligned
// takes a launch of its own, see csrc/torch/fp8.cpp. The maximum is of magnitudes as floats, NaN included, so it is
// exact in any order and the same for every launch.
#include "fp8.cuh"
#include "fp8.h"
#include "kernels/activation/activation.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/row_cover.cuh"
#include "plan.h"

namespace llmk::kernels {

using namespace quant;

namespace {

// A group of columns of a row, and the threads that share it.
struct GroupOfRow {
  Group threads;
  int64_t row, index, begin, cols;  // no columns where there is no such group

  // `per_row`: groups of a row, which the host knows: a 64-bit division takes a hundred instructions. Where there is
  // one, nothing is left to compute: all threads of a GPU may begin at once, and then wait for each other.
  __device__ GroupOfRow(const Fp8Output& out, int64_t per_row)
      : threads{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)},
        row(static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y),
        index(0),
        begin(0),
        cols(out.cols) {
    if (per_row > 1) {
      const int64_t group = row;
      row = group / per_row;
      index = group - row * per_row;
      begin = index * out.group;
      cols = min(out.group, out.cols - begin);
    }
    if (row >= out.rows) cols = 0;
  }
};

// What is loaded, and what is quantized of it.
template <typename Element, int kWidth = kVecWidth<Element>>
struct Plain {
  using T = Element;
  using V = Vec<T, kWidth>;
  static constexpr int N = kWidth;
  static constexpr int kBytes = sizeof(T);  // of an element
  static constexpr int kMostVectors = 8, kMostThreads = 1024;
  struct Rows {
    const T* x;
    __device__ Rows(const Fp8QuantizeParams& params, int64_t row, int64_t col)
        : x(computed_once(static_cast<const T*>(params.x) + row * params.x_stride + col)) {}
  };
  V x;

  __device__ static Plain load(const Rows& rows, unsigned offset, uint64_t policy) {
    return {V::load(rows.x + offset, policy)};
  }
  __device__ const V& value() const { return x; }
};

template <typename Element>
struct Swiglu {
  using T = Element;
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  static constexpr int kBytes = 2 * sizeof(T);
  static constexpr int kMostVectors = 4, kMostThreads = 640;  // of which an SM has room for two blocks
  struct Rows {
    const T *gate, *up;
    __device__ Rows(const Fp8QuantizeParams& params, int64_t row, int64_t col)
        : gate(computed_once(static_cast<const T*>(params.x) + row * params.x_stride + col)),
          up(computed_once(static_cast<const T*>(params.up) + row * params.up_stride + col)) {}
  };
  V gate, up;

  __device__ static Swiglu load(const Rows& rows, unsigned offset, uint64_t policy) {
    return {V::load(rows.gate + offset, policy), V::load(rows.up + offset, policy)};
  }
  __device__ V value() const {
    return mul(V::of([&](int i) { return activation::Silu::value<T>(gate[i]); }), up);
  }
};

// Template parameter kVectors: how many vectors of a group a thread has in registers.
template <typename Source, int kVectors>
__global__ void __launch_bounds__(Source::kMostThreads, kVectors == 4 && Source::kMostThreads < kMaxThreads ? 2 : 1)
    quantize_kernel(const Fp8QuantizeParams params, int64_t groups_per_row, bool keep_inputs) {
  constexpr int N = Source::N;
  __shared__ float shared[kMaxThreads / 32];
  const GroupOfRow group(params.out, groups_per_row);
  const int count = static_cast<int>(static_cast<uint32_t>(group.cols) / N), step = group.threads.threads;
  const int64_t first = group.begin + group.threads.rank * N;  // of the thread's columns
  const auto mine = [&](int v) { return group.threads.rank + v * step < count; };
  const auto offset = [&](int v) { return static_cast<unsigned>(v * step * N); };
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const typename Source::Rows rows(params, group.row, first);
  Source loaded[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) loaded[v] = Source::load(rows, offset(v), policy);
  }
  typename Source::V x[kVectors];
  float amax = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) amax = max_magnitude(x[v] = loaded[v].value(), amax);
  }
  const float scale = scale_of(group_max_nan(amax, group.threads, shared), params.out);
  if (group.threads.rank == 0 && count > 0) *scale_at(params.out, group.row, group.index) = scale;
  const float inverse = inverse_of(scale);
  uint8_t* const q = computed_once(static_cast<uint8_t*>(params.out.q) + group.row * params.out.cols + first);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) store_fp8(x[v], inverse, params.out.format, q, offset(v));
  }
}

// The same of rows of any alignment.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_shifted_kernel(const Fp8QuantizeParams params, int64_t groups_per_row) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  __shared__ float shared[kMaxThreads / 32];
  const GroupOfRow group(params.out, groups_per_row);
  const int threads = group.threads.threads, rank = group.threads.rank, cols = static_cast<int>(group.cols);
  const auto column = [&](int v) { return (rank + v * threads) * N; };  // in the group
  // Columns of the row that its vectors may be cut out of.
  const int begin = -static_cast<int>(min(group.begin, int64_t{N}));
  const int end = cols == 0 ? begin : static_cast<int>(min(params.out.cols - group.begin, int64_t{cols + N}));
  pdl_launch_dependents();
  pdl_wait();
  const T* const x = static_cast<const T*>(params.x) + group.row * params.x_stride + group.begin;
  Uncut<T> loaded[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) loaded[v] = Uncut<T>(x, column(v), begin, end);
  V values[kVectors];
  float amax = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    values[v] = loaded[v].vector();
    if (column(v) < cols) amax = max_magnitude(values[v], amax);
  }
  const float scale = scale_of(group_max_nan(amax, group.threads, shared), params.out);
  if (rank == 0 && cols > 0) *scale_at(params.out, group.row, group.index) = scale;
  const float inverse = inverse_of(scale);
  const int lanes = min(32, threads), lane = rank % lanes;
  uint8_t* const q = static_cast<uint8_t*>(params.out.q) + group.row * params.out.cols + group.begin;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int first = column(v) - lane * N, count = max(0, min(cols - first, lanes * N));
    store_shifted(to_fp8(values[v], inverse, params.out.format), q + first, count, lane, lanes);
  }
}

// Rows of any alignment that are one group each, by the vectors that cover them: those of q are half as long, or a
// quarter.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kCoverThreads, 2)
    quantize_cover_kernel(const Fp8QuantizeParams params, const Extent<T> extent, bool keep_inputs) {
  constexpr int N = kVecWidth<T>;
  __shared__ float shared[kCoverThreads / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  if (row >= params.out.rows) return;  // only a warp that has a row of its own
  const T* const source = static_cast<const T*>(params.x) + row * params.x_stride;
  const Cover<T, kVectors> cover(source, static_cast<int>(params.out.cols), group);
  pdl_launch_dependents();
  pdl_wait();
  Vec<T, N> x[kVectors];
  cover.load(source, extent, x, l2_policy(keep_inputs));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) cover.clear(x[v], v, 0.f);
  const float scale = scale_of(group_max_nan(max_magnitude(x), group, shared), params.out);
  if (group.rank == 0) *scale_at(params.out, row, 0) = scale;
  const float inverse = inverse_of(scale);
  uint8_t* const q = static_cast<uint8_t*>(params.out.q) + row * params.out.cols;
  const auto store = [&](auto kind) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!cover.warp_has(v)) continue;
      const Fp8Words<N> words = to_fp8_as<decltype(kind)::value>(x[v], inverse);
      const int c = cover.column(v);
      if (cover.is_whole(v)) {
        *reinterpret_cast<typename Word<N>::type*>(q + c) = reinterpret_cast<const typename Word<N>::type&>(words);
      }
      cover.for_ends(v, [&](int lane) {
        store_end(words.data, lane, c + (lane - static_cast<int>(threadIdx.x % 32)) * N, q, cover.cols);
      });
    }
  };
  if (params.out.format == Fp8Format::kE4M3) {
    store(std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>{});
  } else {
    store(std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>{});
  }
}

// A group of any length, read twice.
template <typename Source>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_long_kernel(const Fp8QuantizeParams params, int64_t groups_per_row) {
  constexpr int N = Source::N;
  __shared__ float shared[kMaxThreads / 32];
  const GroupOfRow group(params.out, groups_per_row);
  const int64_t end = group.begin + group.cols, step = static_cast<int64_t>(group.threads.threads) * N;
  const int64_t begin = group.begin + static_cast<int64_t>(group.threads.rank) * N;
  const uint64_t policy = l2_policy(false);
  const auto value = [&](int64_t column) {
    return Source::load(typename Source::Rows(params, group.row, column), 0, policy).value();
  };
  pdl_launch_dependents();
  pdl_wait();
  float amax = 0.f;
  for (int64_t c = begin; c < end; c += step) amax = max_magnitude(value(c), amax);
  const float scale = scale_of(group_max_nan(amax, group.threads, shared), params.out);
  if (group.threads.rank == 0 && group.cols > 0) *scale_at(params.out, group.row, group.index) = scale;
  const float inverse = inverse_of(scale);
  const int64_t target = group.row * params.out.cols;
  for (int64_t c = begin; c < end; c += step) {
    store_fp8(value(c), inverse, params.out.format, params.out.q, target + c);
  }
}

RowOperands row_operands(const Fp8QuantizeParams& p) {
  return {p.out.rows, p.out.cols, {{p.x, p.x_stride}, {p.up, p.up_stride}, {p.out.q}}};
}

// Rows of vectors, unless Source has a width of 1.
template <typename Source>
cudaError_t launch_source(const Fp8QuantizeParams& params, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const Fp8Output& out = params.out;
  const int64_t per_row = fp8::groups_per_row(out.cols, out.group), groups = out.rows * per_row;
  const int64_t count = std::min(out.group, out.cols) / Source::N;
  const int most = Source::N == 1 ? 0 : Source::kMostVectors;
  const GroupPlan plan = plan_group(count, groups, device.sm_count, most, Source::kMostThreads);
  const LaunchShape shape{(groups + plan.groups_per_block - 1) / plan.groups_per_block,
                          dim3(plan.threads, plan.groups_per_block)};
  if (plan.vectors == 0) return launch(quantize_long_kernel<Source>, shape, stream, params, per_row);
  const bool keep = keeps_inputs(device, out.rows * out.cols * static_cast<int64_t>(Source::kBytes + 1));
  return dispatch_int<1, 2, 4, 8>(plan.vectors, [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if constexpr (kVectors > Source::kMostVectors || Source::N == 1) {
      return cudaErrorInvalidValue;  // no such plan
    } else {
      return launch(quantize_kernel<Source, kVectors>, shape, stream, params, per_row, keep);
    }
  });
}

// Of rows of any alignment.
template <typename T>
cudaError_t launch_unaligned(const Fp8QuantizeParams& params, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  constexpr int N = kVecWidth<T>, kMostVectors = 4;
  const Fp8Output& out = params.out;
  const int64_t per_row = fp8::groups_per_row(out.cols, out.group), groups = out.rows * per_row;
  const CoverPlan cover = plan_cover(out.cols, sizeof(T));
  const bool alike =  // q starts at the same element of its vectors as x does, in every row
      (reinterpret_cast<uintptr_t>(params.x) / sizeof(T) - reinterpret_cast<uintptr_t>(out.q)) % N == 0 &&
      (params.x_stride - out.cols) % N == 0;
  if (per_row == 1 && out.rows > kFewRowsPerSm * device.sm_count && cover.vectors > 0 && alike) {
    const bool keep = keeps_inputs(device, out.rows * out.cols * static_cast<int64_t>(sizeof(T) + 1));
    const Extent<T> extent(params.x, out.rows, params.x_stride, out.cols);
    return dispatch_int<1, 2, 3, 4, kCoverVectors>(cover.vectors, [&](auto vectors) {
      return launch(quantize_cover_kernel<T, decltype(vectors)::value>, cover.shape(out.rows), stream, params, extent,
                    keep);
    });
  }
  const int64_t count = (std::min(out.group, out.cols) + N - 1) / N;
  const GroupPlan plan = plan_group(count, groups, device.sm_count, kMostVectors, kMaxThreads, 2 * N);
  if (plan.vectors == 0) return launch_source<Plain<T, 1>>(params, stream);
  const LaunchShape shape{(groups + plan.groups_per_block - 1) / plan.groups_per_block,
                          dim3(plan.threads, plan.groups_per_block)};
  return dispatch_int<1, 2, kMostVectors>(plan.vectors, [&](auto vectors) {
    return launch(quantize_shifted_kernel<T, decltype(vectors)::value>, shape, stream, params, per_row);
  });
}

}  // namespace

bool fp8_quantize_fuses_swiglu(const Fp8QuantizeParams& params, Dtype dtype) {
  bool fuses = false;
  (void)dispatch_dtype(dtype, [&](auto tag) {
    fuses = all_rows_aligned<typename decltype(tag)::type>(row_operands(params));
    return cudaSuccess;
  });
  return fuses;
}

cudaError_t fp8_quantize(const Fp8QuantizeParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.out.rows == 0 || params.out.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!all_rows_aligned<T>(row_operands(params))) {
      return params.up ? cudaErrorInvalidValue : launch_unaligned<T>(params, stream);  // see above
    }
    return params.up ? launch_source<Swiglu<T>>(params, stream) : launch_source<Plain<T>>(params, stream);
  });
}

}  // namespace llmk::kernels
