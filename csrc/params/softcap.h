// Parameters of the scale and softcap of logits, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

struct SoftcapParams {
  const void* x;  // [rows, cols]
  void* y;        // [rows, cols], contiguous
  int64_t rows, cols;
  int64_t x_stride;  // between rows
  double scale;      // of x
  double softcap;    // y = softcap tanh(scale x / softcap); 0: y = scale x
};

}  // namespace llmk
