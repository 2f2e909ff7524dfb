// The activations, and how the kernels of this folder lie over a matrix.
#pragma once
#include <cfloat>

#include "device/ptx.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "kernels/launch.h"
#include "params/glu.h"

namespace llmk::kernels::activation {

constexpr int kThreads = 256;
constexpr int kSkewedBlocksPerSm = 4;  // for rows that are not aligned, which take more registers

// The activations. kBlocksPerSm gives the forward enough registers to load both operands before the arithmetic. Without
// a bound the compiler saves registers: it loads the second operand halfway through.
//
// value() has the bits of eager PyTorch once it is rounded to T. near() is as close to the true value, in fewer
// instructions, and so is the slope. Where a compiler could fuse either of two products into a sum, fmaf() says which:
// else a kernel that needs the slope alone would have other bits than one that needs the value, too. params/glu.h has
// the list of activations.

// x / (1 + e) as it is once rounded to 16 bits, without the division's branch for special operands, which would keep
// the compiler from interleaving the elements of a vector: a Newton step for the reciprocal, then a correction that
// rounds the quotient correctly. The scaling by 1/4 and the bounds keep every step finite and normal. What they change
// lies beyond the range of 16 bits, and rounds to the same number.
__device__ inline float quotient(float x, float e) {
  const float d = min_nan(__fmaf_rn(0.25f, e, 0.25f), FLT_MAX);
  const float dividend = min_nan(0.25f * x, 0.25f * FLT_MAX);
  const float r0 = reciprocal_approximate(d);
  const float r = __fmaf_rn(__fmaf_rn(-d, r0, 1.f), r0, r0);
  const float q = __fmul_rn(dividend, r);
  return __fmaf_rn(__fmaf_rn(-d, q, dividend), r, q);
}

struct Silu {
  static constexpr int kBlocksPerSm = 8;
  template <typename T>
  __device__ static float value(float x) {
    const float e = expf(-x);
    return sizeof(T) == 4 ? x / (1.f + e) : quotient(x, e);
  }
  template <typename T>
  __device__ static float near(float x) {
    return sizeof(T) == 4 ? value<T>(x) : x * reciprocal_approximate(1.f + exp_approximate(-x));
  }
  template <typename T>
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    const float sigmoid = 1.f / (1.f + expf(-x));
    value = x * sigmoid;
    slope = sigmoid * fmaf(x, 1.f - sigmoid, 1.f);
  }
};

struct GeluTanh {
  static constexpr int kBlocksPerSm = 8;
  static constexpr float kBeta = 0.7978845608028654f, kKappa = 0.044715f;  // sqrt(2 / pi), and its cubic term
  template <typename T>
  __device__ static float value(float x) {
    return 0.5f * x * (1.f + tanhf(kBeta * (x + kKappa * (x * x * x))));
  }
  // (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), which does not cancel.
  __device__ static float gate(float x) {
    const float minus_2u = x * fmaf(-2.f * kBeta * kKappa, x * x, -2.f * kBeta);
    return reciprocal_approximate(1.f + exp_approximate(minus_2u));
  }
  template <typename T>
  __device__ static float near(float x) {
    return sizeof(T) == 4 ? value<T>(x) : x * gate(x);
  }
  template <typename T>
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    if constexpr (sizeof(T) == 2) {
      const float g = gate(x);
      value = x * g;
      slope = fmaf(value * (1.f - g), fmaf(6.f * kBeta * kKappa, x * x, 2.f * kBeta), g);
      return;
    }
    const float t = tanhf(kBeta * (x + kKappa * (x * x * x)));
    value = 0.5f * x * (1.f + t);
    const float t_slope = fmaf(-t, t, 1.f) * kBeta * fmaf(3.f * kKappa * x, x, 1.f);
    slope = fmaf(0.5f * x, t_slope, 0.5f * (1.f + t));
  }
};

struct GeluErf {
  static constexpr int kBlocksPerSm = 5;
  static constexpr float kRsqrt2 = 0.7071067811865476f, kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
  template <typename T>
  __device__ static float value(float x) {
    return x * 0.5f * (1.f + erff(x * kRsqrt2));
  }
  // (1 + erf(x / sqrt 2)) / 2, to 5e-6 of itself, and e^(-x^2 / 2). The tail is e^(-x^2 / 2) times a polynomial in
  // 1 / (1 + p |x|), an idea of Hastings 1955, "Approximations for Digital Computers".
  __device__ static float distribution(float x, float& bell) {
    bell = exp_approximate(-0.5f * x * x);
    const float t = reciprocal_approximate(fmaf(0.31f, fabsf(x), 1.f));
    float tail = fmaf(-0.073936716f, t, 0.18047087f);
    tail = fmaf(tail, t, 0.015724057f);
    tail = fmaf(tail, t, 0.13343924f);
    tail = fmaf(tail, t, 0.12043938f);
    tail = fmaf(tail, t, 0.12386083f);
    tail *= t * bell;
    return x < 0.f ? tail : 1.f - tail;
  }
  template <typename T>
  __device__ static float near(float x) {
    float bell;
    return sizeof(T) == 4 ? value<T>(x) : x * distribution(x, bell);
  }
  template <typename T>
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    if constexpr (sizeof(T) == 2) {
      float bell;
      const float cdf = distribution(x, bell);
      value = x * cdf;
      slope = fmaf(x * kDensity, bell, cdf);
      return;
    }
    const float cdf = 0.5f * (1.f + erff(x * kRsqrt2));
    value = x * cdf;
    slope = fmaf(x * kDensity, expf(-0.5f * x * x), cdf);
  }
};

struct Relu2 {
  static constexpr int kBlocksPerSm = 8;
  template <typename T>
  __device__ static float value(float x) {
    const float r = x < 0.f ? 0.f : x;  // NaN stays NaN
    return r * r;
  }
  template <typename T>
  __device__ static float near(float x) {
    return value<T>(x);
  }
  template <typename T>
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    const float r = x < 0.f ? 0.f : x;
    value = r * r;
    slope = 2.f * r;
  }
};

struct Sigmoid {
  static constexpr int kBlocksPerSm = 8;
  template <typename T>
  __device__ static float value(float x) {
    const float e = expf(-x);
    return sizeof(T) == 4 ? 1.f / (1.f + e) : quotient(1.f, e);
  }
  template <typename T>
  __device__ static float near(float x) {
    return sizeof(T) == 4 ? value<T>(x) : reciprocal_approximate(1.f + exp_approximate(-x));
  }
  template <typename T>
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    value = 1.f / (1.f + expf(-x));
    slope = value / (1.f + expf(x));  // 1 - value would cancel
  }
};

struct Relu {
  static constexpr int kBlocksPerSm = 8;
  template <typename T>
  __device__ static float value(float x) {
    return x < 0.f ? 0.f : x;  // NaN stays NaN
  }
  template <typename T>
  __device__ static float near(float x) {
    return value<T>(x);
  }
  template <typename T>
  __device__ static void value_and_slope(float x, float& value, float& slope) {
    value = x < 0.f ? 0.f : x;
    slope = x <= 0.f ? 0.f : 1.f;
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

// How a thread accesses its vector: columns [c, c + N) of rows of `cols`. Rows that are not all aligned have their
// loads cut out of two, and the thread takes the aligned vectors of the result (device/shifted.cuh).
template <typename T, bool kAligned>
struct RowAccess {
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;

  int64_t cols;
  uint64_t policy;

  // The column of the thread's vector of `result`, may be before the row or behind it.
  __device__ int64_t column(const T* result, int64_t col) const { return kAligned ? col : col - misalignment(result); }
  __device__ V load(const T* row, int64_t c) const {
    return kAligned ? V::load(row + c, policy) : load_shifted(row, c, int64_t{0}, cols);
  }
  __device__ void store(const V& value, T* row, int64_t c) const {
    if constexpr (kAligned) {
      value.store(row + c);
    } else {
      store_aligned(value, row, c, int64_t{0}, cols);
    }
  }
};

template <typename Body>
cudaError_t dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kSilu: return body(Silu{});
    case Activation::kGeluTanh: return body(GeluTanh{});
    case Activation::kGeluErf: return body(GeluErf{});
    case Activation::kRelu2: return body(Relu2{});
    case Activation::kSigmoid: return body(Sigmoid{});
    case Activation::kRelu: return body(Relu{});
  }
  return cudaErrorInvalidValue;
}

// The same on the device, for an activation that is an option of an epilogue. By comparisons: of a switch nvcc makes a
// jump by a table in constant memory, with which the linears of a token by gemv take 0.1 to 0.7 % longer on an H200.
template <typename Body>
__device__ void dispatch_on_device(Activation activation, Body&& body) {
  if (activation == Activation::kSilu) return body(Silu{});
  if (activation == Activation::kGeluTanh) return body(GeluTanh{});
  if (activation == Activation::kGeluErf) return body(GeluErf{});
  if (activation == Activation::kRelu2) return body(Relu2{});
  if (activation == Activation::kSigmoid) return body(Sigmoid{});
  return body(Relu{});
}

// Launches `kernel` over rows x cols, `width` elements per access; it moves `element_bytes` for each element. `skewed`:
// a row may cover one vector more than it has.
template <typename Params>
cudaError_t run(void (*kernel)(Params, unsigned, bool), const Params& params, int width, size_t element_bytes,
                cudaStream_t stream, bool skewed = false) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const int64_t per_block = static_cast<int64_t>(kThreads) * width, cols = params.cols + (skewed ? width - 1 : 0);
  const int64_t blocks_per_row = (cols + per_block - 1) / per_block;
  return launch(kernel, {blocks_per_row * params.rows, dim3(kThreads)}, stream, params,
                static_cast<unsigned>(blocks_per_row), keeps_inputs(device, params.rows * params.cols * element_bytes));
}

}  // namespace llmk::kernels::activation
