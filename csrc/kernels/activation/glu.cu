// Gated activations (Shazeer 2020): SwiGLU and GEGLU, forward and backward. With r = rounding to the dtype:
//
//   y = r(r(act(gate)) up)      grad_gate = r(grad_y up act'(gate))      grad_up = r(grad_y act(gate))
//
//   silu(x) = x / (1 + e^-x)    gelu(x) = x (1 + erf(x / sqrt 2)) / 2    or its tanh form
//
// gate and up are [rows, cols] with rows any distance apart, so a packed [gate | up] is the same kernel; float32,
// float16 or bfloat16. float32 arithmetic; the forward has the formulas and roundings of eager PyTorch, bitwise.
// Moves 3 elements per element forward, 5 backward: memory is the limit, so the arithmetic has no branches. Contiguous
// operands are one long row. A thread has one access per operand:
//
//   value                 | case | result
//   ----------------------|------|--------
//   more than one 16-byte | all  | slower
//   access per operand    |      |
#include "glu.h"

#include <cfloat>

#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBackwardBlocksPerSm = 5;

// The activations. kBlocksPerSm gives the forward enough registers to load both operands before the arithmetic. Without
// a bound the compiler saves registers: it loads the second operand halfway through.
struct Silu {
  static constexpr int kBlocksPerSm = 8;
  template <typename T>
  __device__ static float value(float x) {
    const float e = expf(-x);
    if constexpr (sizeof(T) == 4) return x / (1.f + e);
    // The same quotient without the division's branch for special operands, which would keep the compiler from
    // interleaving the elements of a vector: a Newton step for the reciprocal, then a correction that rounds the
    // quotient correctly. The scaling by 1/4 and the bounds keep every step finite and normal. What they change lies
    // beyond the range of 16 bits, and rounds to the same number.
    const float d = min_nan(__fmaf_rn(0.25f, e, 0.25f), FLT_MAX);
    const float dividend = min_nan(0.25f * x, 0.25f * FLT_MAX);
    const float r0 = reciprocal_approximate(d);
    const float r = __fmaf_rn(__fmaf_rn(-d, r0, 1.f), r0, r0);
    const float q = __fmul_rn(dividend, r);
    return __fmaf_rn(__fmaf_rn(-d, q, dividend), r, q);
  }
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    const float sigmoid = 1.f / (1.f + expf(-x));
    value = x * sigmoid;
    slope = sigmoid * (1.f + x * (1.f - sigmoid));
  }
};

struct GeluTanh {
  static constexpr int kBlocksPerSm = 8;
  static constexpr float kBeta = 0.7978845608028654f, kKappa = 0.044715f;  // sqrt(2 / pi), and its cubic term
  template <typename T>
  __device__ static float value(float x) {
    return 0.5f * x * (1.f + tanhf(kBeta * (x + kKappa * (x * x * x))));
  }
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    const float t = tanhf(kBeta * (x + kKappa * (x * x * x)));
    value = 0.5f * x * (1.f + t);
    slope = 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * kBeta * (1.f + 3.f * kKappa * x * x);
  }
};

struct GeluErf {
  static constexpr int kBlocksPerSm = 5;
  static constexpr float kRsqrt2 = 0.7071067811865476f, kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
  template <typename T>
  __device__ static float value(float x) {
    return x * 0.5f * (1.f + erff(x * kRsqrt2));
  }
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    const float cdf = 0.5f * (1.f + erff(x * kRsqrt2));
    value = x * cdf;
    slope = cdf + x * kDensity * expf(-0.5f * x * x);
  }
};

// The position of this thread's vector; a block covers kThreads vectors of one row.
struct VectorPosition {
  int64_t row, col;
};

template <int N, bool kOneRow>
__device__ VectorPosition
vector_position(unsigned blocks_per_row) {  // the division takes most of the time before the loads
  const unsigned row = kOneRow ? 0 : blockIdx.x / blocks_per_row;
  const unsigned block = blockIdx.x - row * blocks_per_row;
  return {row, (static_cast<int64_t>(block) * kThreads + threadIdx.x) * N};
}

template <typename Act, typename T, int N, bool kOneRow>
__global__ void __launch_bounds__(kThreads, Act::kBlocksPerSm)
    glu_kernel(const GluParams params, unsigned blocks_per_row, bool keep_inputs) {
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const auto [row, col] = vector_position<N, kOneRow>(blocks_per_row);
  if (col >= params.cols) return;
  const V gate = V::load(static_cast<const T*>(params.gate) + row * params.gate_stride + col, policy);
  const V up = V::load(static_cast<const T*>(params.up) + row * params.up_stride + col, policy);
  const V activated = V::of([&](int i) { return Act::template value<T>(gate[i]); });
  mul(activated, up).store(static_cast<T*>(params.y) + row * params.cols + col);
}

template <typename Act, typename T, int N, bool kOneRow>
__global__ void __launch_bounds__(kThreads, kBackwardBlocksPerSm)
    glu_backward_kernel(const GluBackwardParams params, unsigned blocks_per_row, bool keep_inputs) {
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const auto [row, col] = vector_position<N, kOneRow>(blocks_per_row);
  if (col >= params.cols) return;
  const V grad_y = V::load(static_cast<const T*>(params.grad_y) + row * params.grad_y_stride + col, policy);
  const V gate = V::load(static_cast<const T*>(params.gate) + row * params.gate_stride + col, policy);
  const V up = V::load(static_cast<const T*>(params.up) + row * params.up_stride + col, policy);
  float value[N], slope[N];
#pragma unroll
  for (int i = 0; i < N; ++i) Act::value_and_slope(gate[i], value[i], slope[i]);
  const int64_t out = row * params.grad_stride + col;
  V::of([&](int i) { return grad_y[i] * up[i] * slope[i]; }).store(static_cast<T*>(params.grad_gate) + out);
  V::of([&](int i) { return grad_y[i] * value[i]; }).store(static_cast<T*>(params.grad_up) + out);
}

template <typename Body>
cudaError_t dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kSilu: return body(Silu{});
    case Activation::kGeluTanh: return body(GeluTanh{});
    case Activation::kGeluErf: return body(GeluErf{});
  }
  return cudaErrorInvalidValue;
}

// Launches `kernel` over rows x cols, `width` elements per access; it moves `element_bytes` for each element.
template <typename Params>
cudaError_t run(void (*kernel)(Params, unsigned, bool), const Params& params, int width, size_t element_bytes,
                cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const int64_t per_block = static_cast<int64_t>(kThreads) * width;
  const int64_t blocks_per_row = (params.cols + per_block - 1) / per_block;
  return launch(kernel, {blocks_per_row * params.rows, dim3(kThreads)}, stream, params,
                static_cast<unsigned>(blocks_per_row), keeps_inputs(device, params.rows * params.cols * element_bytes));
}

}  // namespace

cudaError_t glu(const GluParams& given, Activation activation, Dtype dtype, cudaStream_t stream) {
  GluParams params = given;
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  if (params.gate_stride == params.cols && params.up_stride == params.cols) {
    params.cols *= params.rows;
    params.rows = 1;
  }
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = params.cols % N == 0 && rows_aligned(params.gate, params.gate_stride, params.rows, sizeof(T)) &&
                        rows_aligned(params.up, params.up_stride, params.rows, sizeof(T)) && is_aligned(params.y, 16);
    return dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      const auto kernel = !vector           ? glu_kernel<Act, T, 1, false>
                          : params.rows > 1 ? glu_kernel<Act, T, N, false>
                                            : glu_kernel<Act, T, N, true>;
      return run(kernel, params, vector ? N : 1, 3 * sizeof(T), stream);
    });
  });
}

cudaError_t glu_backward(const GluBackwardParams& given, Activation activation, Dtype dtype, cudaStream_t stream) {
  GluBackwardParams params = given;
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  if (params.grad_y_stride == params.cols && params.gate_stride == params.cols && params.up_stride == params.cols &&
      params.grad_stride == params.cols) {
    params.cols *= params.rows;
    params.rows = 1;
  }
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const auto aligned = [&](const void* pointer, int64_t stride) {
      return rows_aligned(pointer, stride, params.rows, sizeof(T));
    };
    const bool vector = params.cols % N == 0 && aligned(params.grad_y, params.grad_y_stride) &&
                        aligned(params.gate, params.gate_stride) && aligned(params.up, params.up_stride) &&
                        aligned(params.grad_gate, params.grad_stride) && aligned(params.grad_up, params.grad_stride);
    return dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      const auto kernel = !vector           ? glu_backward_kernel<Act, T, 1, false>
                          : params.rows > 1 ? glu_backward_kernel<Act, T, N, false>
                                            : glu_backward_kernel<Act, T, N, true>;
      return run(kernel, params, vector ? N : 1, 5 * sizeof(T), stream);
    });
  });
}

}  // namespace llmk::kernels
