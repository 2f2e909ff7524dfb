// Activations with biases in front, gated (bias_swiglu, bias_geglu) or not (bias_gelu, relu2). With r = rounding to the
// dtype, g = r(gate + gate_bias) and u = r(up + up_bias):
//
//   y = r(act(g)), gated r(r(act(g)) u)
//   grad_gate = r(grad_y u act'(g))      grad_up = r(grad_y act(g))      their biases: r(sum over rows of these)
//
// The roundings of the forward are those of eager PyTorch, bitwise where it is gated. Rows any distance apart, so a
// packed [gate | up] is the same kernel, y contiguous; float32, float16 or bfloat16; float32 arithmetic. Forward as in
// glu.cu. In the backward each thread has one vector of columns and goes over a range of rows, with the sums for the
// biases in registers: nothing is read twice. Partial sums are added in a fixed order.
#include "bias_act.h"

#include <algorithm>

#include "activation.cuh"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

using namespace activation;

namespace {

// The vector at `col` of a bias, 0 without one.
template <typename T, int N>
__device__ Vec<T, N> load_bias(const void* bias, int64_t col) {
  return bias ? Vec<T, N>::load(static_cast<const T*>(bias) + col) : Vec<T, N>::of([](int) { return 0.f; });
}

// kGated is a template parameter, since the second operand takes registers.
template <typename Act, typename T, bool kAligned, bool kGated>
__global__ void __launch_bounds__(kThreads, !kAligned ? kSkewedBlocksPerSm
                                            : kGated  ? Act::kBlocksPerSm
                                                      : 8)
    bias_act_kernel(const BiasActParams params, unsigned blocks_per_row, bool keep_inputs) {
  using Access = RowAccess<T, kAligned>;
  using V = typename Access::V;
  const Access access{params.cols, l2_policy(keep_inputs)};
  pdl_launch_dependents();
  pdl_wait();
  const auto [row, col] = vector_position<Access::N, false>(blocks_per_row);
  T* const y = static_cast<T*>(params.y) + row * params.cols;
  const int64_t c = access.column(y, col);
  if (c >= params.cols) return;
  const auto with_bias = [&, c = c](const void* rows, int64_t row_offset, const void* bias) {
    const V x = access.load(static_cast<const T*>(rows) + row_offset, c);
    if constexpr (kAligned) return add(x, load_bias<T, Access::N>(bias, c));
    return bias ? add(x, access.load(static_cast<const T*>(bias), c)) : x;
  };
  const V g = with_bias(params.gate, row * params.gate_stride, params.gate_bias);
  if constexpr (kGated) {
    const V u = with_bias(params.up, row * params.up_stride, params.up_bias);
    access.store(mul(V::of([&](int i) { return Act::template value<T>(g[i]); }), u), y, c);
  } else {
    access.store(V::of([&](int i) { return Act::template near<T>(g[i]); }), y, c);
  }
}

// Block (s, p) takes strip s of the columns, a vector per thread, over the p-th range of rows.
template <typename Act, typename T, int N, bool kGated>
__global__ void __launch_bounds__(kThreads)
    bias_act_backward_kernel(const BiasActBackwardParams params, unsigned strips, bool keep_inputs) {
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const auto [part, col] = vector_position<N, false>(strips);
  if (col >= params.cols) return;
  const V gate_bias = load_bias<T, N>(params.gate_bias, col), up_bias = load_bias<T, N>(params.up_bias, col);
  const int64_t begin = params.rows * part / params.partial_rows, end = params.rows * (part + 1) / params.partial_rows;
  float gate_sums[N] = {}, up_sums[N] = {};
  // Rows that are loaded before the first of them is stored: single elements are few bytes under way. (Vectors for rows
  // that are not aligned, each part with rows of one alignment, took 113 us instead of 92 for bias_gelu 8192x4097.)
  constexpr int kAhead = N == 1 ? 8 : 1;
#pragma unroll(N == 1 ? 1 : 2)
  for (int64_t first = begin; first < end; first += kAhead) {
    V grad_y[kAhead], gate[kAhead], up[kAhead];
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      const int64_t row = kAhead == 1 ? first : min(first + r, end - 1);
      const auto load = [&, col = col](const void* rows, int64_t stride) {
        return V::load(static_cast<const T*>(rows) + row * stride + col, policy);
      };
      grad_y[r] = load(params.grad_y, params.grad_y_stride);
      gate[r] = load(params.gate, params.gate_stride);
      if constexpr (kGated) up[r] = load(params.up, params.up_stride);
    }
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (kAhead > 1 && first + r >= end) break;
      const int64_t out = (first + r) * params.grad_stride + col;
      const V g = add(gate[r], gate_bias);
      V u;
      if constexpr (kGated) u = add(up[r], up_bias);
      float value[N], slope[N];
#pragma unroll
      for (int i = 0; i < N; ++i) Act::template value_and_slope<T>(g[i], value[i], slope[i]);
      const V grad_gate = V::of([&](int i) { return (kGated ? grad_y[r][i] * u[i] : grad_y[r][i]) * slope[i]; });
      grad_gate.store(static_cast<T*>(params.grad_gate) + out);
#pragma unroll
      for (int i = 0; i < N; ++i) gate_sums[i] += grad_gate[i];
      if constexpr (kGated) {
        const V grad_up = V::of([&](int i) { return grad_y[r][i] * value[i]; });
        grad_up.store(static_cast<T*>(params.grad_up) + out);
#pragma unroll
        for (int i = 0; i < N; ++i) up_sums[i] += grad_up[i];
      }
    }
  }
  auto* partial = static_cast<float*>(params.partials) + part * params.cols + col;
  if (params.grad_gate_bias) {
#pragma unroll
    for (int i = 0; i < N; ++i) partial[i] = gate_sums[i];
    partial += params.partial_rows * params.cols;
  }
  if (kGated && params.grad_up_bias) {
#pragma unroll
    for (int i = 0; i < N; ++i) partial[i] = up_sums[i];
  }
}

RowOperands row_operands(const BiasActParams& p) {
  return {p.rows, p.cols, {{p.gate, p.gate_stride}, {p.up, p.up_stride}, {p.gate_bias}, {p.up_bias}, {p.y}}};
}

RowOperands row_operands(const BiasActBackwardParams& p) {
  return {p.rows,
          p.cols,
          {{p.grad_y, p.grad_y_stride},
           {p.gate, p.gate_stride},
           {p.up, p.up_stride},
           {p.gate_bias},
           {p.up_bias},
           {p.grad_gate, p.grad_stride},
           {p.grad_up, p.grad_stride}}};
}

int64_t count_strips(int64_t cols, int width) {
  const int64_t strip = static_cast<int64_t>(kThreads) * width;
  return (cols + strip - 1) / strip;
}

}  // namespace

cudaError_t bias_act(const BiasActParams& params, Activation activation, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = all_rows_aligned<T>(row_operands(params));
    return dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      const auto kernel = params.up
                              ? (vector ? bias_act_kernel<Act, T, true, true> : bias_act_kernel<Act, T, false, true>)
                              : (vector ? bias_act_kernel<Act, T, true, false> : bias_act_kernel<Act, T, false, false>);
      return run(kernel, params, N, (params.up ? 3 : 2) * sizeof(T), stream, !vector);
    });
  });
}

cudaError_t bias_act_backward_partial_rows(const BiasActBackwardParams& params, Dtype dtype, int64_t& partial_rows) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t strips = count_strips(params.cols, all_rows_aligned<T>(row_operands(params)) ? kVecWidth<T> : 1);
    // Blocks to fill the GPU once, and no sum over more than 1024 rows, for accuracy.
    const int64_t wanted = std::max<int64_t>(8 * device.sm_count / strips, params.rows / 1024);
    partial_rows = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, params.rows));
    return cudaSuccess;
  });
}

cudaError_t bias_act_backward(const BiasActBackwardParams& params, Activation activation, Dtype dtype,
                              cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = all_rows_aligned<T>(row_operands(params));
    const int64_t strips = count_strips(params.cols, vector ? N : 1);
    const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * (params.up ? 5 : 3));
    const cudaError_t status = dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      const auto kernel =
          params.up
              ? (vector ? bias_act_backward_kernel<Act, T, N, true> : bias_act_backward_kernel<Act, T, 1, true>)
              : (vector ? bias_act_backward_kernel<Act, T, N, false> : bias_act_backward_kernel<Act, T, 1, false>);
      return launch(kernel, {strips * params.partial_rows, dim3(kThreads)}, stream, params,
                    static_cast<unsigned>(strips), keep);
    });
    if (status != cudaSuccess) return status;
    return column_sum<T>(
        {params.partials, params.partial_rows, params.cols, params.grad_gate_bias, params.grad_up_bias}, stream);
  });
}

}  // namespace llmk::kernels
