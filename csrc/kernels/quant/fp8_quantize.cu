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
// Groups that are too long for that, or not aligned to 16 bytes, are read twice, the second time mostly from cache.
// The maximum is of magnitudes as floats, NaN included, so it is exact in any order and the same for every launch.
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

// What is loaded, and what is quantized of it.
template <typename T>
struct Plain {
  using V = Vec<T, kVecWidth<T>>;
  static constexpr int kMostVectors = 8, kMostThreads = 1024;
  struct Rows {
    const T* x;
    __device__ Rows(const Fp8QuantizeParams& params, int64_t row, int64_t col)
        : x(static_cast<const T*>(params.x) + row * params.x_stride + col) {}
  };
  V x;

  __device__ static Plain load(const Rows& rows, int offset, uint64_t policy) {
    return {V::load(rows.x + offset, policy)};
  }
  __device__ const V& value() const { return x; }
};

template <typename T>
struct Swiglu {
  using V = Vec<T, kVecWidth<T>>;
  static constexpr int kMostVectors = 4, kMostThreads = 640;  // of which an SM has room for two blocks
  struct Rows {
    const T *gate, *up;
    __device__ Rows(const Fp8QuantizeParams& params, int64_t row, int64_t col)
        : gate(static_cast<const T*>(params.x) + row * params.x_stride + col),
          up(static_cast<const T*>(params.up) + row * params.up_stride + col) {}
  };
  V gate, up;

  __device__ static Swiglu load(const Rows& rows, int offset, uint64_t policy) {
    return {V::load(rows.gate + offset, policy), V::load(rows.up + offset, policy)};
  }
  __device__ V value() const {
    return mul(V::of([&](int i) { return activation::Silu::value<T>(gate[i]); }), up);
  }
};

// Template parameter kVectors: how many vectors of a group a thread has in registers.
template <template <typename> typename Source, typename T, int kVectors>
__global__ void __launch_bounds__(Source<T>::kMostThreads,
                                  kVectors == 4 && Source<T>::kMostThreads < kMaxThreads ? 2 : 1)
    quantize_kernel(const Fp8QuantizeParams params, int64_t groups_per_row, bool keep_inputs) {
  constexpr int N = kVecWidth<T>;
  __shared__ float shared[kMaxThreads / 32];
  const GroupOfRow group(params.out, groups_per_row);
  const int count = static_cast<int>(group.cols / N), step = group.threads.threads;
  const int64_t first = group.begin + group.threads.rank * N;  // of the thread's columns
  const auto mine = [&](int v) { return group.threads.rank + v * step < count; };
  const auto offset = [&](int v) { return v * step * N; };
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const typename Source<T>::Rows rows(params, group.row, first);
  Source<T> loaded[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) loaded[v] = Source<T>::load(rows, offset(v), policy);
  }
  Vec<T, N> x[kVectors];
  float amax = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) amax = max_magnitude(x[v] = loaded[v].value(), amax);
  }
  const float scale = scale_of(group_max_nan(amax, group.threads, shared), params.out);
  if (group.threads.rank == 0 && count > 0) *scale_at(params.out, group.row, group.index) = scale;
  const float inverse = inverse_of(scale);
  const int64_t target = group.row * params.out.cols + first;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) store_fp8(x[v], inverse, params.out.format, params.out.q, target + offset(v));
  }
}

// A group of any length and alignment, read twice.
template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_long_kernel(const Fp8QuantizeParams params, int64_t groups_per_row) {
  using V = Vec<T, N>;
  __shared__ float shared[kMaxThreads / 32];
  const GroupOfRow group(params.out, groups_per_row);
  const T* const x = static_cast<const T*>(params.x) + group.row * params.x_stride;
  const int64_t end = group.begin + group.cols, step = static_cast<int64_t>(group.threads.threads) * N;
  const int64_t begin = group.begin + static_cast<int64_t>(group.threads.rank) * N;
  pdl_launch_dependents();
  pdl_wait();
  float amax = 0.f;
  for (int64_t c = begin; c < end; c += step) amax = max_magnitude(V::load(x + c), amax);
  const float scale = scale_of(group_max_nan(amax, group.threads, shared), params.out);
  if (group.threads.rank == 0 && group.cols > 0) *scale_at(params.out, group.row, group.index) = scale;
  const float inverse = inverse_of(scale);
  const int64_t target = group.row * params.out.cols;
  for (int64_t c = begin; c < end; c += step) {
    store_fp8(V::load(x + c), inverse, params.out.format, params.out.q, target + c);
  }
}

template <typename T>
bool is_vector(const Fp8QuantizeParams& params) {
  const Fp8Output& out = params.out;
  return out.cols % kVecWidth<T> == 0 && rows_aligned(params.x, params.x_stride, out.rows, sizeof(T)) &&
         rows_aligned(params.up, params.up_stride, out.rows, sizeof(T)) && is_aligned(out.q, 16);
}

template <template <typename> typename Source, typename T>
cudaError_t launch_vectors(const Fp8QuantizeParams& params, const GroupPlan& plan, int64_t per_row, bool keep_inputs,
                           const LaunchShape& shape, cudaStream_t stream) {
  return dispatch_int<1, 2, 4, 8>(plan.vectors, [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if constexpr (kVectors > Source<T>::kMostVectors) {
      return cudaErrorInvalidValue;  // no such plan
    } else {
      return launch(quantize_kernel<Source, T, kVectors>, shape, stream, params, per_row, keep_inputs);
    }
  });
}

}  // namespace

bool fp8_quantize_fuses_swiglu(const Fp8QuantizeParams& params, Dtype dtype) {
  bool fuses = false;
  (void)dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t count = std::min(params.out.group, params.out.cols) / kVecWidth<T>;
    fuses = is_vector<T>(params) &&
            plan_group(count, params.out.rows, 1, Swiglu<T>::kMostVectors, Swiglu<T>::kMostThreads).vectors > 0;
    return cudaSuccess;
  });
  return fuses;
}

cudaError_t fp8_quantize(const Fp8QuantizeParams& params, Dtype dtype, cudaStream_t stream) {
  const Fp8Output& out = params.out;
  if (out.rows == 0 || out.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const bool vector = is_vector<T>(params);
    const int64_t per_row = fp8::groups_per_row(out.cols, out.group), groups = out.rows * per_row;
    const int64_t cols = std::min(out.group, out.cols);
    const int most = !vector ? 0 : params.up ? Swiglu<T>::kMostVectors : Plain<T>::kMostVectors;
    const int most_threads = params.up ? Swiglu<T>::kMostThreads : Plain<T>::kMostThreads;
    const GroupPlan plan = plan_group(cols / (vector ? N : 1), groups, device.sm_count, most, most_threads);
    const bool keep = keeps_inputs(device, out.rows * out.cols * (sizeof(T) * (params.up ? 2 : 1) + 1));
    const LaunchShape shape{(groups + plan.groups_per_block - 1) / plan.groups_per_block,
                            dim3(plan.threads, plan.groups_per_block)};
    if (!vector || plan.vectors == 0) {
      if (params.up) return cudaErrorInvalidValue;  // see fp8_quantize_fuses_swiglu()
      return launch(vector ? quantize_long_kernel<T, N> : quantize_long_kernel<T, 1>, shape, stream, params, per_row);
    }
    return params.up ? launch_vectors<Swiglu, T>(params, plan, per_row, keep, shape, stream)
                     : launch_vectors<Plain, T>(params, plan, per_row, keep, shape, stream);
  });
}

}  // namespace llmk::kernels
