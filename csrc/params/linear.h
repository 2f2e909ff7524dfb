// Parameters of the linear kernels. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

#include "params/epilogue.h"
#include "params/norm.h"
#include "params/weight.h"

namespace llmk {

struct LinearParams {
  const void* x;            // [m, k]
  const void* norm_weight;  // [k], or null: the normalized x is not scaled
  Weight weight;  // [n, k]; with a gated activation n / 2 rows of the gate, then n / 2 rows of the up projection
  Epilogue epilogue;
  int64_t m, x_stride;
  bool normalize;       // apply RMSNorm to x first
  RmsNormOptions norm;  // how, if so
  void* workspace;      // LinearRoute::workspace_bytes, 16-byte aligned

  // The norm hand-off, of up to kHandoffTokens tokens: a linear that adds to the residual does the work of the norm
  // that follows, for the linear after that norm. This saves the norm's launch. The first linear writes `scaled` and
  // `squares` (params/epilogue.h). The second one gets `scaled` as x, `squares`, and `parts` > 0.
  const float* squares;
  int parts;

  // The sum that x is, or null: sum->target = addend + alpha norm(sum->x), which the linear computes and writes. It
  // saves the launch of rms_norm_add_ behind a block whose output is normalized. For a route that does not say
  // `sum_first`.
  const NormParams* sum;

  // This is a launch of a decode step.
  //   - The weights may be read before the previous kernels of the stream have ended. The caller promises that none of
  //     those that may still run then writes them: see ptx.cuh. An optimizer or a kernel of PyTorch may, other ops not.
  //   - The kernel is taken wherever it exists up to 64 tokens, also where cuBLAS is faster: a graph of the library's
  //     own launches needs no stream capture (recorder.h). From 65 to 128 tokens K is split for a norm hand-off.
  bool in_step;

  int64_t n() const { return weight.rows; }
  int64_t k() const { return weight.cols; }
  int64_t columns() const { return epilogue.glu ? n() / 2 : n(); }  // of the result
};

}  // namespace llmk
