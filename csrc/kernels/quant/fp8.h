#pragma once
#include <cuda_runtime_api.h>

#include "dtype.h"
#include "params/fp8.h"
#include "params/norm.h"

namespace llmk::kernels {

// One scale per group of a row.
cudaError_t fp8_quantize(const Fp8QuantizeParams& params, Dtype dtype, cudaStream_t stream);

// One scale for all elements of x. `partials` is a workspace of `count` floats, fp8_tensor_partials() of them.
cudaError_t fp8_tensor_partials(const Fp8QuantizeParams& params, int64_t& count);
cudaError_t fp8_quantize_tensor(const Fp8QuantizeParams& params, float* partials, int64_t count, Dtype dtype,
                                cudaStream_t stream);

// Whether one kernel computes silu(x) up, or the RMSNorm, and quantizes it: for a SwiGLU where rows are aligned to 16
// bytes, for a norm where they are, too, and up to kMaxRowVectors long.
bool fp8_quantize_fuses_swiglu(const Fp8QuantizeParams& params, Dtype dtype);
bool fp8_quantize_fuses_rms_norm(const NormParams& norm, Dtype dtype);

// One scale per group of a row of rms_norm(norm.x); norm.y is not written.
cudaError_t rms_norm_fp8_quantize(const NormParams& norm, const Fp8Output& out, Dtype dtype, cudaStream_t stream);

// `dtype` is that of y.
cudaError_t fp8_epilogue(const Fp8EpilogueParams& params, Dtype dtype, cudaStream_t stream);

}  // namespace llmk::kernels
