// Activations with biases in front, gated (bias_swiglu, bias_geglu) or not (bias_gelu, relu2). With r = rounding to the
// dtype, g = r(gate + gate_bias) and u = r(up + up_bias):
//
//   y = r(act(g)), gated r(r(act(g)) u)
//   grad_gate = r(grad_y u act'(g))      grad_up = r(grad_y act(g))      their biases: r(sum over rows of these)
//
// The roundings of the forward are those of eager PyTorch, bitwise where it is gated. Rows any distance apart, so a
// packed [gate | up] is the same kernel, y contiguous; float32, float16 or bfloat16; float32 arithmetic. Forward as in
// glu.cu. In the backward each thread has one vector of columns and goes over a range of rows, with the sums for the
// biases in registers: nothing is read twice. Partial sums are added in a fixed order, the same for rows of any
// alignment.
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

// The gradients at a vector of columns, row by row, with their sums for the biases.
template <typename Act, typename T, bool kGated>
struct ColumnGradients {
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;

  V gate_bias, up_bias;
  float gate_sums[N] = {}, up_sums[N] = {};

  // Calls store_gate(grad_gate) and, gated, store_up(grad_up).
  template <typename StoreGate, typename StoreUp>
  __device__ void add_row(const V& grad_y, const V& gate, const V& up, const StoreGate& store_gate,
                          const StoreUp& store_up) {
    const V g = add(gate, gate_bias);
    V u;
    if constexpr (kGated) u = add(up, up_bias);
    float value[N], slope[N];
#pragma unroll
    for (int i = 0; i < N; ++i) Act::template value_and_slope<T>(g[i], value[i], slope[i]);
    const V grad_gate = V::of([&](int i) { return (kGated ? grad_y[i] * u[i] : grad_y[i]) * slope[i]; });
    store_gate(grad_gate);
#pragma unroll
    for (int i = 0; i < N; ++i) gate_sums[i] = __fadd_rn(gate_sums[i], grad_gate[i]);
    if constexpr (kGated) {
      const V grad_up = V::of([&](int i) { return grad_y[i] * value[i]; });
      store_up(grad_up);
#pragma unroll
      for (int i = 0; i < N; ++i) up_sums[i] = __fadd_rn(up_sums[i], grad_up[i]);
    }
  }
  // Calls store(sums, partial) for the sums that are wanted; `partial` is the p-th row of them.
  template <typename Store>
  __device__ void store_sums_to(const BiasActBackwardParams& params, int64_t part, const Store& store) const {
    auto* partial = static_cast<float*>(params.partials) + part * params.cols;
    if (params.grad_gate_bias) {
      store(gate_sums, partial);
      partial += params.partial_rows * params.cols;
    }
    if (kGated && params.grad_up_bias) store(up_sums, partial);
  }
};

// The p-th range of rows.
struct RowRange {
  int64_t begin, end;
  __device__ RowRange(const BiasActBackwardParams& params, int64_t part)
      : begin(params.rows * part / params.partial_rows), end(params.rows * (part + 1) / params.partial_rows) {}
};

// Block (s, p) takes strip s of the columns, a vector per thread, over the p-th range of rows.
template <typename Act, typename T, bool kGated>
__global__ void __launch_bounds__(kThreads)
    bias_act_backward_kernel(const BiasActBackwardParams params, unsigned strips, bool keep_inputs) {
  using Gradients = ColumnGradients<Act, T, kGated>;
  using V = typename Gradients::V;
  constexpr int N = Gradients::N;
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const auto [part, col] = vector_position<N, false>(strips);
  if (col >= params.cols) return;
  Gradients gradients{load_bias<T, N>(params.gate_bias, col), load_bias<T, N>(params.up_bias, col)};
  const RowRange range(params, part);
#pragma unroll 2
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t out = row * params.grad_stride + col;
    const auto load = [&, col = col](const void* rows, int64_t stride) {
      return V::load(static_cast<const T*>(rows) + row * stride + col, policy);
    };
    const V grad_y = load(params.grad_y, params.grad_y_stride), gate = load(params.gate, params.gate_stride);
    V up;
    if constexpr (kGated) up = load(params.up, params.up_stride);
    gradients.add_row(
        grad_y, gate, up, [&](const V& grad) { grad.store(static_cast<T*>(params.grad_gate) + out); },
        [&](const V& grad) { grad.store(static_cast<T*>(params.grad_up) + out); });
  }
  gradients.store_sums_to(params, part, [col = col](const float(&sums)[N], float* partial) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      Vec<float, 4>{{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]}}.store(partial + col + i);
    }
  });
}

// The same for rows that are not aligned: a thread's vectors are cut out of two, and put together by its warp to be
// stored, for which lane 0 has those of the warp before once more (shifted.cuh). Strips of whole warps.
constexpr int kOwnLanes = 31;
template <typename Act, typename T, bool kGated>
__global__ void __launch_bounds__(kThreads)
    bias_act_backward_skewed_kernel(const BiasActBackwardParams params, unsigned strips) {
  using Gradients = ColumnGradients<Act, T, kGated>;
  using V = typename Gradients::V;
  constexpr int N = Gradients::N;
  struct Loaded {
    Uncut<T> grad_y, gate, up;
  };
  __shared__ float sums_of_warps[kThreads * N];
  pdl_launch_dependents();
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned part = blockIdx.x / strips, first_warp = (blockIdx.x - part * strips) * (blockDim.x / 32);
  const int64_t first = (static_cast<int64_t>(first_warp + warp) * kOwnLanes - 1) * N, col = first + lane * N;
  const int64_t cols = params.cols;
  if (first + 1 >= cols) return;
  const auto load = [&](const void* rows, int64_t offset) {
    return Uncut<T>(static_cast<const T*>(rows) + offset, col, int64_t{0}, cols);
  };
  const auto load_bias = [&](const void* bias) {
    return bias ? load(bias, 0).vector() : V::of([](int) { return 0.f; });
  };
  Gradients gradients{load_bias(params.gate_bias), load_bias(params.up_bias)};
  const auto load_row = [&](int64_t row) {
    Loaded loaded;
    loaded.grad_y = load(params.grad_y, row * params.grad_y_stride);
    loaded.gate = load(params.gate, row * params.gate_stride);
    if constexpr (kGated) loaded.up = load(params.up, row * params.up_stride);
    return loaded;
  };
  const RowRange range(params, part);
  for_rows_ahead(range.begin, range.end, load_row, [&](int64_t row, const Loaded& loaded) {
    const auto store_to = [&](void* target) {
      return [&, target](const V& grad) {
        store_by_warp(grad, static_cast<T*>(target) + row * params.grad_stride, col, int64_t{0}, cols);
      };
    };
    V up;
    if constexpr (kGated) up = loaded.up.vector();
    gradients.add_row(loaded.grad_y.vector(), loaded.gate.vector(), up, store_to(params.grad_gate),
                      store_to(params.grad_up));
  });
  gradients.store_sums_to(params, part, [&](const float(&sums)[N], float* partial) {
    store_sums(sums, sums_of_warps + warp * 32 * N, partial, first, first + N, cols);
  });
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

// The strips of rows that are not aligned: as many warps in each, up to those of kThreads.
struct SkewedStrips {
  int64_t count;
  int threads;

  SkewedStrips(int64_t cols, int width) {
    const int64_t vectors = (cols + 2 * width - 2) / width;  // of memory, of a row that starts at the end of one
    const int64_t warps = (vectors + kOwnLanes - 1) / kOwnLanes;
    count = (warps + kThreads / 32 - 1) / (kThreads / 32);
    threads = static_cast<int>((warps + count - 1) / count * 32);
  }
};

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
    const int64_t strips = count_strips(params.cols, kVecWidth<T>);
    // Enough blocks to fill the GPU, and no sum over more than 1024 rows, for accuracy.
    const int64_t wanted = std::max<int64_t>((8 * device.sm_count + strips - 1) / strips, params.rows / 1024);
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
    const int64_t strips = count_strips(params.cols, N);
    const SkewedStrips skewed(params.cols, N);
    const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * (params.up ? 5 : 3));
    const cudaError_t status = dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      if (!vector) {
        const auto kernel =
            params.up ? bias_act_backward_skewed_kernel<Act, T, true> : bias_act_backward_skewed_kernel<Act, T, false>;
        return launch(kernel, {skewed.count * params.partial_rows, dim3(skewed.threads)}, stream, params,
                      static_cast<unsigned>(skewed.count));
      }
      const auto kernel = params.up ? bias_act_backward_kernel<Act, T, true> : bias_act_backward_kernel<Act, T, false>;
      return launch(kernel, {strips * params.partial_rows, dim3(kThreads)}, stream, params,
                    static_cast<unsigned>(strips), keep);
    });
    if (status != cudaSuccess) return status;
    return column_sum<T>(
        {params.partials, params.partial_rows, params.cols, params.grad_gate_bias, params.grad_up_bias}, stream);
  });
}

}  // namespace llmk::kernels
