// Parameters of the sampling kernels, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

// One value per row on the device, or the same for every row.
template <typename T>
struct PerRow {
  const T* values;  // [rows], or null
  T value;          // where there are no values
};

struct SamplingParams {
  const void* logits;                // [rows, vocab]
  PerRow<float> temperature;         // not above 0: greedy
  PerRow<int32_t> top_k;             // not above 0: off
  PerRow<float> top_p;               // 1 and above: off
  PerRow<float> min_p;               // not above 0: off
  PerRow<float> repetition_penalty;  // 1, and not above 0: off
  uint8_t* seen;       // [rows, vocab], not 0 where the penalty applies; the drawn token is added; or null
  int64_t* rng_state;  // [2]: seed, offset; the offset is advanced by one
  int64_t* tokens;     // [rows], the result
  int64_t rows, vocab;
  int64_t logits_stride, seen_stride;  // between rows
};

}  // namespace llmk
