// The rotation of pairs in registers, and the angles of a token: for every kernel that rotates whole tensors.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "device/vec.cuh"
#include "kernels/launch.h"
#include "params/rope.h"

namespace llmk::kernels {

// Where the two vectors of the thread at pair d (a multiple of N) begin in a head. With N = 1 an interleaved pair is
// two neighbours; with N > 1 each vector holds whole interleaved pairs.
template <int N, bool kInterleaved>
struct Span {
  int64_t low, high;
  __device__ Span(int64_t d, int64_t half)
      : low(kInterleaved && N == 1 ? 2 * d : d), high(kInterleaved && N == 1 ? 2 * d + 1 : d + half) {}
};

// Whether both elements of a pair lie in the same vector, rather than one each in the low and the high vector.
template <int N, bool kInterleaved>
constexpr bool kNeighbours = kInterleaved&& N > 1;

// The elements of `low` and `high` that each element is paired with.
template <typename T, int N, bool kInterleaved>
__device__ void partners(const Vec<T, N>& low, const Vec<T, N>& high, Vec<T, N>& of_low, Vec<T, N>& of_high) {
  if constexpr (kNeighbours<N, kInterleaved>) {
#pragma unroll
    for (int i = 0; i < N; ++i) of_low.data[i] = low.data[i ^ 1], of_high.data[i] = high.data[i ^ 1];
  } else {
    of_low = high;
    of_high = low;
  }
}

// The factors of the two vectors of a thread: out = x * own + partner * other.
template <typename T, int N>
struct Rotation {
  Vec<T, N> own_low, own_high, other_low, other_high;
};

// cos or sin of the two vectors.
template <typename T, int N, bool kInterleaved>
__device__ void load_angles(const T* row, int64_t d, const Span<N, kInterleaved>& at, bool half_width, Vec<T, N>& low,
                            Vec<T, N>& high) {
  if (!half_width) {
    low = Vec<T, N>::load(row + at.low);
    high = Vec<T, N>::load(row + at.high);
  } else if constexpr (kNeighbours<N, kInterleaved>) {  // one angle for two neighbours
#pragma unroll
    for (int i = 0; i < N; ++i) low.data[i] = row[(at.low + i) / 2], high.data[i] = row[(at.high + i) / 2];
  } else {
    low = high = Vec<T, N>::load(row + d);
  }
}

template <typename T, int N, bool kInterleaved>
__device__ Rotation<T, N> load_rotation(const T* cos, const T* sin, int64_t d, const Span<N, kInterleaved>& at,
                                        const RopeParams& params) {
  using V = Vec<T, N>;
  Rotation<T, N> rotation;
  V sin_low, sin_high;
  load_angles(cos, d, at, params.half_width, rotation.own_low, rotation.own_high);
  load_angles(sin, d, at, params.half_width, sin_low, sin_high);
  if (params.transposed) {  // the sin of the other element of the pair
    V other_low, other_high;
    partners<T, N, kInterleaved>(sin_low, sin_high, other_low, other_high);
    sin_low = other_low;
    sin_high = other_high;
  }
  // The first element of a pair gets -sin, the second sin; the transpose has it the other way round.
  const float sign = params.transposed ? 1.f : -1.f;
  constexpr bool kAlternating = kNeighbours<N, kInterleaved>;
  rotation.other_low = V::of([&](int i) { return (kAlternating && i % 2 ? -sign : sign) * sin_low[i]; });
  rotation.other_high = V::of([&](int i) { return (kAlternating && i % 2 == 0 ? sign : -sign) * sin_high[i]; });
  return rotation;
}

// Finds the rows of cos and sin that belong to a token; false for a position outside the table.
template <typename T>
__device__ bool angle_rows(const RopeParams& params, int64_t b, int64_t t, const T*& cos, const T*& sin) {
  cos = static_cast<const T*>(params.cos);
  sin = static_cast<const T*>(params.sin);
  if (!params.position_ids) {
    cos += b * params.cos_batch + t * params.cos_token;
    sin += b * params.sin_batch + t * params.sin_token;
    return true;
  }
  const int64_t at = b * params.positions_batch + t * params.positions_token;
  const int64_t position = params.position_ids_int64 ? static_cast<const int64_t*>(params.position_ids)[at]
                                                     : static_cast<const int32_t*>(params.position_ids)[at];
  if (position < 0 || position >= params.table_rows) return false;
  cos += position * params.cos_row;
  sin += position * params.sin_row;
  return true;
}

// The rotation of a token's pairs at d.
template <typename T, int N, bool kInterleaved>
__device__ Rotation<T, N> load_rotation_of(const RopeParams& params, int64_t b, int64_t t, int64_t d,
                                           const Span<N, kInterleaved>& at) {
  Rotation<T, N> rotation;
  const T *cos, *sin;
  if (angle_rows(params, b, t, cos, sin)) {
    rotation = load_rotation(cos, sin, d, at, params);
  } else {  // no such position: NaN, rather than a wrong rotation
    rotation.own_low = rotation.own_high = rotation.other_low = rotation.other_high =
        Vec<T, N>::of([](int) { return __int_as_float(0x7fc00000); });
  }
  return rotation;
}

// Whether vectors of `width` elements of T can be moved at these addresses and strides.
template <typename T>
bool are_vectors(std::initializer_list<const void*> pointers, std::initializer_list<int64_t> strides, int width) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [=](const void* pointer) { return is_aligned(pointer, width * sizeof(T)); }) &&
         std::all_of(strides.begin(), strides.end(), [=](int64_t stride) { return stride % width == 0; });
}

template <typename T>
bool are_vectors(const RopeTensor& x, int width) {
  return are_vectors<T>({x.in, x.out}, {x.in_batch, x.in_token, x.in_head, x.out_batch, x.out_token, x.out_head},
                        width);
}

// Interleaved angles of half width are read one by one.
template <typename T>
bool has_vector_angles(const RopeParams& p, int width) {
  return (p.interleaved && p.half_width) ||
         are_vectors<T>({p.cos, p.sin}, {p.cos_batch, p.cos_token, p.cos_row, p.sin_batch, p.sin_token, p.sin_row},
                        width);
}

}  // namespace llmk::kernels
