// Activations with biases in front, gated (bias_swiglu, bias_geglu) or not (bias_gelu, relu2). With r = rounding to the
// dtype, g = r(gate + gate_bias) and u = r(up + up_bias):
//
//   y = r(act(g)), gated r(r(act(g)) u)
//   grad_gate = r(grad_y u act'(g))      grad_up = r(grad_y act(g))      their biases: r(sum over rows of these)
//
// The roundings of the forward are those of eager PyTorch, bitwise where it is gated. Rows any distance apart, so a
// packed [gate | up] is the same kernel, y contiguous; float32, float16 or bfloat16; float32 arithmetic. Forward as in
// glu.cu. In the backward each thread has one vector of columns and goes over some rows, with its sums for the biases:
// nothing is read twice. Partial sums are added in a fixed order.
#include "bias_act.h"

#include <algorithm>
#include <numeric>

#include "activation.cuh"
#include "device/ptx.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/row_cover.cuh"

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

// How the backward lies over a matrix: blocks are split over parts of the rows, and over strips of the vectors that
// cover a row. A block has groups of threads, each with a strip of some of its rows, and each thread one vector of
// columns. All rows of a part start at the same place of a vector, as every classes-th row does. us, bfloat16, an H200;
// the design before this one had a part's rows in turn, 256 threads side by side, sums in registers, and single
// elements where rows are not aligned:
//
//   case                     | before | now
//   -------------------------|--------|------
//   bias_gelu 8192 x 4096    |   64.2 |  57.5
//   bias_gelu 8192 x 4097    |   91.5 |  68.5
//   bias_gelu 32768 x 64     |   52.0 |  15.9
//   bias_swiglu 4096 x 11008 |  141.3 | 143.3
//   bias_swiglu 4096 x 11009 |  213.8 | 147.7
struct BackwardPlan {
  int width;         // elements of a vector; 1 where the rows of the operands do not all start at the same place
  unsigned classes;  // of rows by where they start; part p has rows of class p % classes
  int log2_strip;    // threads of a group: a warp or less, or, where a vector is one element, up to all of the block
  int64_t strips;

  int groups() const { return kThreads >> log2_strip; }
};

constexpr int kLog2Threads = 8, kLog2Warp = 5, kLeastLog2Strip = 2;
static_assert(kThreads == 1 << kLog2Threads);

template <int N>
struct alignas(N == 1 ? 4 : 16) Sums {
  float of[N];
};

template <typename Act, typename T, int N, bool kGated>
__global__ void __launch_bounds__(kThreads, kGated ? 3 : 4)
    bias_act_backward_kernel(const BiasActBackwardParams params, unsigned strips, int log2_strip, unsigned classes,
                             bool keep_inputs) {
  using V = Vec<T, N>;
  // Rows that are loaded before the first of them is stored: single elements are few bytes under way.
  constexpr int kAhead = N == 1 ? 8 : 1;
  // The sums of a thread so far. In registers they would be as many as a vector has elements, too many for three or
  // four blocks on an SM.
  __shared__ Sums<N> gate_sums[kThreads], up_sums[kGated ? kThreads : 1];
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();
  const unsigned part = blockIdx.x / strips, strip = blockIdx.x - part * strips, part_class = part % classes;
  const int groups = kThreads >> log2_strip, group = threadIdx.x >> log2_strip;
  const int rank = threadIdx.x - (group << log2_strip);
  const auto* const first_row = static_cast<const T*>(params.grad_gate) + part_class * params.grad_stride;
  const int64_t col = ((static_cast<int64_t>(strip) << log2_strip) + rank) * N - (N == 1 ? 0 : misalignment(first_row));
  // Elements [from, to) of the vector lie in the row.
  const int from = col < 0 ? static_cast<int>(-col) : 0;
  const int to = static_cast<int>(max(min(params.cols - col, int64_t{N}), int64_t{0}));

  // Of the rows of the class: the part has [begin, end), and the group every groups-th of these.
  const auto of_class = [&](int64_t count) { return (count - part_class + classes - 1) / classes; };
  const int64_t rows = of_class(params.rows), parts = of_class(params.partial_rows), index = part / classes;
  const int64_t begin = rows * index / parts, end = rows * (index + 1) / parts;
  const int count = to == 0 ? 0 : static_cast<int>((end - begin - group + groups - 1) >> (kLog2Threads - log2_strip));
  const int64_t step = static_cast<int64_t>(groups) * classes;
  const auto at = [&, row = part_class + classes * (begin + group), col = col](auto* tensor, int64_t stride) {
    return static_cast<T*>(const_cast<void*>(tensor)) + row * stride + col;
  };
  const T *grad_y = at(params.grad_y, params.grad_y_stride), *gate = at(params.gate, params.gate_stride),
          *up = at(params.up, params.up_stride);
  T *grad_gate = at(params.grad_gate, params.grad_stride), *grad_up = at(params.grad_up, params.grad_stride);
  // Vectors are loaded whole, also where some of their elements are a neighbour's, but for those that lie in part
  // outside of the tensor: one of its first row, and one of its last.
  const bool has_first = part_class + begin + group == 0;
  const bool has_last =
      part_class + classes * (end - 1) == params.rows - 1 && ((end - 1 - begin) & (groups - 1)) == group;
  const int outside_first = from > 0 && has_first ? 0 : -1, outside_last = to < N && has_last ? count - 1 : -1;

  const auto load_bias = [&, col = col](const void* bias) {
    if (!bias || to == 0) return V::of([](int) { return 0.f; });
    if constexpr (N == 1) {
      return V::load(static_cast<const T*>(bias) + col);
    } else {
      return load_shifted(static_cast<const T*>(bias) + col, 0, from, to);
    }
  };
  const V gate_bias = load_bias(params.gate_bias), up_bias = load_bias(params.up_bias);
  gate_sums[threadIdx.x] = {};
  if constexpr (kGated) up_sums[threadIdx.x] = {};

  for (int i = 0; i < count; i += kAhead) {
    struct {
      V grad_y, gate, up;
    } in[kAhead];
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (kAhead > 1 && i + r >= count) break;
      const T *const grad_y_r = grad_y + r * step * params.grad_y_stride,
                     *const gate_r = gate + r * step * params.gate_stride,
                     *const up_r = up + r * step * params.up_stride;
      const bool is_inside = N == 1 || (i + r != outside_first && i + r != outside_last);
      if (is_inside) {
        in[r].grad_y = V::load(grad_y_r, policy);
        in[r].gate = V::load(gate_r, policy);
        if constexpr (kGated) in[r].up = V::load(up_r, policy);
      }
      if constexpr (N > 1) {
        if (!is_inside) {
          in[r].grad_y = load_elements(grad_y_r, 0, from, to);
          in[r].gate = load_elements(gate_r, 0, from, to);
          if constexpr (kGated) in[r].up = load_elements(up_r, 0, from, to);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (kAhead > 1 && i + r >= count) break;
      const auto store = [&](const V& value, T* vector) {
        vector += r * step * params.grad_stride;
        if constexpr (N == 1) {
          value.store(vector);
        } else {
          store_aligned(value, vector, 0, from, to);
        }
      };
      const auto add_to = [](Sums<N>& shared, const V& value) {
        Sums<N> sums = shared;
#pragma unroll
        for (int n = 0; n < N; ++n) sums.of[n] += value[n];
        shared = sums;
      };
      const V g = add(in[r].gate, gate_bias);
      V u;
      if constexpr (kGated) u = add(in[r].up, up_bias);
      float value[N], slope[N];
#pragma unroll
      for (int n = 0; n < N; ++n) Act::template value_and_slope<T>(g[n], value[n], slope[n]);
      const V grad_g = V::of([&](int n) { return (kGated ? in[r].grad_y[n] * u[n] : in[r].grad_y[n]) * slope[n]; });
      store(grad_g, grad_gate);
      add_to(gate_sums[threadIdx.x], grad_g);
      if constexpr (kGated) {
        const V grad_u = V::of([&](int n) { return in[r].grad_y[n] * value[n]; });
        store(grad_u, grad_up);
        add_to(up_sums[threadIdx.x], grad_u);
      }
    }
    grad_y += kAhead * step * params.grad_y_stride;
    gate += kAhead * step * params.gate_stride;
    up += kAhead * step * params.up_stride;
    grad_gate += kAhead * step * params.grad_stride;
    grad_up += kAhead * step * params.grad_stride;
  }

  __syncthreads();
  // Group n adds up element n of every vector.
  auto* partial = static_cast<float*>(params.partials) + part * params.cols + col;
  const auto leave = [&](const Sums<N>* sums) {
    if (group >= from && group < to) {
      float sum = 0.f;
#pragma unroll 8
      for (int g = 0; g < groups; ++g) sum += sums[(g << log2_strip) + rank].of[group];
      partial[group] = sum;
    }
    partial += params.partial_rows * params.cols;
  };
  if (params.grad_gate_bias) leave(gate_sums);
  if (kGated && params.grad_up_bias) leave(up_sums);
}

RowOperands row_operands(const BiasActParams& p) {
  return {p.rows, p.cols, {{p.gate, p.gate_stride}, {p.up, p.up_stride}, {p.gate_bias}, {p.up_bias}, {p.y}}};
}

template <typename T>
BackwardPlan backward_plan(const BiasActBackwardParams& p) {
  constexpr int N = kVecWidth<T>;
  const bool alike = rows_alike<T>(p.rows, {{p.grad_y, p.grad_y_stride},
                                            {p.gate, p.gate_stride},
                                            {p.up, p.up_stride},
                                            {p.grad_gate, p.grad_stride},
                                            {p.grad_up, p.grad_stride}});
  const bool aligned = alike && p.cols % N == 0 && rows_aligned(p.grad_gate, p.grad_stride, p.rows, sizeof(T));
  // Only vectors of the first row may begin before the tensor, and of the last one end behind it.
  const int64_t least_stride = std::min({p.grad_y_stride, p.gate_stride, p.up ? p.up_stride : p.gate_stride});
  const bool apart = p.rows == 1 || least_stride >= N;
  const auto plan = [](int width, int64_t classes, int64_t vectors, int most_log2_strip) {
    int log2_strip = kLeastLog2Strip;
    while (log2_strip < most_log2_strip && int64_t{1} << log2_strip < vectors) ++log2_strip;
    const int64_t strips = ((vectors - 1) >> log2_strip) + 1;
    return BackwardPlan{width, static_cast<unsigned>(classes), log2_strip, strips};
  };
  if (!alike || !(aligned || apart)) return plan(1, 1, p.cols, kLog2Threads);
  const int64_t vectors = aligned ? p.cols / N : covering_vectors(p.cols, N);
  return plan(N, N / std::gcd<int64_t>(N, p.grad_stride), vectors, kLog2Warp);
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
    const BackwardPlan plan = backward_plan<typename decltype(tag)::type>(params);
    // Blocks to fill the GPU twice, unless groups had no row, and no thread with more than 1024 rows, for accuracy.
    // Each class of rows has equally many parts.
    const int64_t strips = std::max<int64_t>(plan.strips, 1), groups = plan.groups(), rows = params.rows;
    const int64_t filling = std::min<int64_t>(8 * device.sm_count / strips, (rows + groups - 1) / groups);
    const int64_t even = (std::max(filling, rows / (1024 * groups)) + plan.classes - 1) / plan.classes * plan.classes;
    partial_rows = std::clamp<int64_t>(even, 1, std::max<int64_t>(1, rows));
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
    const BackwardPlan plan = backward_plan<T>(params);
    const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * (params.up ? 5 : 3));
    const cudaError_t status = dispatch_activation(activation, [&](auto act) {
      using Act = decltype(act);
      const bool vector = plan.width > 1;
      const auto kernel =
          params.up
              ? (vector ? bias_act_backward_kernel<Act, T, N, true> : bias_act_backward_kernel<Act, T, 1, true>)
              : (vector ? bias_act_backward_kernel<Act, T, N, false> : bias_act_backward_kernel<Act, T, 1, false>);
      return launch(kernel, {plan.strips * params.partial_rows, dim3(kThreads)}, stream, params,
                    static_cast<unsigned>(plan.strips), plan.log2_strip, plan.classes, keep);
    });
    if (status != cudaSuccess) return status;
    return column_sum<T>(
        {params.partials, params.partial_rows, params.cols, params.grad_gate_bias, params.grad_up_bias}, stream);
  });
}

}  // namespace llmk::kernels
