// Sizes of decode_attention: what a block has in shared memory, and where.
#pragma once
#include <cuda_runtime.h>

namespace llmk::kernels {

constexpr int kWarps = 4;  // of a block that compute; on sm_90 and later one more copies
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 16;              // keys that a warp takes at once
constexpr int kUnit = kWarps * kTile;  // keys of a unit of work, which a block takes at once

// A ring of slots, each for the keys or the values of a unit. A slot holds, one after another, all keys' columns 0 to
// 63, then 64 to 127, ...: rows of 128 bytes, in which 16-byte units are swizzled (exclusive-or the row's number modulo
// 8), as tensor maps have it, so that eight rows meet all banks.
constexpr int kChunkColumns = 64, kChunkBytes = kUnit * kChunkColumns * 2;
__host__ __device__ constexpr int chunks_of_head(int head_dim) {
  return (head_dim + kChunkColumns - 1) / kChunkColumns;
}
__host__ __device__ constexpr int slot_bytes(int head_dim) { return chunks_of_head(head_dim) * kChunkBytes; }

constexpr int kCopySlots = 4;  // before sm_90, see ring_copy.cuh

// What is a compile-time constant since registers depend on it. kColumns: tiles of 8 queries.
template <typename Element, int kHeadDim, int kColumns>
struct Shape {
  using T = Element;
  static constexpr int D = kHeadDim, kTilesOfColumns = kColumns, kQueries = 8 * kColumns;
  static constexpr int kChunks = chunks_of_head(D), kSlot = slot_bytes(D);
  static constexpr int kVectors = D / 8;   // of 16 bytes, per row
  static constexpr int kRow = D * 2 + 16;  // of a query: an odd number of vectors, so that 8 rows meet all banks
  static constexpr int kSumRow = D + 4;    // floats; 4 of padding, again for the banks
  static constexpr int kBlocks = D * kColumns <= 128 ? 2 : 1;  // that an SM has registers for
};

// Offsets in bytes; the ring is at 0.
struct Layout {
  int q;                       // the queries of a pair
  int fresh;                   // the new key, then the new value
  int sums, softmaxes;         // of each warp and query
  int parts, part_softmaxes;   // of each block of the cluster, for the queries that this block finishes
  int full, empty;             // barriers of the slots
  int parts_full, parts_free;  // and of the parts
  int verdict;                 // a word for all warps
  int bytes;

  __host__ __device__ constexpr Layout(int head_dim, int queries, int slots, int cluster)
      : q(slots * slot_bytes(head_dim)),
        fresh(q + queries * (head_dim * 2 + 16)),
        sums(fresh + 2 * (head_dim * 2 + 16)),
        softmaxes(sums + kWarps * queries * (head_dim + 4) * 4),
        parts(softmaxes + kWarps * queries * 8),
        part_softmaxes(parts + (cluster > queries ? cluster : queries) * (head_dim + 4) * 4),
        full(part_softmaxes + (cluster > queries ? cluster : queries) * 8),
        empty(full + slots * 8),
        parts_full(empty + slots * 8),
        parts_free(parts_full + 8),
        verdict(parts_free + 8),
        bytes(verdict + 16) {}
};

}  // namespace llmk::kernels
