// How an RMSNorm row is spread over threads. Plain host code, so that Python can ask for it too.
//
// The kernel, and with it the order in which a row is summed, depends on the row alone (length, element size,
// alignment), never on how many rows there are: that makes a row's bits independent of its batch. How many threads
// share a row may differ, since row_sum() gives the same bits for any number of them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace llmk::kernels {

struct RowPlan {
  int width;            // elements per access
  int vectors;          // per thread, kept in registers; 0: too long for that, the row is read twice
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
constexpr int64_t kFewRowsPerSm = 2;      // up to here the time of one row counts, not the rate
constexpr int64_t kMaxRowVectors = 2048;  // two per thread of a block

// `vector`: the row can be moved by 16-byte accesses. With few rows, a row is spread as wide as possible; with many,
// two vectors per thread keep enough loads in flight (a residual is a second load, and makes up for one of them).
inline RowPlan plan_rms_norm(int64_t cols, size_t element_bytes, bool vector, bool residual, bool few_rows) {
  constexpr int kNarrow = 128, kBlockThreads = 256, kMaxThreads = 1024;
  RowPlan plan{1, 0, 0, 1};
  if (vector) {
    plan.width = static_cast<int>(16 / element_bytes);
    const int64_t count = cols / plan.width;
    const bool one = count <= kMaxThreads && (residual || few_rows || count <= kNarrow);
    if (count <= kMaxRowVectors) plan.vectors = one ? 1 : 2;
    if (plan.vectors > 0) plan.threads_per_row = group_threads(count, plan.vectors, kMaxThreads);
  }
  if (plan.vectors == 0) plan.threads_per_row = group_threads(cols / plan.width, 4, kMaxThreads);
  if (plan.vectors < 2) plan.rows_per_block = std::max(1, kBlockThreads / plan.threads_per_row);
  return plan;
}

}  // namespace llmk::kernels
