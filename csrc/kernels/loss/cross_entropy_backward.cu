// The gradient of cross-entropy from logits and log-sum-exp:
//
//   grad = round(grad_loss d losses / d logits / divisor)      reads the logits, writes the gradient (row_terms.cuh)
//
// Where the forward has written the gradient for a grad_loss of 1, nothing is left to do for such a loss, as after a
// mean or a sum. For another one the gradient is computed again, by as many bytes as its product with grad_loss takes:
// so grad_loss, which may be the scale of a GradScaler, is in it before it is rounded. Where there are no logits any
// more, or the gradient is a sum of products with that of the logits, the product is all that can be had:
//
//   grad = round(grad_loss grad)                               nothing where grad_loss is 1
//
// float32, float16 or bfloat16; float32 arithmetic. Each element by itself, so any split of the work gives the same,
// and the gradient may be written over the logits.
#include <algorithm>

#include "cross_entropy.h"
#include "device/shifted.cuh"
#include "row_terms.cuh"

namespace llmk::kernels {
namespace {

constexpr int kThreads = 256, kVectors = 4;  // per thread: loads in flight

// What a vector of a row is loaded and stored by: kShifted, where rows are of any alignment, at the aligned vectors of
// the gradient.
template <typename T, int N, bool kShifted>
__device__ Vec<T, N> load_vector(const T* row, int64_t c, int64_t vocab) {
  if constexpr (kShifted) return load_shifted(row, c, int64_t{0}, vocab);
  return Vec<T, N>::load(row + c);
}
template <bool kShifted, typename T, int N>
__device__ void store_vector(const Vec<T, N>& value, T* row, int64_t c, int64_t vocab) {
  if constexpr (kShifted) {
    store_aligned(value, row, c, int64_t{0}, vocab);
  } else {
    value.store(row + c);
  }
}

// Of this thread's first vector of a tile.
template <typename T, bool kShifted>
__device__ int64_t first_column(int64_t tile_of_row, const T* row) {
  const int64_t first = (tile_of_row * kVectors * kThreads + threadIdx.x) * kVecWidth<T>;
  return kShifted ? first - misalignment(row) : first;
}

// Block b takes tiles b, b + gridDim.x, ... of rows that have `tiles` each.
template <typename T, bool kShifted, bool kGeneral>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(const CrossEntropyParams params, int64_t tiles) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  const auto* const grad_losses = static_cast<const float*>(params.grad_loss);
  pdl_launch_dependents();
  pdl_wait();
  if (params.grad_is_of_one && params.grad_loss_stride == 0 && grad_losses[0] == 1.f) return;
  for (int64_t tile = blockIdx.x; tile < params.rows * tiles; tile += gridDim.x) {
    const int64_t row = tile / tiles;
    const float grad_loss = grad_losses[row * params.grad_loss_stride];
    if (params.grad_is_of_one && grad_loss == 1.f) continue;
    const T* const logits = static_cast<const T*>(params.logits) + row * params.logits_stride;
    T* const grad = static_cast<T*>(params.grad) + row * params.grad_stride;
    const int64_t first = first_column<T, kShifted>(tile % tiles, grad);
    const auto column = [&](int v) { return first + static_cast<int64_t>(v) * kThreads * N; };
    const int64_t target = params.target[row];
    const bool ignored = target == params.options.ignore_index;
    V x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!ignored && column(v) < params.vocab) x[v] = load_vector<T, N, kShifted>(logits, column(v), params.vocab);
    }
    const LossTerms terms(params);
    const float lse = static_cast<const float*>(params.lse)[row];
    const float a = ignored ? 0.f : terms.of_target(target, params.vocab), scale = grad_loss / terms.divisor;
    const RowGradient gradient{lse, terms.probability_factor(a, lse) * scale, terms.smoothing * scale, a * scale};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) >= params.vocab) continue;
      const V result = ignored ? V::of([](int) { return 0.f; })
                               : gradient.template operator()<kGeneral, kShifted>(x[v], column(v), target, terms);
      store_vector<kShifted>(result, grad, column(v), params.vocab);
    }
  }
}

// Blocks take tiles as above.
template <typename T, bool kShifted>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_scale_kernel(const CrossEntropyScaleParams params, int64_t tiles) {
  constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;
  const auto* const grad_loss = static_cast<const float*>(params.grad_loss);
  pdl_launch_dependents();
  pdl_wait();
  if (params.grad_loss_stride == 0 && grad_loss[0] == 1.f) return;
  for (int64_t tile = blockIdx.x; tile < params.rows * tiles; tile += gridDim.x) {
    const int64_t row = tile / tiles;
    const float factor = grad_loss[row * params.grad_loss_stride];
    if (factor == 1.f) continue;
    T* const grad = static_cast<T*>(params.grad) + row * params.vocab;
    const int64_t first = first_column<T, kShifted>(tile % tiles, grad);
    const auto column = [&](int v) { return first + static_cast<int64_t>(v) * kThreads * N; };
    V x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) < params.vocab) x[v] = load_vector<T, N, kShifted>(grad, column(v), params.vocab);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v) >= params.vocab) continue;
      const V result = V::of([&](int i) { return x[v][i] * factor; });
      store_vector<kShifted>(result, grad, column(v), params.vocab);
    }
  }
}

// Of a row of so many elements; where it is not aligned, it may cover one vector more than it has.
template <typename T>
int64_t tiles_of(int64_t vocab, bool vector) {
  constexpr int N = kVecWidth<T>, kTile = kThreads * kVectors * N;
  return ((vector ? vocab : vocab + N - 1) + kTile - 1) / kTile;
}

// A persistent grid, so that it ends at once where the only grad_loss is 1.
cudaError_t persistent_shape(int64_t tiles, LaunchShape& shape) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  constexpr int kBlocksPerSm = 8;
  shape = {std::min(tiles, kBlocksPerSm * static_cast<int64_t>(device.sm_count)), dim3(kThreads)};
  shape.may_overlap = false;
  return cudaSuccess;
}

}  // namespace

cudaError_t cross_entropy_backward(const CrossEntropyParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.vocab == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    return dispatch_int<0, 1>(is_general(params), [&](auto general) {
      using T = typename decltype(tag)::type;
      constexpr bool kGeneral = decltype(general)::value;
      const bool vector = all_rows_aligned<T>(row_operands(params));
      const int64_t tiles = tiles_of<T>(params.vocab, vector);
      LaunchShape shape{params.rows * tiles, dim3(kThreads)};
      if (params.grad_is_of_one) {
        if (const cudaError_t status = persistent_shape(shape.blocks, shape); status != cudaSuccess) return status;
      }
      return launch(
          vector ? cross_entropy_backward_kernel<T, false, kGeneral> : cross_entropy_backward_kernel<T, true, kGeneral>,
          shape, stream, params, tiles);
    });
  });
}

cudaError_t cross_entropy_scale(const CrossEntropyScaleParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.vocab == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool vector = all_rows_aligned<T>({params.rows, params.vocab, {{params.grad}}});
    const int64_t tiles = tiles_of<T>(params.vocab, vector);
    LaunchShape shape;
    if (const cudaError_t status = persistent_shape(params.rows * tiles, shape); status != cudaSuccess) return status;
    return launch(vector ? cross_entropy_scale_kernel<T, false> : cross_entropy_scale_kernel<T, true>, shape, stream,
                  params, tiles);
  });
}

}  // namespace llmk::kernels
