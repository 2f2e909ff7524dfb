// What lora_linear does between its matrix products, and add_adapters_, on the CPU: rows [begin, end) of a matrix.
#pragma once
#include <cstdint>

#include "params/lora.h"

namespace llmk::cpu {

void lora_split(const LoraSplit& params, int64_t begin, int64_t end);
void lora_adapters(const LoraAdapters& params, Dtype dtype, int64_t begin, int64_t end);
void lora_sum(const LoraSum& params, int64_t begin, int64_t end);

}  // namespace llmk::cpu
