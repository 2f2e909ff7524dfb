// Scale and softcap of logits: with r = rounding to the dtype,
//
//   s = r(scale x)      y = r(softcap r(tanh(r(s / softcap))))      y = s where softcap is 0
//
// x [rows, cols] with rows any distance apart, y contiguous; float32, float16 or bfloat16. float32 arithmetic. Rounds
// where eager PyTorch does, which on a GPU multiplies by 1 / softcap. Moves 2 elements per element.
#include "softcap.h"

#include "activation.cuh"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

using namespace activation;

namespace {

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    scale_softcap_kernel(const SoftcapParams params, unsigned blocks_per_row, bool keep_inputs) {
  using Access = RowAccess<T, kAligned>;
  using V = typename Access::V;
  const Access access{params.cols, l2_policy(keep_inputs)};
  const float scale = static_cast<float>(params.scale), cap = static_cast<float>(params.softcap);
  pdl_launch_dependents();
  pdl_wait();
  const auto [row, col] = vector_position<Access::N, false>(blocks_per_row);
  T* const target = static_cast<T*>(params.y) + row * params.cols;
  const int64_t c = access.column(target, col);
  if (c >= params.cols) return;
  const V x = access.load(static_cast<const T*>(params.x) + row * params.x_stride, c);
  V y = V::of([&](int i) { return scale * x[i]; });
  if (cap > 0.f) {
    const float inverse_cap = 1.f / cap;
    const V z = V::of([&](int i) { return y[i] * inverse_cap; });
    const V t = V::of([&](int i) { return tanhf(z[i]); });
    y = V::of([&](int i) { return cap * t[i]; });
  }
  access.store(y, target, c);
}

}  // namespace

cudaError_t scale_softcap(const SoftcapParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = all_rows_aligned<T>({params.rows, params.cols, {{params.x, params.x_stride}, {params.y}}});
    const auto kernel = vector ? scale_softcap_kernel<T, true> : scale_softcap_kernel<T, false>;
    return run(kernel, params, N, 2 * sizeof(T), stream, !vector);
  });
}

}  // namespace llmk::kernels
