// RMSNorm and the FP8 quantization of its result, in one pass over the row: see kernels/norm/forward.cuh and
// fp8_quantize.cu for both formulas. y is rounded to the dtype as by rms_norm, and its bits are the same: the sum of
// squares has the same order. A group of threads keeps the row in registers from the load to the store of the bytes.
//
//   row            |v0|v1|v2| ..                one vector of 16 bytes per thread, or two
//   sum of squares  row_sum()                   of all threads of the row
//   maximum        |-- 128 --|-- 128 --| ..     per block of 128 elements of neighbouring lanes, or of the whole row
//
// Moves 3 bytes per 16-bit element. Longer and unaligned rows take two kernels, see csrc/torch/fp8.cpp.
#include "fp8.cuh"
#include "fp8.h"
#include "kernels/norm/forward.cuh"

namespace llmk::kernels {

using namespace quant;

namespace {

// Template parameter kVectors: as in norm_kernel.
template <typename T, int kVectors>
__global__ void __launch_bounds__(1024)
    rms_norm_quantize_kernel(const NormParams params, const Fp8Output out, float inverse_cols) {
  constexpr int N = kVecWidth<T>, kLanes = fp8::kBlock / N;
  using V = Vec<T, N>;
  __shared__ float shared[kMaxRowsPerBlock * kMaxVirtualWarps], maxima[32];
  const Group group = norm::row_group();
  const int64_t row = norm::row_index();
  const T* const x = static_cast<const T*>(params.x) + row * params.x_stride;
  const T* const weight = static_cast<const T*>(params.weight);
  const int count = row < params.rows ? static_cast<int>(params.cols / N) : 0;
  const auto vector = [&](int v) { return group.rank + v * group.threads; };
  const auto mine = [&](int v) { return vector(v) < count; };
  const float eps = static_cast<float>(params.options.eps);
  pdl_launch_dependents();
  pdl_wait();
  V s[kVectors], w[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (mine(v)) s[v] = V::load(x + vector(v) * N);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (weight && mine(v)) w[v] = V::load(weight + vector(v) * N);  // in flight during the reduction
  }
  float squares[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    squares[v] = mine(v) ? norm::sum_of_squares(s[v], 0.f) : 0.f;
  }
  const float rstd = rsqrtf(row_sum(squares, group, shared) * inverse_cols + eps);
  const norm::Scale scale(params);
  float amax[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    amax[v] = 0.f;
    if (!mine(v)) continue;
    s[v] = scale(s[v], w[v], rstd);
    amax[v] = max_magnitude(s[v], 0.f);
  }
  const auto quantize = [&](int v, float inverse) {
    if (mine(v)) store_fp8(s[v], inverse, out.format, out.q, row * out.cols + vector(v) * N);
  };
  if (out.group >= out.cols) {
#pragma unroll
    for (int v = 1; v < kVectors; ++v) amax[0] = max_nan(amax[0], amax[v]);
    const float q_scale = scale_of(group_max_nan(amax[0], group, maxima), out), inverse = inverse_of(q_scale);
    if (group.rank == 0 && count > 0) *scale_at(out, row, 0) = q_scale;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) quantize(v, inverse);
  } else {  // rows of more than one block of 128: of whole warps
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float q_scale = scale_of(warp_max_nan(amax[v], kLanes), out);
      if (mine(v) && vector(v) % kLanes == 0) *scale_at(out, row, vector(v) / kLanes) = q_scale;
      quantize(v, inverse_of(q_scale));
    }
  }
}

template <typename T>
RowPlan plan(const NormParams& params, bool few_rows) {
  const bool vector = all_rows_aligned<T>(norm::row_operands(params));
  return plan_norm(params.cols, sizeof(T), vector, /*residual=*/false, few_rows, /*centered=*/false);
}

}  // namespace

bool fp8_quantize_fuses_rms_norm(const NormParams& params, Dtype dtype) {
  bool fuses = false;
  (void)dispatch_dtype(dtype, [&](auto tag) {
    fuses = plan<typename decltype(tag)::type>(params, false).vectors > 0;
    return cudaSuccess;
  });
  return fuses;
}

cudaError_t rms_norm_fp8_quantize(const NormParams& params, const Fp8Output& out, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 || params.cols == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const RowPlan row = plan<T>(params, params.rows <= kFewRowsPerSm * device.sm_count);
    const LaunchShape shape{(params.rows + row.rows_per_block - 1) / row.rows_per_block,
                            dim3(row.threads_per_row, row.rows_per_block)};
    return dispatch_int<1, 2>(row.vectors, [&](auto vectors) {
      return launch(rms_norm_quantize_kernel<T, decltype(vectors)::value>, shape, stream, params, out,
                    1.f / static_cast<float>(params.cols));
    });
  });
}

}  // namespace llmk::kernels
