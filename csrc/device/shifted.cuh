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

#include "device/ptx.cuh"
#include "device/vec.cuh"

namespace llmk {

// Elements between the last multiple of 16 bytes and this address.
template <typename T>
__device__ int misalignment(const T* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16 / sizeof(T));
}

// All of this computes with the words of a vector. Were a vector put together of elements in one branch and loaded in
// the other, the compiler would take every one apart as soon as it is loaded, and so wait for each load before the
// next.
using Words = uint4;

template <typename T, int N>
__device__ const Words& words_of(const Vec<T, N>& value) {
  static_assert(sizeof(value) == sizeof(Words));
  return reinterpret_cast<const Words&>(value);
}
template <typename T, int N = kVecWidth<T>>
__device__ Vec<T, N> of_words(const Words& words) {
  return reinterpret_cast<const Vec<T, N>&>(words);
}

// Elements shift, shift + 1, ... of two neighbouring vectors, shift < N: by 8 bytes or none, by 4, by 2.
template <typename T, int N>
__device__ Vec<T, N> cut(const Vec<T, N>& low, const Vec<T, N>& high, int shift) {
  const Words a = words_of(low), b = words_of(high);
  const unsigned bytes = shift * static_cast<unsigned>(sizeof(T));
  const bool by_8 = bytes & 8, by_4 = bytes & 4;
  const uint32_t w[6] = {by_8 ? a.z : a.x, by_8 ? a.w : a.y, by_8 ? b.x : a.z,
                         by_8 ? b.y : a.w, by_8 ? b.z : b.x, by_8 ? b.w : b.y};
  uint32_t result[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) result[i] = by_4 ? w[i + 1] : w[i];
  if constexpr (sizeof(T) < 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) result[i] = __funnelshift_r(result[i], result[i + 1], bytes % 4 * 8);
  }
  return of_words<T>(make_uint4(result[0], result[1], result[2], result[3]));
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
  const auto word = [&](int i) {
    if constexpr (sizeof(T) == 4) return element(i);
    return element(2 * i) | element(2 * i + 1) << 16;
  };
  return of_words<T>(make_uint4(word(0), word(1), word(2), word(3)));
}

// The same for a c at which the row is aligned.
template <typename T, typename Index, int N = kVecWidth<T>>
__device__ Vec<T, N> load_aligned(const T* row, Index c, Index begin, Index end) {
  return c >= begin && c + N <= end ? Vec<T, N>::load(row + c) : load_elements(row, c, begin, end);
}

// The same for any c: cut out of two vectors. Of one of which nothing is wanted, the other is taken.
template <typename T, typename Index, int N = kVecWidth<T>>
__device__ Vec<T, N> load_shifted(const T* row, Index c, Index begin, Index end) {
  using V = Vec<T, N>;
  const int shift = misalignment(row + c);
  const Index below = c - shift, above = below + N;
  const Index low = above <= begin ? above : below, high = shift == 0 || above >= end ? low : above;
  if (low < begin || high + N > end) return load_elements(row, c, begin, end);
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
    const bool is_inside = c >= begin + N && c + 2 * N <= end;  // and the vectors that it is cut out of
    shift_ = misalignment(row + c);
    load_if(is_inside, row + c - shift_, low_);
    load_if(is_inside, row + c - shift_ + N, high_);
    if (is_inside) return;
    const auto bits = [&](int i) { return i < N ? load_bits(row, c + i, begin, end) : 0u; };
    shift_ = kElements;
    low_ = make_uint4(bits(0), bits(1), bits(2), bits(3));
    high_ = make_uint4(bits(4), bits(5), bits(6), bits(7));
  }
  __device__ V vector() const {
    if (shift_ != kElements) return cut(of_words<T>(low_), of_words<T>(high_), shift_);
    if constexpr (N == 4) return of_words<T>(low_);
    return of_words<T>(
        make_uint4(low_.x | low_.y << 16, low_.z | low_.w << 16, high_.x | high_.y << 16, high_.z | high_.w << 16));
  }

 private:
  static constexpr int kElements = -1;

  Words low_, high_;
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

}  // namespace llmk
