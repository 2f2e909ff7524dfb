// Dot products of a row of a weight with x, both in shared memory, by one warp.
//
// By tensor cores, though there is but one column: they convert and add up for a fraction of the instructions. 256
// elements of the row are eight rows of the one operand and those of x eight columns of the other; their dot products
// are the diagonal. A lane takes 16 contiguous bytes of both as its part of two products.
#pragma once
#include <cstdint>

#include "device/mma.cuh"
#include "device/reduce.cuh"

namespace llmk::kernels {

template <typename T>
struct RowDot {
  float c[4][4] = {};

  // Takes in so many vectors of 8 elements.
  __device__ void add(const uint4* row, const uint4* x, int vectors) {
    const int lane = threadIdx.x % 32;
    row += lane;
    x += lane;
    int i = 0;
#pragma unroll 4
    for (; i + 64 <= vectors; i += 64) {
      add(row[i], x[i], c[0], c[1]);
      add(row[i + 32], x[i + 32], c[2], c[3]);
    }
    if (i + 32 <= vectors) {
      add(row[i], x[i], c[0], c[1]);
      i += 32;
    }
    if (i < vectors) {  // behind the end may lie anything
      const bool inside = i + lane < vectors;
      const uint4 zero = make_uint4(0, 0, 0, 0);
      add(inside ? row[i] : zero, inside ? x[i] : zero, c[2], c[3]);
    }
  }

  // All lanes get it.
  __device__ float sum() const {
    // Row g, column g: one of the first two results of the lane g / 2 of the row's four.
    const int lane = threadIdx.x % 32;
    float total[1] = {lane / 4 % 2 ? (c[0][1] + c[1][1]) + (c[2][1] + c[3][1])
                                   : (c[0][0] + c[1][0]) + (c[2][0] + c[3][0])};
    if (lane % 4 != lane / 8) total[0] = 0.f;
    warp_sum(total, 32);
    return total[0];
  }

 private:
  __device__ static void add(const uint4& a, const uint4& b, float (&first)[4], float (&second)[4]) {
    mma_16x8x16<T>(first, {a.x, 0, a.y, 0}, b.x, b.y);
    mma_16x8x16<T>(second, {a.z, 0, a.w, 0}, b.z, b.w);
  }
};

}  // namespace llmk::kernels
