// The launch plan of a linear for one token (gemv.cu). Plain host code.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "params/weight.h"

namespace llmk::kernels {

constexpr int kGemvWarps = 10;  // of a block, at most
// Limits: a row of x must fit the registers, and the partial sums of an SM's rows the shared memory beside the ring.
constexpr int64_t kGemvMaxK = int64_t{kGemvWarps} * 8 * 256, kGemvMaxRowsPerSm = 2048;
constexpr int kGemvMaxStages = 8;      // per warp
constexpr int kGemvHeaderBytes = 768;  // of shared memory, before the partial sums

inline bool gemv_fits(int64_t n, int64_t k, int sm_count) {
  return k <= kGemvMaxK && n <= kGemvMaxRowsPerSm * sm_count;
}

// Whether gemv is faster than linear()'s own kernel for one token, which wins where many short rows leave gemv too few
// warps. Measured on an H200, weights of models of 0.5 to 8 billion parameters, in us; gemv wins all other cases:
//
//   case           |  gemv | linear
//   ---------------|-------|-------
//   151936 x 896   |    82 |   62.6
//   151936 x 1536  |   109 |    104
inline bool gemv_is_faster(int64_t n, int64_t k, int sm_count) {
  return gemv_fits(n, k, sm_count) && (k >= 2048 || n <= int64_t{128} * sm_count);
}

// Rows of W in a stage: as many as make 5 KiB per warp of it. Rows of up to 2560 elements take fewer, which more often
// divide what a block has. SmolLM3-3B on an H200, of the same weights, us per token, medians of six runs in turn:
//
//   rows per stage | 6    | 8    | 10
//   ---------------|------|------|-----
//   us             | 1764 | 1765 | 1784
constexpr int gemv_stage_rows(int vectors) { return vectors == 1 ? 8 : 10 / vectors; }
template <int kVectors>
constexpr int kGemvStageRows = gemv_stage_rows(kVectors);  // for device code, which may call no host function

struct GemvPlan {
  int blocks;
  int rows;         // of W, of the block that has the most
  int vectors;      // of 8 elements, of a thread's slice of x: 1, 2, 4 or 8
  int warps;        // of a block
  int stages;       // per warp
  int stage_bytes;  // of all warps together
  int ring;         // its offset in shared memory
  size_t shared_bytes;
};

inline GemvPlan plan_gemv(const Weight& weight, bool glu, int sm_count) {
  const auto divide_up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  const int out = static_cast<int>(glu ? weight.rows / 2 : weight.rows);
  GemvPlan plan{};
  plan.blocks = std::min(sm_count, out);
  plan.rows = divide_up(out, plan.blocks) * (glu ? 2 : 1);
  plan.vectors = 1;
  while (weight.cols > plan.vectors * 256 * kGemvWarps) plan.vectors *= 2;
  plan.warps = divide_up(weight.cols, plan.vectors * 256);
  const int stage_rows = gemv_stage_rows(plan.vectors);
  plan.stage_bytes = static_cast<int>(weight.bytes(plan.warps * stage_rows * plan.vectors * 256));
  plan.ring = (kGemvHeaderBytes + plan.warps * plan.rows * 4 + 127) / 128 * 128;
  // Where an SM has few weights to read, two blocks fit it, so that the next kernel may start early. Where it has more,
  // a deeper ring is worth more.
  const bool two_fit = plan.rows * weight.bytes(weight.cols) <= 150 * 1024;
  const int ring_bytes = two_fit ? 112 * 1024 - plan.ring : 144 * 1024;
  plan.stages = std::min({ring_bytes / plan.stage_bytes, divide_up(plan.rows, stage_rows), kGemvMaxStages});
  plan.shared_bytes = static_cast<size_t>(plan.ring) + static_cast<size_t>(plan.stages) * plan.stage_bytes;
  return plan;
}

}  // namespace llmk::kernels
