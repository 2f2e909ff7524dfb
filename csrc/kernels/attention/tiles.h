// Tile sizes and shared memory of attention over prompts. Plain host code.
#pragma once
#include <cstddef>

namespace llmk::kernels::flash {

// What a kernel has beside attention to whole sequences, each in an instance of its own: it takes registers, and code
// that the others would jump over. kScaled: scores that are scaled before their maximum is taken, as a softcap wants
// it. kBias and kPages have that, too, where it is asked for.
enum class Extra { kNone, kScaled, kBias, kPages };

// `kDim`: elements of a head, at least; those behind head_dim are zeros in shared memory.

// Of flash_attention.cuh.
template <int kDim>
struct Tile {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kQueries = kDim <= 128 ? 128 : 64, kKeys = kDim <= 128 ? 64 : 32;
  static constexpr int kRowTiles = kQueries / (16 * kWarps);  // of 16 queries, of a warp
  static constexpr size_t kSharedBytes = (kQueries + 2 * kKeys) * kDim * 2;
};

// Of flash_attention_sm90.cuh.
template <int kDim>
struct Sm90Tile {
  static constexpr int kQueries = 128, kKeys = kDim <= 128 ? 128 : 64;
  static constexpr int kThreads = 128 * 3, kStages = 2, kBoxes = kDim / 64;
  static constexpr int kQueryStages = kDim <= 192 ? 2 : 1;  // two, if there is room: the next work's arrive early
  static constexpr int kQueryBoxBytes = kQueries * 128, kKeyBoxBytes = kKeys * 128;  // in shared memory
  static constexpr int kQueryBytes = kBoxes * kQueryBoxBytes, kKeyBytes = kBoxes * kKeyBoxBytes;
  static constexpr int kBarrierBytes = 16 * (kQueryStages + 2 * kStages), kWorkBytes = 32;
  static constexpr size_t kSharedBytes =
      kQueryStages * (kQueryBytes + kWorkBytes) + 2 * kStages * kKeyBytes + kBarrierBytes + 1024;
};

// Of flash_attention_backward.cuh, within 99 KB of shared memory.
template <int kDim>
struct BackwardTile {
  static constexpr int kRows = kDim <= 128 ? 128 : 64, kColumns = kDim <= 128 ? 32 : 16;

  // Warps of the kernel of grad_q, and row tiles of 16 of each.
  static constexpr int kQueryRowTiles = kDim <= 128 ? 2 : 1, kQueryThreads = 32 * kRows / (16 * kQueryRowTiles);

  // Warps of the kernel of grad_k and grad_v. The sums of longer heads do not fit into the registers of a warp: one
  // half of the warps has those of grad_v then, and the other those of grad_k.
  static constexpr int kSums = kDim <= 128 ? 2 : 1, kKeyRowTiles = kDim <= 64 ? 2 : 1;
  static constexpr int kKeyThreads = 32 * kRows / (16 * kKeyRowTiles) * 2 / kSums;

  static constexpr int kRowElements = kRows * kDim, kColumnElements = kColumns * kDim;
  static constexpr size_t kQueryBytes = 2 * (2 * kRowElements + 4 * kColumnElements);
  static constexpr size_t kKeyBytes = kQueryBytes + 4 * kColumns * sizeof(float);
};

// Of flash_attention_backward_sm90.cuh.
template <int kDim>
struct Sm90Backward {
  static constexpr int kRows = 128, kColumns = 64, kStages = 4, kThreads = 128 * 3, kWarps = 8, kBoxes = kDim / 64;
  static constexpr int kRowBoxBytes = kRows * 128, kRowBytes = kBoxes * kRowBoxBytes;
  static constexpr int kColumnBoxBytes = kColumns * 128, kColumnBytes = kBoxes * kColumnBoxBytes;
  static constexpr int kStageBytes = 2 * kColumnBytes, kStatisticsBytes = 2 * kColumns * 4;
  // From a multiple of 1024 on: two operands of rows, the ring, statistics of columns, barriers.
  static constexpr int kRing = 2 * kRowBytes, kStatistics = kRing + kStages * kStageBytes;
  static constexpr int kBarriers = kStatistics + kStages * kStatisticsBytes;
  static constexpr size_t kSharedBytes = 1024 + kBarriers + 8 + 16 * kStages;
};

}  // namespace llmk::kernels::flash
