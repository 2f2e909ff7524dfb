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
// Of rows that are not aligned to 16 bytes, the threads have the same vectors: each is cut out of two (shifted.cuh),
// and a word of q put together of what two threads have. Groups that are too long for registers are read twice, the
// second time mostly from cache. A SwiGLU is then computed twice. The maximum is of magnitudes as floats, NaN included,
// so it is exact in any order and the same for every launch.
#include "fp8.cuh"
#include "fp8.h"
#include "kernels/activation/activation.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "plan.h"

namespace llmk::kernels {

using namespace quant;

namespace {

// A group of columns of a row, and the threads that share it.
struct GroupOfRow {
  Group threads;
  int64_t row, index, begin, cols;  // no columns where there is no such group

  // `per_row`: groups of a row, which the host knows: a 64-bit division takes a hundred instructions.
  __device__ GroupOfRow(const Fp8Output& out, int64_t per_row)
      : threads{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)} {
    const int64_t group = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    row = per_row == 1 ? group : group / per_row;
    index = group - row * per_row;
    begin = index * out.group;
    cols = row < out.rows ? min(out.group, out.cols - begin) : 0;
  }
};

// A row of an operand from column `first` on. A thread begins to load all its vectors of it, then asks for their values
// by vector_of(): what is not aligned is cut out then, with zeros outside of the row.
template <typename T, bool kAligned>
struct RowFrom {
  using V = Vec<T, kVecWidth<T>>;
  using Loaded = V;
  const T* x;

  __device__ RowFrom(const void* x, int64_t stride, int64_t row, int64_t first, const Fp8Output&)
      : x(static_cast<const T*>(x) + row * stride + first) {}
  __device__ Loaded load(int offset, uint64_t policy) const { return V::load(x + offset, policy); }
};
template <typename T>
struct RowFrom<T, false> {
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  using Loaded = Uncut<T>;
  const T* x;
  int begin, end;  // offsets: what lies in between belongs to the row

  __device__ RowFrom(const void* x, int64_t stride, int64_t row, int64_t first, const Fp8Output& out)
      : x(static_cast<const T*>(x) + row * stride + first),
        begin(-static_cast<int>(min(first, int64_t{N}))),
        end(row < out.rows ? static_cast<int>(min(out.cols - first, int64_t{1} << 30)) : begin) {}
  __device__ Loaded load(int offset, uint64_t) const { return Loaded(x, offset, begin, end); }
};

template <typename T, int N>
__device__ const Vec<T, N>& vector_of(const Vec<T, N>& loaded) {
  return loaded;
}
template <typename T>
__device__ Vec<T, kVecWidth<T>> vector_of(const Uncut<T>& loaded) {
  return loaded.vector();
}

// What is loaded, and what is quantized of it.
template <typename Element, bool kIsAligned>
struct Plain {
  using T = Element;
  static constexpr bool kAligned = kIsAligned;
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  static constexpr int kBytes = sizeof(T);  // of an element
  static constexpr int kMostVectors = kAligned ? 8 : 4, kMostThreads = 1024;
  using Row = RowFrom<T, kAligned>;
  struct Rows {
    Row x;
    __device__ Rows(const Fp8QuantizeParams& params, int64_t row, int64_t col)
        : x(params.x, params.x_stride, row, col, params.out) {}
  };
  typename Row::Loaded x;

  __device__ static Plain load(const Rows& rows, int offset, uint64_t policy) { return {rows.x.load(offset, policy)}; }
  __device__ V value() const { return vector_of(x); }
};

template <typename Element, bool kIsAligned>
struct Swiglu {
  using T = Element;
  static constexpr bool kAligned = kIsAligned;
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  static constexpr int kBytes = 2 * sizeof(T);
  static constexpr int kMostVectors = 4, kMostThreads = 640;  // of which an SM has room for two blocks
  using Row = RowFrom<T, kAligned>;
  struct Rows {
    Row gate, up;
    __device__ Rows(const Fp8QuantizeParams& params, int64_t row, int64_t col)
        : gate(params.x, params.x_stride, row, col, params.out),
          up(params.up, params.up_stride, row, col, params.out) {}
  };
  typename Row::Loaded gate, up;

  __device__ static Swiglu load(const Rows& rows, int offset, uint64_t policy) {
    return {rows.gate.load(offset, policy), rows.up.load(offset, policy)};
  }
  __device__ V value() const {
    const V g = vector_of(gate);
    return mul(V::of([&](int i) { return activation::Silu::value<T>(g[i]); }), vector_of(up));
  }
};

// Stores the vector that a thread has at `column`. Where rows are not aligned, all threads of the group call it, also
// behind its end.
template <bool kAligned, typename T, int N>
__device__ void store_vector(const Vec<T, N>& x, float inverse, const Fp8Output& out, const GroupOfRow& group,
                             int64_t column) {
  const int64_t target = group.row * out.cols;
  if constexpr (kAligned) {
    store_fp8(x, inverse, out, target + column);
  } else {
    const int lanes = min(32, group.threads.threads), lane = group.threads.rank % 32;
    const int64_t first = column - lane * N, left = group.begin + group.cols - first;
    const int count = static_cast<int>(max(int64_t{0}, min(left, int64_t{lanes * N})));
    uint8_t* const q = static_cast<uint8_t*>(out.q) + target + first;
    store_shifted(to_fp8(x, inverse, out.format), q, count, lane, lanes);
  }
}

// Template parameter kVectors: how many vectors of a group a thread has in registers.
template <typename Source, int kVectors>
__global__ void __launch_bounds__(Source::kMostThreads,
                                  Source::kAligned&& kVectors == 4 && Source::kMostThreads < kMaxThreads ? 2 : 1)
    quantize_kernel(const Fp8QuantizeParams params, int64_t groups_per_row, bool keep_inputs) {
  constexpr int N = Source::N;
  __shared__ float shared[kMaxThreads / 32];
  const GroupOfRow group(params.out, groups_per_row);
  const int count = static_cast<int>((group.cols + N - 1) / N), step = group.threads.threads;
  const int64_t first = group.begin + group.threads.rank * N;  // of the thread's columns
  const auto mine = [&](int v) { return group.threads.rank + v * step < count; };
  const auto offset = [&](int v) { return v * step * N; };
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const typename Source::Rows rows(params, group.row, first);
  Source loaded[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!Source::kAligned || mine(v)) loaded[v] = Source::load(rows, offset(v), policy);
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
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!Source::kAligned || mine(v)) {
      store_vector<Source::kAligned>(x[v], inverse, params.out, group, first + offset(v));
    }
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
  const int64_t own = static_cast<int64_t>(group.threads.rank) * N;
  const uint64_t policy = l2_policy(false);
  const auto value = [&](int64_t column) {
    const typename Source::Rows rows(params, group.row, column);
    return Source::load(rows, 0, policy).value();
  };
  pdl_launch_dependents();
  pdl_wait();
  float amax = 0.f;
  for (int64_t c = group.begin + own; c < end; c += step) amax = max_magnitude(value(c), amax);
  const float scale = scale_of(group_max_nan(amax, group.threads, shared), params.out);
  if (group.threads.rank == 0 && group.cols > 0) *scale_at(params.out, group.row, group.index) = scale;
  const float inverse = inverse_of(scale);
  for (int64_t c = group.begin; c < end; c += step) {  // all threads, as often as the first
    const bool mine = c + own < end;
    typename Source::V x;
    if (mine) x = value(c + own);
    if (!Source::kAligned || mine) store_vector<Source::kAligned>(x, inverse, params.out, group, c + own);
  }
}

RowOperands row_operands(const Fp8QuantizeParams& p) {
  return {p.out.rows, p.out.cols, {{p.x, p.x_stride}, {p.up, p.up_stride}, {p.out.q}}};
}

template <typename Source>
cudaError_t launch_source(const Fp8QuantizeParams& params, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const Fp8Output& out = params.out;
  const int64_t per_row = fp8::groups_per_row(out.cols, out.group), groups = out.rows * per_row;
  const int64_t count = (std::min(out.group, out.cols) + Source::N - 1) / Source::N;
  const int least_threads = Source::kAligned ? 1 : 2 * Source::N;  // see store_shifted()
  const GroupPlan plan =
      plan_group(count, groups, device.sm_count, Source::kMostVectors, Source::kMostThreads, least_threads);
  const LaunchShape shape{(groups + plan.groups_per_block - 1) / plan.groups_per_block,
                          dim3(plan.threads, plan.groups_per_block)};
  if (plan.vectors == 0) return launch(quantize_long_kernel<Source>, shape, stream, params, per_row);
  const bool keep = keeps_inputs(device, out.rows * out.cols * static_cast<int64_t>(Source::kBytes + 1));
  return dispatch_int<1, 2, 4, 8>(plan.vectors, [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if constexpr (kVectors > Source::kMostVectors) {
      return cudaErrorInvalidValue;  // no such plan
    } else {
      return launch(quantize_kernel<Source, kVectors>, shape, stream, params, per_row, keep);
    }
  });
}

}  // namespace

cudaError_t fp8_quantize(const Fp8QuantizeParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.out.rows == 0 || params.out.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch_with = [&](auto aligned) {
      constexpr bool kAligned = decltype(aligned)::value;
      return params.up ? launch_source<Swiglu<T, kAligned>>(params, stream)
                       : launch_source<Plain<T, kAligned>>(params, stream);
    };
    return all_rows_aligned<T>(row_operands(params)) ? launch_with(std::true_type{}) : launch_with(std::false_type{});
  });
}

}  // namespace llmk::kernels
