// Gated activations (Shazeer 2020): SwiGLU, GEGLU and relu2, forward and backward. With r = rounding to the dtype:
//
//   y = r(r(act(gate)) up)      grad_gate = r(grad_y up act'(gate))      grad_up = r(grad_y act(gate))
//
//   silu(x) = x / (1 + e^-x)    gelu(x) = x (1 + erf(x / sqrt 2)) / 2, or its tanh form    relu2(x) = max(x, 0)^2
//
// gate and up are [rows, cols] with rows any distance apart, so a packed [gate | up] is the same kernel; float32,
// float16 or bfloat16. float32 arithmetic; the forward has the formulas and roundings of eager PyTorch, bitwise.
// Moves 3 elements per element forward, 5 backward: memory is the limit, so the arithmetic has no branches. Contiguous
// operands are one long row. For a product behind the activation (gated_mlp) the backward also gives y once more, 6
// elements, in place if wanted. A thread has one access per operand:
//
//   value                 | case | result
//   ----------------------|------|--------
//   more than one 16-byte | all  | slower
//   access per operand    |      |
#include "glu.h"

#include "activation.cuh"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

using namespace activation;

namespace {

constexpr int kBackwardBlocksPerSm = 5;

template <typename Act, typename T, bool kAligned, bool kOneRow>
__global__ void __launch_bounds__(kThreads, kAligned ? Act::kBlocksPerSm : kSkewedBlocksPerSm)
    glu_kernel(const GluParams params, unsigned blocks_per_row, bool keep_inputs) {
  using Access = RowAccess<T, kAligned>;
  using V = typename Access::V;
  const Access access{params.cols, l2_policy(keep_inputs)};
  pdl_launch_dependents();
  pdl_wait();
  const auto [row, col] = vector_position<Access::N, kOneRow>(blocks_per_row);
  T* const y = static_cast<T*>(params.y) + row * params.cols;
  const int64_t c = access.column(y, col);
  if (c >= params.cols) return;
  const V gate = access.load(static_cast<const T*>(params.gate) + row * params.gate_stride, c);
  const V up = access.load(static_cast<const T*>(params.up) + row * params.up_stride, c);
  const V activated = V::of([&](int i) { return Act::template value<T>(gate[i]); });
  access.store(mul(activated, up), y, c);
}

// kWithY is a template parameter for its registers.
template <typename Act, typename T, int N, bool kOneRow, bool kWithY>
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
  for (int i = 0; i < N; ++i) Act::template value_and_slope<T>(gate[i], value[i], slope[i]);
  const int64_t out = row * params.grad_stride + col;
  V::of([&](int i) { return grad_y[i] * up[i] * slope[i]; }).store(static_cast<T*>(params.grad_gate) + out);
  V::of([&](int i) { return grad_y[i] * value[i]; }).store(static_cast<T*>(params.grad_up) + out);
  if constexpr (kWithY) {  // the bits of the forward
    const V activated = V::of([&](int i) { return Act::template value<T>(gate[i]); });
    mul(activated, up).store(static_cast<T*>(params.y) + row * params.y_stride + col);
  }
}

// The same for rows that are not aligned: each result at its own aligned vectors, whose operands are read for it. So no
// result may be written over an operand.
template <typename Act, typename T>
__global__ void __launch_bounds__(kThreads, kSkewedBlocksPerSm)
    glu_backward_skewed_kernel(const GluBackwardParams params, unsigned blocks_per_row, bool keep_inputs) {
  using Access = RowAccess<T, false>;
  using V = typename Access::V;
  const Access access{params.cols, l2_policy(keep_inputs)};
  pdl_launch_dependents();
  pdl_wait();
  const auto [row, col] = vector_position<Access::N, false>(blocks_per_row);
  const T* const grad_y = static_cast<const T*>(params.grad_y) + row * params.grad_y_stride;
  const T* const gate = static_cast<const T*>(params.gate) + row * params.gate_stride;
  const T* const up = static_cast<const T*>(params.up) + row * params.up_stride;
  const auto put = [&, first = col](void* target, int64_t stride, const auto& make) {
    T* const result = static_cast<T*>(target) + row * stride;
    const int64_t c = access.column(result, first);
    if (c < params.cols) access.store(make(c), result, c);
  };
  const auto slope_and_value = [&](const V& g, float(&value)[Access::N], float(&slope)[Access::N]) {
#pragma unroll
    for (int i = 0; i < Access::N; ++i) Act::template value_and_slope<T>(g[i], value[i], slope[i]);
  };
  float value[Access::N], slope[Access::N];
  put(params.grad_gate, params.grad_stride, [&](int64_t c) {
    const V dy = access.load(grad_y, c), u = access.load(up, c);
    slope_and_value(access.load(gate, c), value, slope);
    return V::of([&](int i) { return dy[i] * u[i] * slope[i]; });
  });
  put(params.grad_up, params.grad_stride, [&](int64_t c) {
    const V dy = access.load(grad_y, c);
    slope_and_value(access.load(gate, c), value, slope);
    return V::of([&](int i) { return dy[i] * value[i]; });
  });
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
    const bool vector = all_rows_aligned<T>(
        {params.rows, params.cols, {{params.gate, params.gate_stride}, {params.up, params.up_stride}, {params.y}}});
    return dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      const auto kernel = !vector           ? glu_kernel<Act, T, false, false>
                          : params.rows > 1 ? glu_kernel<Act, T, true, false>
                                            : glu_kernel<Act, T, true, true>;
      return run(kernel, params, N, 3 * sizeof(T), stream, !vector);
    });
  });
}

cudaError_t glu_backward(const GluBackwardParams& given, Activation activation, Dtype dtype, cudaStream_t stream) {
  GluBackwardParams params = given;
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  if (params.grad_y_stride == params.cols && params.gate_stride == params.cols && params.up_stride == params.cols &&
      params.grad_stride == params.cols && !params.y) {
    params.cols *= params.rows;
    params.rows = 1;
  }
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = all_rows_aligned<T>({params.rows,
                                             params.cols,
                                             {{params.grad_y, params.grad_y_stride},
                                              {params.gate, params.gate_stride},
                                              {params.up, params.up_stride},
                                              {params.grad_gate, params.grad_stride},
                                              {params.grad_up, params.grad_stride},
                                              {params.y, params.y_stride}}});
    return dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      const bool skewed = !vector && !params.y;  // y may be written over grad_y, and the gradients over gate and up
      const auto kernel = skewed            ? glu_backward_skewed_kernel<Act, T>
                          : !vector         ? glu_backward_kernel<Act, T, 1, false, true>
                          : params.y        ? glu_backward_kernel<Act, T, N, false, true>
                          : params.rows > 1 ? glu_backward_kernel<Act, T, N, false, false>
                                            : glu_backward_kernel<Act, T, N, true, false>;
      return run(kernel, params, vector || skewed ? N : 1, (params.y ? 6 : 5) * sizeof(T), stream, skewed);
    });
  });
}

}  // namespace llmk::kernels
