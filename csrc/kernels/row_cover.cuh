// Rows of any alignment by the aligned vectors of memory that cover them.
//
//   memory   |. . . 0 1 2 3 4|5 6 7 8 9 . . .|    the two vectors, here of 8 elements, that cover a row of 10
//   element   0 1 2 3 4 5 6 7 0 1 2 3 4 5 6 7      element p of a vector is column p - shift of the first one; shift 3
//
// A vector is loaded whole, also where some of its elements are a neighbour's, as long as it lies in the tensor. What
// is not the row's is masked, and never stored: the two ends of a row go element by element. So a row costs what an
// aligned one does, and a few instructions for the ends.
//
// A sum over a row must not depend on where the row starts. Thread t of T has vectors t, t + T, ..., and an accumulator
// for each element p of a vector: those columns are t N + p - shift, and every T N-th one from there. That is the same
// class of columns wherever the row starts, in the same order, only held by another element, and for p < shift by
// the next thread. sum_covering() adds up each thread's classes, those of the next one included, in a fixed order.
//
// Operands of a row that start elsewhere in a vector than the one that says where the vectors are (kAlike = false) have
// theirs cut out of two, and are stored with the help of the next lane.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "device/reduce.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

// How a row of any alignment is split over whole warps that keep it in registers.
struct CoverPlan {
  int vectors;  // per thread; 0: rows of this length are not kept so
  int threads;  // per row
  int rows_per_block;

  LaunchShape shape(int64_t rows) const {
    return {(rows + rows_per_block - 1) / rows_per_block, dim3(threads, rows_per_block)};
  }
};

constexpr int kCoverThreads = 384, kCoverVectors = 5;  // at most
constexpr int64_t kLeastCover = 16;                    // vectors of a row: most of a warp that has fewer would be idle
constexpr int kCoverWarpRows = 4;                      // rows of a block, if a warp is enough for each

// The most vectors that cover a row, wherever it starts.
inline int64_t covering_vectors(int64_t cols, int width) { return (cols + 2 * width - 2) / width; }

// Of rows of `cols` elements: all vectors of a thread but the last `loose` ones are in the row, and what warps do takes
// least. What a warp does once for a row takes as long as three vectors. Blocks have a multiple of `warp_step` warps,
// as far as it costs nothing: softmax 8192x4095 takes 49.5 us by five warps, and 44.6 by six, maybe since one of the
// SM's four schedulers has two of the five.
inline CoverPlan plan_cover(int64_t cols, size_t element_bytes, int most_vectors = kCoverVectors,
                            int most_threads = kCoverThreads, int warp_step = 2, int loose = 2) {
  constexpr int kWarpCost = 3;
  const int width = static_cast<int>(16 / element_bytes);
  const int64_t most = covering_vectors(cols, width), least = (cols + width - 1) / width;
  CoverPlan plan{};
  if (least < kLeastCover) return plan;
  int64_t least_cost = 0;
  for (int vectors = most_vectors; vectors > 0; --vectors) {
    const int64_t warps = (most + 32 * vectors - 1) / (32 * vectors);
    const int64_t busy = warps == 1 ? 1 : (warps + warp_step - 1) / warp_step * warp_step;
    const int64_t cost = busy * (vectors + kWarpCost);
    if (warps * 32 > most_threads || (vectors - loose) * warps * 32 >= least) continue;
    if (plan.vectors == 0 || cost < least_cost) {
      plan.vectors = vectors, plan.threads = static_cast<int>(warps * 32), least_cost = cost;
    }
  }
  plan.rows_per_block = plan.threads == 32 ? kCoverWarpRows : 1;
  return plan;
}

// Whether the rows of all operands start at the same place of a vector, each row at its own. Strides are in elements.
template <typename T>
bool rows_alike(int64_t rows, std::initializer_list<RowOperand> operands) {
  const RowOperand* first = nullptr;
  for (const RowOperand& operand : operands) {
    if (!operand.pointer) continue;
    if (!first) first = &operand;
    const auto start = [](const RowOperand& of) { return reinterpret_cast<uintptr_t>(of.pointer) % 16; };
    if (start(operand) != start(*first)) return false;
    if (rows > 1 && (operand.stride - first->stride) % kVecWidth<T> != 0) return false;
  }
  return true;
}

// Where a tensor of rows begins and ends: between them everything may be loaded.
template <typename T>
struct Extent {
  const T *begin, *end;

  __host__ __device__ Extent(const void* data, int64_t rows, int64_t stride, int64_t cols)
      : begin(static_cast<const T*>(data)), end(begin + (rows - 1) * stride + cols) {}
};

// Numbers of the columns from c on: `value` for those outside of [0, cols).
template <int N>
__device__ void clear_outside(float (&numbers)[N], int c, int cols, float value) {
#pragma unroll
  for (int i = 0; i < N; ++i) numbers[i] = c + i >= 0 && c + i < cols ? numbers[i] : value;
}

// Which vectors may be loaded whole, of those that cover a row: those that lie in the tensor. Of a tensor there are at
// most two that do not.
template <typename T>
class Loadable {
  static constexpr int N = kVecWidth<T>;

 public:
  __device__ Loadable(const T* row, int shift, int cols, const Extent<T>& extent)
      : low_(row - shift < extent.begin ? 0 : -N),
        high_(static_cast<int>(min(static_cast<int64_t>(extent.end - row), static_cast<int64_t>(cols) + N))) {}
  __device__ bool first(int c) const { return c >= low_; }
  __device__ bool last(int c) const { return c + N <= high_; }
  __device__ bool operator()(int c) const { return first(c) && last(c); }

 private:
  int low_, high_;  // columns
};

// The kVectors vectors of a thread of those that cover a row, by plan_cover(): only the first of all vectors and the
// last kLoose of each thread's need not be whole, or may not exist, and so are asked for what is not the row's.
template <typename T, int kVectors, int kLoose = 2>
class Cover {
 public:
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;

  __device__ Cover(const T* row, int cols, const Group& group)
      : shift(misalignment(row)), cols(cols), first_(group.rank * N - shift), step_(group.threads * N) {
    const int warp = group.rank / 32 * 32;
    begins_ = warp == 0 && shift > 0;
    tail_ = (cols + shift) % N == 0 ? -1 : (cols + shift) / N - warp;
    warp_end_ = cols + shift - warp * N;
  }

  // The first column of vector v of the thread: before the row, maybe.
  __device__ int column(int v) const { return first_ + v * step_; }
  __device__ bool exists(int v) const { return v + kLoose < kVectors || column(v) < cols; }
  __device__ bool is_whole(int v) const {
    return (v > 0 || first_ >= 0) && (v + kLoose < kVectors || column(v) + N <= cols);
  }

  // Whether a lane of the warp has vector v.
  __device__ bool warp_has(int v) const { return v + kLoose < kVectors || v * step_ < warp_end_; }

  // Loads the vectors of a row that starts where this one does; what is not the row's is anything. (Vectors that may
  // not be loaded whole come last: no load waits for their elements.)
  __device__ void load(const T* row, const Extent<T>& extent, V (&vectors)[kVectors], uint64_t policy) const {
    const Loadable<T> loadable(row, shift, cols, extent);
    const auto may_load = [&](int v) {
      return (v > 0 || loadable.first(column(v))) && (v + kLoose < kVectors || loadable.last(column(v)));
    };
    Words words[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      words[v] = make_uint4(0, 0, 0, 0);
      if (may_load(v) && exists(v)) words[v] = words_of(V::load(row + column(v), policy));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v > 0 && v + kLoose < kVectors) continue;
      if (!may_load(v) && exists(v)) words[v] = words_of(load_elements(row, column(v), 0, cols));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v] = of_words<T>(words[v]);
  }
  // The same of a row that has others of its tensor around it, so that all of its vectors may be loaded.
  __device__ void load_inner(const T* row, V (&vectors)[kVectors], uint64_t policy) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (exists(v)) vectors[v] = V::load(row + column(v), policy);
    }
  }
  // `value` in place of what is not the row's: of a vector, or of the numbers that were made from it.
  __device__ void clear(V& vector, int v, float value) const {
    if (is_whole(v)) return;
    const T element = from_float<T>(value);
    const int c = column(v);
#pragma unroll
    for (int i = 0; i < N; ++i) vector.data[i] = c + i >= 0 && c + i < cols ? vector.data[i] : element;
  }
  __device__ void clear(float (&numbers)[N], int v, float value) const {
    if (!is_whole(v)) clear_outside(numbers, column(v), cols, value);
  }

  // Calls visit(lane) for each lane of the warp whose vector v lies in the row in part.
  template <typename Visit>
  __device__ void for_ends(int v, const Visit& visit) const {
    if (v == 0 && begins_) visit(0);
    const int tail = tail_ - v * (step_ / N);
    if (v + kLoose >= kVectors && tail_ >= 0 && tail >= 0 && tail < 32) visit(tail);
  }

  int shift, cols;  // elements of the first vector that lie before the row

 private:
  int first_, step_;
  int tail_;  // of the row's last vector, if only a part of it is the row's: its number from the warp's first one on
  int warp_end_;  // elements from the warp's first one to the end of the row
  bool begins_;
};

// Stores the part of a lane's vector that lies in the row, an element by each lane. `words`: the vector of the lane
// that calls it, `lane` the one whose vector it is, and `c` its first column.
template <typename Element, int kWords>
__device__ void store_end(const uint32_t (&words)[kWords], int lane, int c, Element* row, int cols) {
  constexpr int kPerWord = 4 / sizeof(Element);
  const int mine = threadIdx.x % 32;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint32_t of_lane = __shfl_sync(0xffffffffu, words[i], lane);
    if (mine / kPerWord == i) word = of_lane;
  }
  const int column = c + mine;
  if (mine < kWords * kPerWord && column >= 0 && column < cols) {
    row[column] = static_cast<Element>(word >> mine % kPerWord * 8 * sizeof(Element) % 32);
  }
}

// Loads the columns of the cover of another operand. kAlike: its row starts at the same place of a vector.
template <bool kAlike, typename T, int kVectors, int kLoose>
__device__ void load_beside(const Cover<T, kVectors, kLoose>& cover, const T* row, const Extent<T>& extent,
                            Vec<T, kVecWidth<T>> (&vectors)[kVectors], uint64_t policy) {
  if constexpr (kAlike) {
    cover.load(row, extent, vectors, policy);
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v] = load_shifted(row, cover.column(v), 0, cover.cols);
  }
}

// Stores the vector at column c of a row of `cols` elements, which may start anywhere. All lanes of a warp call it,
// each for the vector behind that of the lane before.
template <typename T, int N>
__device__ void store_elsewhere(const Vec<T, N>& vector, T* row, int c, int cols) {
  const auto store_elements = [&](int begin, int end) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (c + i >= begin && c + i < end) row[c + i] = vector.data[i];
    }
  };
  const int lane = threadIdx.x % 32, shift = misalignment(row + c);  // the same for all lanes
  const Words own = words_of(vector);
  Words next;
  next.x = __shfl_down_sync(0xffffffffu, own.x, 1);
  next.y = __shfl_down_sync(0xffffffffu, own.y, 1);
  next.z = __shfl_down_sync(0xffffffffu, own.z, 1);
  next.w = __shfl_down_sync(0xffffffffu, own.w, 1);
  if (shift == 0) return store_aligned(vector, row, c, 0, cols);
  const int ahead = N - shift, begin = c + ahead;  // where the target's next vector begins
  if (lane == 0) store_elements(max(c, 0), min(begin, cols));
  if (lane == 31) return store_elements(max(begin, 0), min(c + N, cols));
  store_aligned(cut(vector, of_words<T>(next), ahead), row, begin, 0, cols);
}

// Stores vector v of the cover to `row`. kAlike: it starts at the same place of a vector. All lanes of a warp call it.
template <bool kAlike, typename T, int kVectors, int kLoose, int N>
__device__ void store_covering(const Cover<T, kVectors, kLoose>& cover, const Vec<T, N>& vector, T* row, int v) {
  const int c = cover.column(v);
  if constexpr (kAlike) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    if (cover.is_whole(v)) vector.store(row + c);
    cover.for_ends(v, [&](int lane) {
      const Words own = words_of(vector);
      store_end<Bits>({own.x, own.y, own.z, own.w}, lane, c + (lane - static_cast<int>(threadIdx.x % 32)) * N,
                      reinterpret_cast<Bits*>(row), cover.cols);
    });
  } else {
    store_elsewhere(vector, row, c, cover.cols);
  }
}

// Calls body(std::integral_constant<int, shift>{}) for a shift of 0 to N - 1, a power of two.
template <int N, int kShift = 0, typename Body>
__device__ void with_shift(int shift, const Body& body) {
  if constexpr (N > 1) {
    if (shift & N / 2) return with_shift<N / 2, kShift + N / 2>(shift, body);
    return with_shift<N / 2, kShift>(shift, body);
  } else {
    body(std::integral_constant<int, kShift>{});
  }
}

// What a warp leaves of one value for the others of its group.
template <int N>
struct alignas(16) WarpSums {
  float firsts[N];    // what its first lane has of the last class of the warp before; then zeros
  float total, last;  // over its classes but the last; of that one, what its last lane has
};

// The sums over a row of which each thread has one for every element of its vectors; every thread gets them, behind one
// barrier. A class is begun by the thread that has all of it if the shift is 0, and ended by the next one. A group is
// whole warps. `shared` has kValues for each warp of the
// block; see group_sum() on alternating.
template <int kValues, int N, typename AnyGroup>
__device__ void sum_covering(const float (&of_elements)[kValues][N], int shift, float (&sums)[kValues],
                             const AnyGroup& group, WarpSums<N>* shared) {
  constexpr int kCount = kValues == 3 ? 4 : kValues, kLanes = 32 / kCount;  // so many lanes sum one of the values
  const unsigned rank = group.rank, threads = group.threads;  // unsigned, which divides by fewer instructions
  const unsigned lane = rank % 32, warp = rank / 32, warps = threads / 32;
  WarpSums<N>* const of_group = shared + group.index * warps * kValues;
  WarpSums<N>* const of_this = of_group + warp * kValues;
  float begun[kValues] = {}, all[kCount] = {};  // of the class that this thread begins, and of the one before
  with_shift<N>(shift, [&](auto constant) {
    constexpr int kShift = decltype(constant)::value;
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
#pragma unroll
      for (int p = kShift; p < N; ++p) begun[n] += of_elements[n][p];
      all[n] = __shfl_sync(0xffffffffu, begun[n], (lane + 31) % 32);
#pragma unroll
      for (int p = 0; p < kShift; ++p) all[n] += of_elements[n][p];
    }
    if (warps > 1 && lane == 0) {
#pragma unroll
      for (int n = 0; n < kValues; ++n) {
        auto* const firsts = reinterpret_cast<float4*>(of_this[n].firsts);
        const auto first = [&](int p) { return p < kShift ? of_elements[n][p] : 0.f; };
#pragma unroll
        for (int p = 0; p < N; p += 4) firsts[p / 4] = make_float4(first(p), first(p + 1), first(p + 2), first(p + 3));
      }
    }
  });
  if (warps > 1) {
#pragma unroll
    for (int n = 0; n < kValues; ++n) {
      if (lane == 31) of_this[n].last = begun[n];
      if (lane == 0) all[n] = 0.f;
    }
  }
  float total = warp_sum_each(all);
  if (warps > 1) {
    const unsigned value = lane / kLanes, from = lane % kLanes;
    if (from == 0 && value < kValues) of_this[value].total = total;
    group_barrier(group);
    // Every warp adds up what all of them have left.
    total = 0.f;
#pragma unroll 1
    for (unsigned w = from; w < warps && value < kValues; w += kLanes) {
      const WarpSums<N>& of_warp = of_group[w * kValues + value];
      const WarpSums<N>& next = of_group[(w + 1 < warps ? w + 1 : 0) * kValues + value];
      float last = of_warp.last;
#pragma unroll
      for (int p = 0; p < N; p += 4) {
        const float4 f = *reinterpret_cast<const float4*>(next.firsts + p);
        last = last + f.x + f.y + f.z + f.w;
      }
      total += of_warp.total + last;
    }
    __syncwarp();
    total = warp_sum(total, kLanes);
  }
#pragma unroll
  for (int n = 0; n < kValues; ++n) sums[n] = __shfl_sync(0xffffffffu, total, n * kLanes);
}

}  // namespace llmk::kernels
