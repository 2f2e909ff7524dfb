// The launch plan of RMSNorm and LayerNorm: how a row is split over threads. Plain host code, which Python can call.
//
// The kernel, and with it the order of summation, depends on the row alone (length, element size, alignment), never on
// the number of rows: the result of a row is bitwise independent of its batch. The number of threads per row may
// differ, since row_sum() gives the same bits for any of them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmk::kernels {

struct RowPlan {
  int width;            // elements per access
  int vectors;          // per thread, kept in registers; 0: the row is too long for that and is read twice
  int threads_per_row;  // a power of two up to 32, or whole warps
  int rows_per_block;

  int threads() const { return threads_per_row * rows_per_block; }
};

// The smallest group that gives each thread at most `vectors` of `count` vectors.
inline int group_threads(int64_t count, int vectors, int most) {
  const int64_t needed = count / vectors + (count % vectors != 0);
  if (needed > most) return most;
  if (needed > 32) return static_cast<int>((needed + 31) / 32 * 32);
  int threads = 1;
  while (threads < needed) threads *= 2;
  return threads;
}

constexpr int kMaxRowsPerBlock = 8;       // of rows that take whole warps
constexpr int64_t kFewRowsPerSm = 2;      // up to this many latency counts, beyond it throughput
constexpr int64_t kMaxRowVectors = 2048;  // two per thread of a block
constexpr int kNarrowRow = 128;           // vectors of a row of which a thread has one

// `vector`: rows can be moved by 16-byte accesses. With few rows, a row takes as many threads as possible. With many,
// two vectors per thread keep enough loads in flight; with a residual, which is a second load, one is enough. Centered,
// there is more to do per thread and reduction: four.
inline RowPlan plan_norm(int64_t cols, size_t element_bytes, bool vector, bool residual, bool few_rows, bool centered) {
  constexpr int kBlockThreads = 256, kMaxThreads = 1024;
  RowPlan plan{1, 0, 0, 1};
  if (vector) {
    plan.width = static_cast<int>(16 / element_bytes);
    const int64_t count = cols / plan.width;
    const bool one = count <= kMaxThreads && (residual || few_rows || count <= kNarrowRow);
    if (count <= kMaxRowVectors) plan.vectors = one ? 1 : centered ? 4 : 2;
    if (plan.vectors > 0) plan.threads_per_row = group_threads(count, plan.vectors, kMaxThreads);
  }
  if (plan.vectors == 0) plan.threads_per_row = group_threads(cols / plan.width, 4, kMaxThreads);
  if (plan.vectors < 2) plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  return plan;
}

}  // namespace llmk::kernels
