// Factors of float32 as sums of two of bfloat16, and sums of halves: the formulas of csrc/kernels/lora/lora.cu.
#include "cpu/lora.h"

#include "cpu/convert.h"

namespace llmk::cpu {
namespace {

inline BFloat16 to_bfloat16(float x) {
  return x == x ? narrow<BFloat16>(x) : BFloat16{0x7fc0};  // the low half of this NaN may be other than 0
}

}  // namespace

void lora_split(const LoraSplit& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* const source = params.source + row * params.source_stride;
    BFloat16* const first = static_cast<BFloat16*>(params.parts) + row * params.row_stride;
    BFloat16* const again = first + (3 - params.lower) * params.part_stride;
    BFloat16* const rest = first + params.lower * params.part_stride;
    for (int64_t col = 0; col < params.cols; ++col) {
      const float x = params.half ? params.factor * (source[col] + source[col + params.half]) : source[col];
      const BFloat16 upper = to_bfloat16(x);
      first[col] = again[col] = upper;
      rest[col] = to_bfloat16(x - widen(upper));
    }
  }
}

void lora_sum(const LoraSum& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* const source = params.source + row * params.source_stride;
    float* const sum = params.sum + row * params.cols;
    for (int64_t col = 0; col < params.cols; ++col) sum[col] = source[col] + source[col + params.half];
  }
}

}  // namespace llmk::cpu
