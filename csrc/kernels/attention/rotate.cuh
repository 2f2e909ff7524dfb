// The rotation of two vectors of a head, as in kernels/rope/rope.cu: with r = rounding to the dtype,
//   low = r(r(low cos) + r(-high sin))   high = r(r(high cos) + r(low sin))
// bitwise equal to eager PyTorch's (x * cos) + (rotate_half(x) * sin).
#pragma once
#include <cstdint>

#include "device/vec.cuh"
#include "params/attention.h"

namespace llmk::kernels {

// Where the elements of a head lie that a thread moves together, from pair `pair` on. The first rotary_dim / 2 pairs
// are rotated, each element with the one rotary_dim / 2 behind it; the rest of the head makes up the other pairs.
struct PairPlace {
  int low, high;
  bool rotated;

  __device__ PairPlace(int pair, int head_dim, int rotary_dim) {
    const int pairs = rotary_dim / 2;
    rotated = pair < pairs;
    low = rotated ? pair : pair + pairs;
    high = low + (rotated ? pairs : (head_dim - rotary_dim) / 2);
  }
};

// cos and sin for the N elements from `low` on, and for the N elements from `high` on that they are paired with.
template <typename T, int N>
struct Angles {
  Vec<T, N> cos_low, cos_high, sin_low, sin_high;

  // A position outside the table gives NaN instead of a wrong rotation.
  __device__ static Angles load(const RopeTables& rope, int64_t position, int64_t low, int64_t high) {
    using V = Vec<T, N>;
    Angles angles;
    if (position >= 0 && position < rope.rows) {
      const T* cos = static_cast<const T*>(rope.cos) + position * rope.cos_row;
      const T* sin = static_cast<const T*>(rope.sin) + position * rope.sin_row;
      angles.cos_low = V::load(cos + low);
      angles.sin_low = V::load(sin + low);
      angles.cos_high = rope.half_width ? angles.cos_low : V::load(cos + high);
      angles.sin_high = rope.half_width ? angles.sin_low : V::load(sin + high);
    } else {
      angles.cos_low = angles.cos_high = angles.sin_low = angles.sin_high =
          V::of([](int) { return __int_as_float(0x7fc00000); });
    }
    return angles;
  }
};

template <typename T, int N>
__device__ void rotate(Vec<T, N>& low, Vec<T, N>& high, const Angles<T, N>& angles) {
  using V = Vec<T, N>;
  const V minus_high = V::of([&](int i) { return -high[i]; });
  const V rotated = add(mul(low, angles.cos_low), mul(minus_high, angles.sin_low));
  high = add(mul(high, angles.cos_high), mul(low, angles.sin_high));
  low = rotated;
}

}  // namespace llmk::kernels
