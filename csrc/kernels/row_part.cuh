// Rows that are read more than once, for kernels that need a reduction of a row before they can write its first
// element.
//
// Long rows are split over the blocks of a cluster. Each block copies its part to shared memory once, by cp.async, and
// reads it there as often as it likes. A thread copies what it will read itself, so the copy needs no barrier:
//
//   row    |-- block 0 --|-- block 1 --|-- block 2 --|-- block 3 -|   a cluster
//   part   |t0|t1|..|tn|t0|t1|..|tn|..                                vectors of 16 bytes, thread by thread
//
// Rows that are not aligned lie in shared memory as they lie in global memory, and a thread has the vectors that it has
// copied (row_cover.cuh). Norms, whose parameters lie otherwise, have their own vectors cut out of what a thread and
// its neighbours have copied, behind a barrier (shifted.cuh).
//
// Rows that do not fit a cluster's shared memory, or are short and not aligned, are read from global memory each time
// by one group of threads. How a row is split depends on its length, its alignment and the device alone, never on the
// number of rows, and the order of a sum not on where a row starts, once it is split. (Norms and softmax keep most rows
// that are not aligned in registers: row_cover.cuh.)
#pragma once
#include <algorithm>

#include "device/cluster.cuh"
#include "device/reduce.cuh"
#include "device/sector.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "kernels/launch.h"
#include "kernels/norm/plan.h"
#include "kernels/row_cover.cuh"

namespace llmk::kernels {

// Where the parts of a row are kept.
enum class RowPlace {
  kGlobal,   // nowhere: they are read each time
  kShared,   // in shared memory
  kShifted,  // the same, of a row that need not be aligned: its own vectors
  kCovered,  // or those that cover it
};

struct RowSplit {
  int width;           // elements per access
  RowPlace place;      // where its parts are kept
  int cluster;         // blocks per row: 1 in global memory
  int64_t part;        // elements per block, but for the last ones
  int64_t room;        // elements of shared memory for a part of one operand
  int threads;         // per row and block
  int rows_per_block;  // 1 for an aligned row in shared memory
  size_t shared_bytes;
  bool alike = false;  // all operands start at the same place of a vector, in each row

  int64_t blocks(int64_t rows) const { return (rows + rows_per_block - 1) / rows_per_block * cluster; }
  LaunchShape shape(int64_t rows) const {
    return {blocks(rows), dim3(threads, rows_per_block), shared_bytes, true, cluster};
  }
};

constexpr int64_t kPartBytes = 100 << 10;   // of shared memory: two blocks per SM, so that one loads while one writes
constexpr int64_t kAloneBytes = 200 << 10;  // one block per SM, which needs no cluster
constexpr int kCachedThreads = 512, kMaxCluster = 16;
// Rows that are not aligned: vectors of one, at least, and threads of a block that has several.
constexpr int64_t kLeastShifted = 32;
constexpr int kShiftedThreads = 128;
// Vectors of room around a part: one in front and two behind, for vectors that are cut out at its ends, and one since
// it may cover one more than it has. (Of kCovered, only one behind is read: the other is for vectors_to_sector().)
constexpr int64_t kShiftedMargin = 4;
// What kernels that keep rows declare of shared memory for their reductions, at most.
constexpr int64_t kReductionBytes = 1024;

// `operands` rows of `cols` elements are read; `vector`: all of them by 16-byte accesses. `most_alone`: a row of up to
// so many bytes is left to one block, a longer one to a cluster of up to `most_blocks`. Rows that would take a cluster
// of two, an H200, us:
//
//   case                              | kPartBytes | kAloneBytes
//   ----------------------------------|------------|------------
//   softmax 16384x32768 float32       | 1086       | 993
//   its backward 8192x32768 bfloat16  | 388        | 379
//   cross_entropy 8192x65536 bfloat16 | 641        | 667
inline RowSplit split_row(int64_t cols, size_t element_bytes, int operands, bool vector, const DeviceInfo& device,
                          int64_t most_alone, int most_threads = kCachedThreads, int most_blocks = kMaxCluster) {
  const int widest = static_cast<int>(16 / element_bytes);
  const int64_t count = (cols + widest - 1) / widest, bytes = cols * static_cast<int64_t>(element_bytes) * operands;
  const int64_t margins = (kShiftedMargin + 1) * 16 * operands;  // and what fills a vector
  const int64_t room = static_cast<int64_t>(device.shared_bytes) - kReductionBytes - margins;
  const int64_t most_of_part = std::min(kPartBytes, room);
  bool fits = bytes <= std::min(most_alone, room);
  int cluster = 1;
  while (!fits && cluster < most_blocks) {
    cluster *= 2;
    fits = bytes <= cluster * most_of_part;
  }
  if ((vector || count >= kLeastShifted) && fits && (cluster == 1 || device.clusters[cluster] > 0)) {
    const int64_t part = (count + cluster - 1) / cluster, of_operand = vector ? part : part + kShiftedMargin;
    const int needed = group_threads(part, 8, most_threads), nearest = static_cast<int>((part / 8 + 16) / 32 * 32);
    const int threads = std::max(32, vector ? needed : std::min(needed, nearest));
    const int rows = vector || cluster > 1 ? 1 : std::max(1, kShiftedThreads / threads);
    return {widest,
            vector ? RowPlace::kShared : RowPlace::kShifted,
            cluster,
            part * widest,
            of_operand * widest,
            threads,
            rows,
            static_cast<size_t>(of_operand) * 16 * operands * rows};
  }
  const int width = vector ? widest : 1;
  const int threads = group_threads(cols / width, 4, 1024);
  return {width, RowPlace::kGlobal, 1, cols, 0, threads, std::max(1, 256 / threads), 0};
}

// Calls body(width, place), as constants, for the width and the place of rows of T, by the vectors that cover them
// where they are not aligned.
template <typename T, typename Body>
cudaError_t dispatch_split(const RowSplit& split, Body&& body) {
  using Place = RowPlace;
  const auto wide = [&](auto place) { return body(std::integral_constant<int, kVecWidth<T>>{}, place); };
  if (split.place == Place::kShared) return wide(std::integral_constant<Place, Place::kShared>{});
  if (split.place == Place::kShifted) return wide(std::integral_constant<Place, Place::kCovered>{});
  const std::integral_constant<Place, Place::kGlobal> global;
  return split.width > 1 ? wide(global) : body(std::integral_constant<int, 1>{}, global);
}

// Which row and which part of it a block of split_row() has.
struct RowPosition {
  Cluster cluster;
  Group group;
  int64_t row, begin, end;  // no columns where there is no such row

  __device__ RowPosition(const RowSplit& split, int64_t rows, int64_t cols)
      : cluster(Cluster::of(split.cluster, 0)),
        group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)},
        row(static_cast<int64_t>(cluster.index) * blockDim.y + threadIdx.y),
        begin(min(cols, cluster.rank * split.part)),
        end(row < rows ? min(cols, begin + split.part) : begin) {}
};

// The block's part of a row, for a thread of a group.
template <typename T, int N, RowPlace kPlace>
class RowPart {
  static constexpr bool kCached = kPlace == RowPlace::kShared;

 public:
  using V = Vec<T, N>;
  using Index = std::conditional_t<kCached, int, int64_t>;

  // `row` is that of an operand, of which there are several in `cache`.
  __device__ RowPart(const T* row, const RowPosition& at, const RowSplit& split, int4* cache, const Extent<T>&,
                     int operand = 0)
      : row_(row),
        cache_(reinterpret_cast<T*>(cache) + operand * split.room - at.begin),
        first_(at.begin + at.group.rank * N),
        end_(at.end),
        step_(static_cast<Index>(at.group.threads) * N),
        chunk_(((end_ - static_cast<Index>(at.begin) + step_ - 1) / step_ + kChunks - 1) / kChunks * step_) {}

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
  // `wanted`: whether this row is; all groups of a block call it, to go in step.
  template <typename Visit>
  __device__ void for_each_arriving(const Visit& visit, bool wanted = true) const {
    if (!wanted) return;
    if constexpr (kCached) {
      for_chunks_from<0>(visit);
    } else {
      for_each(visit);
    }
  }

  // Stores make(column) to each of this thread's vectors of `target`, a row of the same length.
  template <typename Make>
  __device__ void store_each(T* target, const Make& make) const {
    for_each([&](Index c) { make(c).store(target + c); });
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

// Stores make(c) to columns [begin, end) of `target`, by its aligned vectors, whose columns may be others than a
// part's: make() gets some outside of the row, too.
template <typename T, typename Make>
__device__ void store_to_aligned(T* target, int begin, int end, const Group& group, const Make& make) {
  constexpr int N = kVecWidth<T>;
  const int from = begin - misalignment(target + begin), count = (end - from + N - 1) / N;
  // Two at a time, since what makes the second can not be loaded behind the store of the first.
  for (int v = group.rank; v < count; v += 2 * group.threads) {
    const int c = from + v * N, next = from + (v + group.threads) * N;
    const bool both = next < end;
    const auto first = make(c), second = both ? make(next) : Vec<T, N>{};
    store_aligned(first, target, c, begin, end);
    if (both) store_aligned(second, target, next, begin, end);
  }
}

// The same for a row of any alignment, in shared memory. What a vector has behind the end of the row is 0.
template <typename T, int N>
class RowPart<T, N, RowPlace::kShifted> {
 public:
  using V = Vec<T, N>;

  __device__ RowPart(const T* row, const RowPosition& at, const RowSplit& split, int4* cache, int operand = 0)
      : part_(row + at.begin),
        cache_(reinterpret_cast<V*>(cache) + (operand * split.rows_per_block + at.group.index) * (split.room / N)),
        begin_(static_cast<int>(at.begin)),
        end_(static_cast<int>(at.end)),
        shift_(misalignment(part_)),
        group_(at.group),
        chunk_((vectors(begin_) + kChunks * group_.threads - 1) / (kChunks * group_.threads) * group_.threads) {}

  template <typename... Parts>
  __device__ static void prefetch(uint64_t policy, const Parts&... parts) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      (parts.copy(chunk, policy), ...);
      cp_async_commit();
    }
    (parts.copy_ends(), ...);
  }
  // At any column that is not N or more from the part.
  __device__ V load(int c) const {
    const unsigned element = N + shift_ + c - begin_;
    const V* const low = cache_ + element / N;
    return element % N == 0 ? low[0] : cut(low[0], low[1], element % N);
  }
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
    for (int v = group_.rank; v < vectors(begin_); v += group_.threads) visit(begin_ + v * N);
  }
  template <typename Visit>
  __device__ void for_each_arriving(const Visit& visit, bool wanted = true) const {
    for_chunks_from<0>(visit, wanted);
  }
  template <typename Make>
  __device__ void store_each(T* target, const Make& make) const {
    store_to_aligned<T>(target, begin_, end_, group_, make);
  }

 private:
  static constexpr int kChunks = 4;

  // How many there are from a column on, which may be before the row.
  __device__ int vectors(int from) const { return (end_ - from + N - 1) / N; }

  template <int kFirst, typename Visit>
  __device__ void for_chunks_from(const Visit& visit, bool wanted) const {
    cp_async_wait<kChunks - 1 - kFirst>();
    group_barrier(group_);
    if (wanted) for_chunk(kFirst, visit);
    if constexpr (kFirst + 1 < kChunks) for_chunks_from<kFirst + 1>(visit, wanted);
  }
  template <typename Visit>
  __device__ void for_chunk(int chunk, const Visit& visit) const {
    const int end = min(vectors(begin_), (chunk + 1) * chunk_);
    for (int v = chunk * chunk_ + group_.rank; v < end; v += group_.threads) visit(begin_ + v * N);
  }
  // Copies the last of the aligned vectors that a vector of the chunk is cut out of: the others are those of its
  // neighbour, in this chunk or an earlier one, and the ends of the row.
  __device__ void copy(int chunk, uint64_t policy) const {
    for_chunk(chunk, [&](int c) {
      const int copied = c + (shift_ == 0 ? 0 : N - shift_);
      if (copied + N <= end_)
        cp_async_16(cache_ + (N + shift_ + copied - begin_) / N, part_ + copied - begin_, 16, policy);
    });
  }
  // The head and the tail, of less than a vector each, and zeros behind the end. (cp.async can copy a part of a vector,
  // too, but memcheck takes that for an access of all of it.)
  __device__ void copy_ends() const {
    const int length = end_ - begin_, rank = group_.rank, end = shift_ + length, tail = end / N * N;
    T* const elements = reinterpret_cast<T*>(cache_ + 1);  // column begin_ + c is element shift_ + c
    const auto element = [&](int e) { return e < end ? part_[e - shift_] : from_float<T>(0.f); };
    const bool of_head = shift_ > 0 && shift_ + rank < N;
    const bool of_tail = tail < end && (tail > 0 || shift_ == 0) && rank < N;
    T first, last;  // both are under way before the first is stored
    if (of_head) first = element(shift_ + rank);
    if (of_tail) last = element(tail + rank);
    if (of_head) elements[shift_ + rank] = first;
    if (of_tail) elements[tail + rank] = last;
    if (rank < 2) cache_[1 + (end + N - 1) / N + rank] = V::of([](int) { return 0.f; });
  }

  const T* part_;
  V* cache_;  // a vector of margin, then the aligned ones that the part covers
  int begin_, end_, shift_;
  Group group_;
  int chunk_;
};

// The same for a row of any alignment, as it lies in memory (row_cover.cuh). The columns c of its vectors may begin in
// front of the part and end behind it: see is_whole().
template <typename T, int N>
class RowPart<T, N, RowPlace::kCovered> {
 public:
  using V = Vec<T, N>;

  // `extent`: of the operand.
  __device__ RowPart(const T* row, const RowPosition& at, const RowSplit& split, int4* cache, const Extent<T>& extent,
                     int operand = 0)
      : part_(row + at.begin),
        cache_(in_cache(part_, cache + (operand * split.rows_per_block + at.group.index) * (split.room / N) + 1)),
        begin_(static_cast<int>(at.begin)),
        cols_(static_cast<int>(at.end - at.begin)),
        shift_(misalignment(part_)),
        count_(cols_ > 0 ? (cols_ + shift_ + N - 1) / N : 0),
        group_(at.group),
        loadable_(part_, shift_, cols_, extent),
        alike_(split.alike) {}

  template <typename... Parts>
  __device__ static void prefetch(uint64_t policy, const Parts&... parts) {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      (parts.copy(chunk, policy), ...);
      cp_async_commit();
    }
  }
  // At any column that is not N or more from the part.
  __device__ V load(int c) const {
    const unsigned element = N + shift_ + c - begin_;
    const V* const low = cache_ - 1 + element / N;
    return element % N == 0 ? low[0] : cut(low[0], low[1], element % N);
  }
  // Numbers of the columns from c on: `value` for those that are not the part's.
  __device__ void clear(float (&numbers)[N], int c, float value) const {
    const int column = c - begin_;
    if (column < 0 || column + N > cols_) clear_outside(numbers, column, cols_, value);
  }
  // Of the first vector, the elements in front of the part: see sum_covering().
  __device__ int shift() const { return shift_; }

  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll 2
    for (int v = group_.rank; v < count_; v += group_.threads) visit(column(v));
  }
  template <typename Visit>
  __device__ void for_each_arriving(const Visit& visit, bool wanted = true) const {
    if (!alike_) {  // what is loaded beside or stored is cut out of what other threads have copied
      cp_async_wait<0>();
      group_barrier(group_);
    }
    if (!wanted) return;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk == 0) cp_async_wait<3>();
      if (chunk == 1) cp_async_wait<2>();
      if (chunk == 2) cp_async_wait<1>();
      if (chunk == 3) cp_async_wait<0>();
      for_chunk(chunk, [&](int v) { visit(column(v)); });
    }
  }
  template <typename Make>
  __device__ void store_each(T* target, const Make& make) const {
    store_to_aligned<T>(target, begin_, begin_ + cols_, group_, make);
  }

 private:
  static constexpr int kChunks = 4;

  // Of the row, where vector v of the part begins.
  __device__ int column(int v) const { return begin_ - shift_ + v * N; }

  template <typename Visit>
  __device__ void for_chunk(int chunk, const Visit& visit) const {
    const int step = group_.threads, size = (count_ + kChunks * step - 1) / (kChunks * step) * step;
    const int end = min(count_, (chunk + 1) * size);
#pragma unroll 2
    for (int v = chunk * size + group_.rank; v < end; v += step) visit(v);
  }
  __device__ void copy(int chunk, uint64_t policy) const {
    for_chunk(chunk, [&](int v) {
      const int c = v * N - shift_;
      if (loadable_(c)) {
        cp_async_16(cache_ + v, part_ + c, 16, policy);
      } else {
        cache_[v] = load_elements(part_, c, 0, cols_);
      }
    });
  }

  // kShared does not do this: it gained 2 to 5 % where rows begin in the middle of a sector, and lost as much
  // elsewhere.
  __device__ static V* in_cache(const T* part, int4* room) {
    return reinterpret_cast<V*>(room + vectors_to_sector(room, part));
  }

  const T* part_;
  V* cache_;  // the vectors that cover the part; one of margin before them, and some behind
  int begin_, cols_, shift_, count_;
  Group group_;
  Loadable<T> loadable_;
  bool alike_;
};

}  // namespace llmk::kernels
