// What a linear kernel is told, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstddef>
#include <cstdint>

#include "params/norm.h"

namespace llmk {

enum class LinearEpilogue { kNone, kSwiglu };

struct LinearParams {
  const void* x;            // [m, k]
  const void* norm_weight;  // [k], or null: the normalized x is not scaled
  const void* weight;       // [n, k]; with kSwiglu n / 2 rows of the gate, then n / 2 rows of the up projection
  const void* bias;         // [n], or null; not with kSwiglu
  void* residual;           // [m, n], or null: where the result is added in place of being written to y
  void* y;                  // [m, n], or [m, n / 2] with kSwiglu
  int64_t m, n, k;
  int64_t x_stride, weight_stride;
  int64_t y_stride;  // between the rows of y, or of the residual where there is one
  LinearEpilogue epilogue;
  bool normalize;       // apply RMSNorm to x first
  RmsNormOptions norm;  // how, if so
  void* workspace;      // linear_workspace_bytes(), 16-byte aligned

  // CUDA only: promises that both weights were complete before the kernel that precedes this one in the stream could
  // begin: see linear.cu.
  bool settled;
};

}  // namespace llmk
