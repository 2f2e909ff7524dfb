// Attention of the up to 8 queries of a kv head to a tile of 16 keys, by one warp, out of a slot that holds keys as
// they lie in memory: rows of all heads, which would all begin at the same bank.
//
// No ldmatrix: the order of the elements that a product sums over does not matter as long as both operands agree, and
// neither does the order of the columns of a result as long as one knows it. So a lane takes 16 contiguous bytes where
// the tensor cores speak of pairs of elements, and which key is column c of the tile is chosen for the banks. With
// g = lane / 4 and t = lane % 4:
//
//   scores  = queries (rows g, the other 8 are zero) x keys (columns g): elements 8 t + 32 j of query and key
//   results = values (rows: elements, columns: keys 2 t, 2 t + 1 and + 8), transposed, x weights: elements 8 g + 64 i
//
// The weights are the scores as they lie in the lanes. A unit is brought by copies, up to 4, that are moved on by 128
// bytes / copies each; `quarter` is which fourth of the unit a key is of. Eight lanes whose loads go together have the
// same pair of columns in the first product: quarters q and q + 2, two times 64 bytes; and columns 2 t + e for all t in
// the second: all quarters, four times 32 bytes. So with 4 copies every bank is met once.
#pragma once
#include <cmath>

#include "dense_plan.h"
#include "device/mma.cuh"
#include "device/vec.cuh"
#include "rotate.cuh"
#include "softmax.cuh"
#include "work.cuh"

namespace llmk::kernels {

// What is a compile-time constant since registers depend on it. kWarps: that share the keys of a kv head.
template <typename Element, int kHeadDim, int kWarps>
struct DenseShape {
  using T = Element;
  static constexpr int D = kHeadDim, kWorkers = kWarps;
  static constexpr int kKeyVectors = D / 32, kValueVectors = D / 64;  // of 16 bytes, that a lane has of a row
  static constexpr int kSteps = D / 16;                               // of the result: 16 elements
};

// Where the keys of a lane's columns lie. Column 2 t + e of half n of the tile is key 2 n + e of `part` of quarter
// (t + 2 e) % 4 of the unit, so that both products have what they want.
struct Columns {
  int quarter_keys, part;

  __device__ Columns(int log2_unit, int tile) : quarter_keys(1 << log2_unit >> 2), part(4 * tile) {}
  __device__ static int quarter(int t, int e) { return (t + 2 * e) % 4; }
  __device__ int key(int n, int t, int e) const { return quarter(t, e) * quarter_keys + part + 2 * n + e; }
  // Of the key of half 0; that of half 1 is two rows behind.
  __device__ int offset(int t, int e, int row, int copies) const {
    return key(0, t, e) * row + quarter(t, e) * copies / 4 * (128 / copies);
  }
};

// A lane's part of the rotated queries, a row of 8 vectors of which it has those at 8 t + 32 j.
template <typename S>
struct DenseQueries {
  using T = typename S::T;
  using V = Vec<T, 8>;
  V part[S::kKeyVectors];

  // `wait` comes between the loads that `settled` speaks of and the others.
  template <typename Wait>
  __device__ DenseQueries(const DecodeAttentionParams& params, int b, int head, const Wait& wait) {
    const int g = threadIdx.x % 32 / 4, group = static_cast<int>(params.heads / params.kv_heads);
    const int t = params.tokens == 1 ? 0 : g / group;
    const T* const row = static_cast<const T*>(params.q) + b * params.q_batch + t * params.q_token +
                         (head * group + g - t * group) * params.q_head;
    load(params, b, row, g < group * static_cast<int>(params.tokens), wait);
  }
  // The new key, in the place of a query.
  __device__ static DenseQueries new_key(const DecodeAttentionParams& params, int b, int head) {
    DenseQueries key;
    key.load(params, b, static_cast<const T*>(params.new_k) + b * params.new_k_batch + head * params.new_k_head, true,
             [] {});
    return key;
  }
  __device__ uint4 raw(int j) const { return *reinterpret_cast<const uint4*>(&part[j]); }

 private:
  DenseQueries() = default;

  template <typename Wait>
  __device__ void load(const DecodeAttentionParams& params, int b, const T* row, bool exists, const Wait& wait) {
    constexpr int kHalf = S::kKeyVectors / 2;
    const int column = threadIdx.x % 4 * 8;
    Angles<T, 8> angles[kHalf];
    if (params.positions) {
      const int position = __ldcg(params.positions + b);
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        angles[j] = Angles<T, 8>::load(params.rope, position, column + 32 * j, column + 32 * j + S::D / 2);
      }
    }
    wait();
#pragma unroll
    for (int j = 0; j < S::kKeyVectors; ++j) {
      part[j] = exists ? V::load(row + column + 32 * j) : V::of([](int) { return 0.f; });
    }
    if (params.positions && exists) {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) rotate(part[j], part[j + kHalf], angles[j]);
    }
  }
};

// The unfinished attention of a warp. o[j][e]: transposed, of queries 2 t + e % 2, element `at` = j + e / 2 * kSteps of
// those that the lane has, which is element at / 8 * 64 + 8 g + at % 8 of the head.
template <typename S>
struct DenseAccumulator {
  using T = typename S::T;
  float o[S::kSteps][4];
  float maximum, sum;  // of query g; the sum over the lane's own columns
  uint32_t weights[2];

  __device__ DenseAccumulator() : maximum(-INFINITY), sum(0.f) {
#pragma unroll
    for (int j = 0; j < S::kSteps; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[j][e] = 0.f;
    }
  }

  // A lane's part of the keys of column g of both halves, `row` bytes per key.
  __device__ static void load_keys(uint4 (&k)[2][S::kKeyVectors], const unsigned char* lane_keys, int row) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < S::kKeyVectors; ++j) {
        k[n][j] = *reinterpret_cast<const uint4*>(lane_keys + 2 * n * row + 64 * j);
      }
    }
  }

  // Takes in the scores of a tile. visible(n, e): whether query g sees the key of column 2 t + e of half n.
  template <typename Visible>
  __device__ void weigh(const uint4 (&k)[2][S::kKeyVectors], const DenseQueries<S>& q, const Scoring& scoring,
                        const Visible& visible) {
    float s[2][4] = {}, odd[2][4] = {};  // two chains each, since every product waits for the one before
#pragma unroll
    for (int j = 0; j < S::kKeyVectors; ++j) {
      const uint4 row = q.raw(j);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_16x8x16<T>(s[n], {row.x, 0, row.y, 0}, k[n][j].x, k[n][j].y);
        mma_16x8x16<T>(odd[n], {row.z, 0, row.w, 0}, k[n][j].z, k[n][j].w);
      }
    }
    float top = maximum;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[n][e] = visible(n, e) ? scoring(s[n][e] + odd[n][e]) : -INFINITY;
        top = fmaxf(top, s[n][e]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float base = finite(top);
    if (__any_sync(0xffffffffu, top > maximum)) rescale(exp2_approximate(maximum - base));
    maximum = top;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float a = exp2_approximate(s[n][0] - base), b = exp2_approximate(s[n][1] - base);
      sum += a + b;
      const auto pair = Pair<T>::from_floats(a, b);
      weights[n] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }

  // And its values: v[2 n + e] of column 2 t + e of half n.
  __device__ void add(const uint4 (&v)[4][S::kValueVectors]) {
#pragma unroll
    for (int j = 0; j < S::kSteps; ++j) {
      // Element `at` of the lane's part of the values i and i + 1.
      const auto pair = [&](int i, int at) {
        const uint32_t low = reinterpret_cast<const uint32_t*>(v[i])[at / 2];
        const uint32_t high = reinterpret_cast<const uint32_t*>(v[i + 1])[at / 2];
        return __byte_perm(low, high, at % 2 ? 0x7632 : 0x5410);
      };
      mma_16x8x16<T>(o[j], {pair(0, j), pair(0, j + S::kSteps), pair(2, j), pair(2, j + S::kSteps)}, weights[0],
                     weights[1]);
    }
  }

 private:
  __device__ void rescale(float factor) {
    const int t = threadIdx.x % 4;
    sum *= factor;
    const float of[2] = {__shfl_sync(0xffffffffu, factor, 8 * t), __shfl_sync(0xffffffffu, factor, 8 * t + 4)};
#pragma unroll
    for (int j = 0; j < S::kSteps; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[j][e] *= of[e % 2];
    }
  }
};

}  // namespace llmk::kernels
