// Parameters of the linear kernels, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

#include "params/glu.h"
#include "params/norm.h"
#include "params/weight.h"

namespace llmk {

struct LinearParams {
  const void* x;            // [m, k]
  const void* norm_weight;  // [k], or null: the normalized x is not scaled
  Weight weight;            // [n, k]; with `glu` n / 2 rows of the gate, then n / 2 rows of the up projection
  const void* bias;         // [n], or null; not with `glu`
  void* residual;           // [m, n], or null: alpha times the result is added to it in place of being written to y
  double alpha;
  void* y;  // [m, n], or [m, n / 2] with `glu`
  int64_t m, x_stride;
  int64_t y_stride;               // between the rows of y, or of the residual where there is one
  std::optional<Activation> glu;  // y = act(gate) up
  bool normalize;                 // apply RMSNorm to x first
  RmsNormOptions norm;            // how, if so
  void* workspace;                // LinearRoute::workspace_bytes, 16-byte aligned

  // CUDA only: a linear that adds to the residual does the work of the norm that follows, for the linear after that
  // norm. This saves the norm's launch. The first linear writes
  //   `scaled` [m, n], contiguous: the new residual times (next_norm_weight [n] + next_offset)
  //   `squares` [parts + 1, 64]: for each token linear_parts() partial sums of squares of the new residual, then the
  //   scale that next_norm_weight was divided by (prologue.cuh)
  // The second linear gets `scaled` as x, `squares`, and `parts` > 0.
  const void* next_norm_weight;
  double next_offset;
  void* scaled;
  void* squares;
  int parts;

  // CUDA only: this is a launch of a decode step.
  //   - The weights may be read before the previous kernels of the stream have ended. The caller promises that none of
  //     those that may still run then writes them: see ptx.cuh. An optimizer or a kernel of PyTorch may, other ops not.
  //   - The kernel is taken wherever it exists, also where cuBLAS is faster: a graph of the library's own launches
  //     needs no stream capture (recorder.h).
  bool in_step;

  int64_t n() const { return weight.rows; }
  int64_t k() const { return weight.cols; }
  int64_t columns() const { return glu ? n() / 2 : n(); }  // of the result
};

}  // namespace llmk
