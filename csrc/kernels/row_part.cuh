// Rows that are read more than once, for kernels that need a reduction of a row before they can write its first
// element.
//
// Long rows are split over the blocks of a cluster. Each block copies its part to shared memory once, by cp.async, and
// reads it there as often as it likes. A thread copies what it will read itself, so the copy needs no barrier:
//
//   row    |-- block 0 --|-- block 1 --|-- block 2 --|-- block 3 -|   a cluster
//   part   |t0|t1|..|tn|t0|t1|..|tn|..                                vectors of 16 bytes, thread by thread
//
// Rows that do not fit a cluster's shared memory, or whose vectors are not aligned, are read from global memory each
// time by one group of threads. How a row is split depends on its length, its alignment and the device alone, never on
// the number of rows.
#pragma once
#include <algorithm>

#include "device/cluster.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/launch.h"
#include "kernels/norm/plan.h"

namespace llmk::kernels {

struct RowSplit {
  int width;           // elements per access
  bool cached;         // whether the parts are kept in shared memory
  int cluster;         // blocks per row: 1 if it is not cached
  int64_t part;        // elements per block, but for the last ones
  int threads;         // per row and block
  int rows_per_block;  // 1 if it is cached
  size_t shared_bytes;

  int64_t blocks(int64_t rows) const { return (rows + rows_per_block - 1) / rows_per_block * cluster; }
  LaunchShape shape(int64_t rows) const {
    return {blocks(rows), dim3(threads, rows_per_block), shared_bytes, true, cluster};
  }
};

constexpr int64_t kPartBytes = 100 << 10;   // of shared memory: two blocks per SM, so that one loads while one writes
constexpr int64_t kAloneBytes = 200 << 10;  // one block per SM, which needs no cluster
constexpr int kCachedThreads = 512, kMaxCluster = 16;

// `operands` rows of `cols` elements are read; `vector`: all of them by 16-byte accesses. `most_alone`: a row of up to
// so many bytes is left to one block. Rows that would take a cluster of two, an H200, us:
//
//   case                              | kPartBytes | kAloneBytes
//   ----------------------------------|------------|------------
//   softmax 16384x32768 float32       | 1086       | 993
//   its backward 8192x32768 bfloat16  | 388        | 379
//   cross_entropy 8192x65536 bfloat16 | 641        | 667
inline RowSplit split_row(int64_t cols, size_t element_bytes, int operands, bool vector, const DeviceInfo& device,
                          int64_t most_alone, int most_threads = kCachedThreads) {
  const int width = vector ? static_cast<int>(16 / element_bytes) : 1;
  const int64_t count = cols / width, bytes = cols * static_cast<int64_t>(element_bytes) * operands;
  const int64_t room = static_cast<int64_t>(device.shared_bytes) - 1024;  // the reductions need some
  const int64_t most_of_part = std::min(kPartBytes, room);
  bool fits = bytes <= std::min(most_alone, room);
  int cluster = 1;
  while (!fits && cluster < kMaxCluster) {
    cluster *= 2;
    fits = bytes <= cluster * most_of_part;
  }
  if (vector && fits && (cluster == 1 || device.clusters[cluster] > 0)) {
    const int64_t part = (count + cluster - 1) / cluster;
    return {width,
            true,
            cluster,
            part * width,
            std::max(32, group_threads(part, 8, most_threads)),
            1,
            static_cast<size_t>(part) * 16 * operands};
  }
  const int threads = group_threads(count, 4, 1024);
  return {width, false, 1, cols, threads, std::max(1, 256 / threads), 0};
}

// The block's part of a row, for a thread of a group.
template <typename T, int N, bool kCached>
class RowPart {
 public:
  using V = Vec<T, N>;
  using Index = std::conditional_t<kCached, int, int64_t>;

  // Columns [begin, end) of the row; `cache` has room for them.
  __device__ RowPart(const T* row, Index begin, Index end, T* cache, const Group& group)
      : row_(row),
        cache_(cache - begin),
        first_(begin + group.rank * N),
        end_(end),
        step_(static_cast<Index>(group.threads) * N),
        chunk_(((end - begin + step_ - 1) / step_ + kChunks - 1) / kChunks * step_) {}

  // Begins to copy these parts, which are as long as each other, for for_each_arriving().
  template <typename... Parts>
  __device__ static void prefetch(uint64_t policy, const Parts&... parts) {
    if constexpr (kCached) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        (parts.copy(chunk, policy), ...);
        cp_async_commit();
      }
    }
  }
  __device__ V load(Index c) const { return V::load((kCached ? cache_ : row_) + c); }

  // Calls visit(column) for the first column of each of this thread's vectors.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
    for (Index c = first_; c < end_; c += step_) visit(c);
  }

  // The same, of a part that is being copied: the first vectors while the last are under way.
  template <typename Visit>
  __device__ void for_each_arriving(const Visit& visit) const {
    if constexpr (kCached) {
      for_chunks_from<0>(visit);
    } else {
      for_each(visit);
    }
  }

 private:
  static constexpr int kChunks = 4;  // that are waited for one by one

  template <int kFirst, typename Visit>
  __device__ void for_chunks_from(const Visit& visit) const {
    cp_async_wait<kChunks - 1 - kFirst>();
    for_chunk(kFirst, visit);
    if constexpr (kFirst + 1 < kChunks) for_chunks_from<kFirst + 1>(visit);
  }
  template <typename Visit>
  __device__ void for_chunk(int chunk, const Visit& visit) const {
    const Index end = min(end_, first_ + (chunk + 1) * chunk_);
    for (Index c = first_ + chunk * chunk_; c < end; c += step_) visit(c);
  }
  __device__ void copy(int chunk, uint64_t policy) const {
    for_chunk(chunk, [&](Index c) { cp_async_16(cache_ + c, row_ + c, 16, policy); });
  }

  const T* row_;
  T* cache_;  // of column 0
  Index first_, end_, step_, chunk_;
};

// Which row and which part of it a block of split_row() has.
struct RowPosition {
  Cluster cluster;
  Group group;
  int64_t row, begin, end;  // no columns where there is no such row

  __device__ RowPosition(const RowSplit& split, int64_t rows, int64_t cols)
      : cluster(Cluster::of(split.cluster, 0)),
        group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)},
        row(split.cached ? cluster.index : static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y),
        begin(min(cols, cluster.rank * split.part)),
        end(row < rows ? min(cols, begin + split.part) : begin) {}
};

}  // namespace llmk::kernels
