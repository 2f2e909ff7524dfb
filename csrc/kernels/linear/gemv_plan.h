// The launch plan of a linear for one token (gemv.cu). Plain host code.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/device_info.h"
#include "params/weight.h"

namespace llmk::kernels {

// A group of warps splits K into slices, at most gemv_max_slices(). A block has as many groups as make kGemvWarps warps
// of it: one warp waits long for its copies, for shared memory and for the sum over its lanes. us per token of models
// on an H200, batch 1, 512 tokens of context:
//
//   warps                | 1 group | 2 groups | 4 groups | 8 groups
//   ---------------------|---------|----------|----------|---------
//   Qwen2.5-0.5B: 2 each |         |      488 |      474 |      519
//   Llama-3.2-1B: 4 each |     712 |      684 |          |
//   SmolLM3-3B:   4 each |    1755 |     1697 |     1734 |
//   Phi-4-mini:   6 each |    2091 |     2049 |          |
//   Qwen2.5-7B:   7 each |    3403 |     3377 |          |
//   Llama-3.1-8B: 8 each |    3616 |     3652 |          |
constexpr int kGemvMaxSlices = 10, kGemvWarps = 8, kGemvMaxWarps = 14;
// Slices of four vectors are worth more warps than others: with eight vectors there is no room for a sum (gemv_adds),
// nor for two groups. 2048 x 11008 takes 12.5 us on an H200 so, by six slices of eight vectors 13.0; 4096 x 11008 23.3
// and 23.8; up to 14336 columns others take as long. A token of SmolLM3-3B takes 1644 us instead of 1659.
constexpr int gemv_max_slices(int vectors) { return vectors == 4 ? kGemvMaxWarps : kGemvMaxSlices; }
// Limits: a row of x must fit the registers, and the partial sums of an SM's rows the shared memory beside the ring.
constexpr int64_t kGemvMaxK = int64_t{kGemvMaxSlices} * 8 * 256, kGemvMaxRowsPerSm = 2048;
constexpr int kGemvMaxStages = 8;      // per warp
constexpr int kGemvHeaderBytes = 960;  // of shared memory, before the partial sums
// Of a block of decode attention (kSmallShared of its plan), with what the device keeps for itself.
constexpr int kGemvAttentionBytes = (64 + 1) * 1024;

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

// Rows of W in a stage: as many as make 4 KiB per warp of it. A power of two, for warp_sum_scatter().
constexpr int gemv_stage_rows(int vectors) { return 8 / vectors; }
template <int kVectors>
constexpr int kGemvStageRows = gemv_stage_rows(kVectors);  // for device code, which may call no host function

// Floats between the partial sums of two rows: one for each slice, in whole vectors of four.
constexpr int gemv_pitch(int slices) { return (slices + 3) / 4 * 4; }

struct GemvPlan {
  int blocks;
  int rows;                  // of W, of the block that has the most
  int vectors;               // of 8 elements, of a thread's slice of x: 2, 4 or 8
  int slices;                // of K, one for each warp of a group
  int groups;                // of warps, of a block
  int stages;                // per warp
  int stage_bytes;           // of all warps together
  int ring;                  // its offset in shared memory
  bool next_starts_at_once;  // the next kernel, and not only when the ring is full
  size_t shared_bytes;
};

// Whether x may be a sum that gemv computes (LinearParams::sum), for which it needs registers.
inline bool gemv_adds(const GemvPlan& plan) { return plan.vectors <= 4; }

inline GemvPlan plan_gemv(const Weight& weight, bool glu, bool before_attention, const DeviceInfo& device) {
  const auto divide_up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  const int out = static_cast<int>(glu ? weight.rows / 2 : weight.rows);
  GemvPlan plan{};
  plan.blocks = std::min(device.sm_count, out);
  const int columns = divide_up(out, plan.blocks);
  plan.rows = columns * (glu ? 2 : 1);
  plan.vectors = 2;
  while (weight.cols > plan.vectors * 256 * gemv_max_slices(plan.vectors)) plan.vectors *= 2;
  plan.slices = divide_up(weight.cols, plan.vectors * 256);
  const int stage_rows = gemv_stage_rows(plan.vectors);
  // With eight vectors, a warp has the registers of two. With fewer rows than a stage, more groups would save nothing.
  plan.groups =
      plan.vectors == 8 ? 1 : std::min({divide_up(kGemvWarps, plan.slices), divide_up(plan.rows, stage_rows), columns});
  const int warps = plan.slices * plan.groups, group_rows = divide_up(columns, plan.groups) * (glu ? 2 : 1);
  plan.stage_bytes = static_cast<int>(weight.bytes(warps * stage_rows * plan.vectors * 256));
  plan.ring = (kGemvHeaderBytes + gemv_pitch(plan.slices) * plan.rows * 4 + 127) / 128 * 128;
  // Where an SM has few weights to read, two blocks fit it, so that the next kernel may start early. Where it has more,
  // a deeper ring is worth more: 176 KiB rather than 144 take Llama-3.1-8B from 3653 to 3617 us per token on an H200,
  // SmolLM3-3B from 1729 to 1700. But q|k|v leave room for a block of the attention, which then starts early: that
  // takes Llama-3.1-8B from 3590 to 3571, Qwen2.5-7B from 3371 to 3330.
  const bool two_fit = plan.rows * weight.bytes(weight.cols) <= 150 * 1024;
  const int most = static_cast<int>(device.shared_bytes) - (before_attention ? kGemvAttentionBytes : 0) - plan.ring;
  const int ring_bytes = two_fit ? 112 * 1024 - plan.ring : std::min(176 * 1024, most);
  plan.stages = std::min({ring_bytes / plan.stage_bytes, divide_up(group_rows, stage_rows), kGemvMaxStages});
  plan.shared_bytes = static_cast<size_t>(plan.ring) + static_cast<size_t>(plan.stages) * plan.stage_bytes;
  // A small block that holds all its rows leaves the next kernel room to fill its ring. us of all linears of a token:
  //
  //   next kernel starts                    | at once | when the ring is full
  //   --------------------------------------|---------|----------------------
  //   Qwen2.5-0.5B                          |     284 |                   294
  //   Qwen2.5-1.5B                          |     701 |                   715
  //   SmolLM3-3B                            |    1367 |                  1366
  //   the same, blocks of up to 112 KiB too |    1382 |                  1366
  plan.next_starts_at_once = plan.shared_bytes <= 64 * 1024 && plan.stages * stage_rows >= group_rows;
  return plan;
}

}  // namespace llmk::kernels
