// Parameters of the cross-entropy kernels, on either device. Strides count elements; columns are contiguous. "wide" is
// float32, or float64 for float64.
#pragma once
#include <cstdint>

namespace llmk {

struct CrossEntropyOptions {
  int64_t ignore_index;     // rows with this target have neither loss nor gradient
  double label_smoothing;   // the share of the loss that is a mean over all classes
  double lse_square_scale;  // of the squared log-sum-exp, which is added to the loss (z-loss)
  double softcap;           // logits are softcap tanh(logits / softcap); 0: as they are
};

struct CrossEntropyParams {
  const void* logits;     // [rows, vocab]
  const int64_t* target;  // [rows]
  const void* weight;     // [vocab], wide, or null: 1 for each class
  const void* sums;  // [2], wide: what the gradient is divided by, and the sum of the class weights; null: 1, vocab
  void* losses;      // [rows], wide; in the backward null
  void* lse;         // [rows], wide; read in the backward
  const void* grad_loss;  // in the backward: wide
  void* grad;             // [rows, vocab], or null when it is not wanted; the memory of the logits, or other memory
  int64_t rows, vocab;
  int64_t logits_stride, grad_stride;  // between rows
  int64_t grad_loss_stride;            // 0: one for all rows
  bool grad_is_of_one;  // in the backward: grad has the gradient for a grad_loss of 1, and stays where that is 1
  CrossEntropyOptions options;
};

// grad *= grad_loss, where that is not 1.
struct CrossEntropyScaleParams {
  void* grad;             // [rows, vocab], contiguous
  const void* grad_loss;  // wide
  int64_t rows, vocab;
  int64_t grad_loss_stride;  // 0: one for all rows
};

}  // namespace llmk
