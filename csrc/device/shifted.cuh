// Vectors of rows of any alignment.
//
// A row is covered by the aligned vectors of memory, of which the first and the last may belong to it in part:
//
//   memory   |. . . . 0 1 2 3|4 5 6 7 8 9 . .|              aligned vectors, here of 8 elements, of a row of 10
//   row               |0 1 2 3 4 5 6 7|8 9 - - - - - -|     its own vectors: column c is element c % 8 of number c / 8
//
// What lies inside is moved by accesses of 16 bytes, the two ends element by element, and nothing outside is touched.
// A vector at any column is cut out of two aligned ones. So a sum over a row adds up the row's own vectors, in an order
// that does not depend on where the row starts. What is computed element by element takes the aligned vectors of its
// result, each of which is one store.
//
// Stores are not the mirror image of loads: stores of single elements take as many transactions of the L2 cache as
// there are elements, so an aligned vector has to be put together of what two threads have. A warp whose threads keep
// their columns does that (store_by_warp); others take the aligned vectors of the result from the start.
#pragma once
#include <cstdint>

#include "device/ptx.cuh"
#include "device/vec.cuh"

namespace llmk {

// Elements between the last multiple of the size of a vector, 16 bytes if nothing is said, and this address.
template <typename T, int N = kVecWidth<T>>
__device__ int misalignment(const T* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % sizeof(Vec<T, N>) / sizeof(T));
}

// All of this computes with the words of a vector. Were a vector put together of elements in one branch and loaded in
// the other, the compiler would take every one apart as soon as it is loaded, and so wait for each load before the
// next.
template <typename T, int N>
constexpr int kWordsOf = sizeof(Vec<T, N>) / 4;

template <typename T, int N>
__device__ const uint32_t (&words_of(const Vec<T, N>& value))[kWordsOf<T, N>] {
  return reinterpret_cast<const uint32_t(&)[kWordsOf<T, N>]>(value);
}
template <typename T, int N>
__device__ Vec<T, N> of_words(const uint32_t (&words)[kWordsOf<T, N>]) {
  Vec<T, N> result;
#pragma unroll
  for (int i = 0; i < kWordsOf<T, N>; ++i) reinterpret_cast<uint32_t(&)[kWordsOf<T, N>]>(result)[i] = words[i];
  return result;
}

// Elements shift, shift + 1, ... of two neighbouring vectors, shift < N: by 8 bytes or none, by 4, by what is left.
template <typename T, int N>
__device__ Vec<T, N> cut(const Vec<T, N>& low, const Vec<T, N>& high, int shift) {
  constexpr int kWords = kWordsOf<T, N>;
  const unsigned bytes = shift * static_cast<unsigned>(sizeof(T));
  uint32_t w[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) w[i] = words_of(low)[i], w[kWords + i] = words_of(high)[i];
#pragma unroll
  for (int step = kWords / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kWords + step; ++i) w[i] = bytes & 4 * step ? w[i + step] : w[i];
  }
  uint32_t result[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    result[i] = sizeof(T) == 4 ? w[i] : __funnelshift_r(w[i], w[i + 1], bytes % 4 * 8);
  }
  return of_words<T, N>(result);
}

// The bits of the element at column c of a row; 0 outside of [begin, end).
template <typename T, typename Index>
__device__ uint32_t load_bits(const T* row, Index c, Index begin, Index end) {
  if (c < begin || c >= end) return 0;
  if constexpr (sizeof(T) == 4) return reinterpret_cast<const uint32_t*>(row)[c];
  return reinterpret_cast<const uint16_t*>(row)[c];
}

// Columns [c, c + N) of a row, element by element; 0 outside of [begin, end).
template <typename T, typename Index, int N = kVecWidth<T>>
__device__ Vec<T, N> load_elements(const T* row, Index c, Index begin, Index end) {
  const auto element = [&](int i) { return load_bits(row, c + i, begin, end); };
  uint32_t words[kWordsOf<T, N>];
#pragma unroll
  for (int i = 0; i < kWordsOf<T, N>; ++i) {
    words[i] = sizeof(T) == 4 ? element(i) : element(2 * i) | element(2 * i + 1) << 16;
  }
  return of_words<T, N>(words);
}

// The same for a c at which the row is aligned.
template <typename T, typename Index, int N = kVecWidth<T>>
__device__ Vec<T, N> load_aligned(const T* row, Index c, Index begin, Index end) {
  return c >= begin && c + N <= end ? Vec<T, N>::load(row + c) : load_elements(row, c, begin, end);
}

// Columns [c, c + N) for any c, cut out of two vectors. Of one of which nothing is wanted, the other is taken: where a
// column is outside of [begin, end), there is 0 or another element of the row.
template <typename T, typename Index, int N = kVecWidth<T>>
__device__ Vec<T, N> load_shifted(const T* row, Index c, Index begin, Index end) {
  using V = Vec<T, N>;
  const int shift = misalignment<T, N>(row + c);
  const Index below = c - shift, above = below + N;
  const Index low = above <= begin ? above : below, high = shift == 0 || above >= end ? low : above;
  if (low < begin || high + N > end) return load_elements<T, Index, N>(row, c, begin, end);
  return cut(V::load(row + low), V::load(row + high), shift);
}

// The same, 0 outside of [begin, end), but not cut yet: load_shifted() waits for its loads, and a thread can have
// several of these under way. Near the ends of a row, whatever its alignment, each word of the two vectors is one
// element.
template <typename T>
class Uncut {
 public:
  static constexpr int N = kVecWidth<T>;
  using V = Vec<T, N>;

  Uncut() = default;
  template <typename Index>
  __device__ Uncut(const T* row, Index c, Index begin, Index end) {
    const bool is_inside = c >= begin + N && c + 2 * N <= end;
    shift_ = misalignment<T, N>(row + c);
    load_if(is_inside, row + c - shift_, low_);
    load_if(is_inside, row + c - shift_ + N, high_);
    if (is_inside) return;
    const auto bits = [&](int i) { return i < N ? load_bits(row, c + i, begin, end) : 0u; };
    shift_ = kElements;
    low_ = make_uint4(bits(0), bits(1), bits(2), bits(3));
    high_ = make_uint4(bits(4), bits(5), bits(6), bits(7));
  }
  __device__ V vector() const {
    if (shift_ != kElements) return cut(reinterpret_cast<const V&>(low_), reinterpret_cast<const V&>(high_), shift_);
    if constexpr (N == 4) return reinterpret_cast<const V&>(low_);
    return of_words<T, N>(
        {low_.x | low_.y << 16, low_.z | low_.w << 16, high_.x | high_.y << 16, high_.z | high_.w << 16});
  }

 private:
  static constexpr int kElements = -1;

  uint4 low_, high_;
  int shift_;
};

// Stores what lies in [begin, end), to a row that is aligned at c.
template <typename T, int N, typename Index>
__device__ void store_aligned(const Vec<T, N>& value, T* row, Index c, Index begin, Index end) {
  if (c >= begin && c + N <= end) return value.store(row + c);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (c + i >= begin && c + i < end) row[c + i] = value.data[i];
  }
}

// Stores the vectors of a warp at columns c of a row, those of neighbouring lanes N columns apart:
//
//   lanes   |0 0 0 0|1 1 1 1|2 2 2 2|..|31 31 31 31|      here of 4 elements
//   memory    . .|0 0 1 1|1 1 2 2|2 2  ..  31 31|. .      aligned vectors, of lane 1, 2, ..., 31
//
// Each lane stores the aligned vector that ends in its own, and lane 0 none: it has the vector of lane 31 of the warp
// before, whose end is stored here.
template <typename T, int N, typename Index>
__device__ void store_by_warp(const Vec<T, N>& value, T* row, Index c, Index begin, Index end) {
  uint32_t below[kWordsOf<T, N>];
#pragma unroll
  for (int i = 0; i < kWordsOf<T, N>; ++i) below[i] = __shfl_up_sync(0xffffffffu, words_of(value)[i], 1);
  const int shift = misalignment<T, N>(row + c);
  if (threadIdx.x % 32 == 0) return;
  store_aligned(shift == 0 ? value : cut(of_words<T, N>(below), value, N - shift), row, c - shift, begin, end);
}

}  // namespace llmk
