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
// Stores are not the mirror image of loads: they would have to put together what two threads have, and stores of single
// elements take as many transactions of the L2 cache as there are elements.
#pragma once
#include <cstdint>

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

// Columns [c, c + N) of a row, element by element; 0 outside of [begin, end).
template <typename T, typename Index, int N = kVecWidth<T>>
__device__ Vec<T, N> load_elements(const T* row, Index c, Index begin, Index end) {
  const auto element = [&](int i) -> uint32_t {
    if (c + i < begin || c + i >= end) return 0;
    if constexpr (sizeof(T) == 4) return reinterpret_cast<const uint32_t*>(row)[c + i];
    return reinterpret_cast<const uint16_t*>(row)[c + i];
  };
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

// Where the two aligned vectors begin that columns [c, c + N) are cut out of. Of one of which nothing is wanted, the
// other is taken.
template <typename Index>
struct Neighbours {
  Index low, high;
  bool in_row;

  __device__ Neighbours(int shift, int n, Index c, Index begin, Index end) {
    const Index below = c - shift, above = below + n;
    low = above <= begin ? above : below, high = shift == 0 || above >= end ? low : above;
    in_row = low >= begin && high + n <= end;
  }
};

// Columns [c, c + N) for any c. Where a column is outside of [begin, end), there is 0 or another element of the row.
template <typename T, typename Index, int N = kVecWidth<T>>
__device__ Vec<T, N> load_shifted(const T* row, Index c, Index begin, Index end) {
  using V = Vec<T, N>;
  const int shift = misalignment<T, N>(row + c);
  const Neighbours<Index> at(shift, N, c, begin, end);
  if (!at.in_row) return load_elements<T, Index, N>(row, c, begin, end);
  return cut(V::load(row + at.low), V::load(row + at.high), shift);
}

// The same in two steps, for a thread that begins to load several vectors before it needs the first.
template <typename T, int N = kVecWidth<T>>
struct ShiftedLoad {
  using V = Vec<T, N>;
  using Raw = typename V::Raw;
  Raw low, high;
  bool in_row;

  template <typename Index>
  __device__ static ShiftedLoad begin_at(const T* row, Index c, Index begin, Index end) {
    const Neighbours<Index> at(misalignment<T, N>(row + c), N, c, begin, end);
    ShiftedLoad load;
    load.in_row = at.in_row;
    load_if(at.in_row, row + at.low, load.low);
    load_if(at.in_row, row + at.high, load.high);
    return load;
  }
  // If it is in the row, else nothing is loaded.
  __device__ V cut_at(const T* address) const {
    return cut(reinterpret_cast<const V&>(low), reinterpret_cast<const V&>(high), misalignment<T, N>(address));
  }
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

}  // namespace llmk
