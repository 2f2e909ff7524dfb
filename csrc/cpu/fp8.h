// FP8 quantization and the parts of a product of FP8 matrices on the CPU. Every function computes a part, so that the
// caller can divide the work among threads; the result does not depend on how.
#pragma once
#include <cstdint>

#include "dtype.h"
#include "params/fp8.h"

namespace llmk::cpu {

// Rows [row_begin, row_end), with a scale per group of a row.
void fp8_quantize(const Fp8QuantizeParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);

// The same with the one scale that is in params.out.scale.
void fp8_quantize_tensor(const Fp8QuantizeParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);

// The largest magnitude of each row, NaN if there is one.
void fp8_amax(const Fp8QuantizeParams& params, Dtype dtype, float* amax, int64_t row_begin, int64_t row_end);

// `count` FP8 numbers as floats.
void fp8_widen(const void* source, Fp8Format format, int64_t count, float* target);

// Rows [row_begin, row_end) of y, which is of `dtype`.
void fp8_epilogue(const Fp8EpilogueParams& params, Dtype dtype, int64_t row_begin, int64_t row_end);

}  // namespace llmk::cpu
