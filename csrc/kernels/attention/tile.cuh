// One warp's 16 or 32 keys of a KV tile: scores, mask, online softmax and the product with the values.
//
//   S^T [keys, queries] = K Q^T        O^T [head_dim, queries] += V^T P^T
//
// Keys are the A operand (16 rows) of mma.sync and queries the B operand (8 columns). So up to 8 queries of a kv head
// cost no more than one, and a lane holds the same two queries in both products.
#pragma once
#include <cmath>

#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "merge.cuh"
#include "shape.h"
#include "tile_scheduler.cuh"

namespace llmk::kernels {

// The queries as B operand: in registers where there is room, else read from shared memory each time.
template <typename S>
struct QueryOperand {
  static constexpr int kSteps = S::D / 32;
  static constexpr bool kInRegisters = S::D * S::kMmaTiles <= 256;
  uint32_t row;
  uint32_t fragments[kInRegisters ? S::kMmaTiles : 1][kInRegisters ? kSteps : 1][4];

  __device__ explicit QueryOperand(uint32_t q) : row(q + threadIdx.x % 8 * S::kRow + threadIdx.x % 32 / 8 * 16) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int n = 0; n < S::kMmaTiles; ++n) {
#pragma unroll
        for (int d = 0; d < kSteps; ++d) load_matrices(fragments[n][d], row + n * 8 * S::kRow + d * 64);
      }
    }
  }
  __device__ void load_fragment(uint32_t (&b)[4], int n, int d) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = fragments[n][d][i];
    } else {
      load_matrices(b, row + n * 8 * S::kRow + d * 64);
    }
  }
};

// swizzled_row(): this lane's row of an operand for ldmatrix, its upper 8 columns if `upper`. columns_of(): the same
// row 16 * step columns on.
__device__ inline uint32_t swizzled_row(uint32_t tile, int row, bool upper) {
  return tile + row * 128 + (static_cast<int>(upper) ^ row % 8) * 16;
}
template <typename S>
__device__ uint32_t columns_of(uint32_t swizzled, int step) {
  return (swizzled ^ step % 4 * 32) + step / 4 * S::kChunkBytes;
}

// Of a warp: in each row of 16 keys 8 queries each.
template <typename S>
using Scores = float[S::kKeyTiles][S::kMmaTiles][4];

// s = K Q^T, before scaling.
template <typename S>
__device__ void multiply_queries(Scores<S>& s, uint32_t tile, const QueryOperand<S>& queries) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = swizzled_row(tile, lane % 16, lane >= 16);
#pragma unroll
  for (int m = 0; m < S::kKeyTiles; ++m) {
    float odd[S::kMmaTiles][4] = {};  // a second accumulator, since a product waits for the one before it
#pragma unroll
    for (int n = 0; n < S::kMmaTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = 0.f;
    }
#pragma unroll
    for (int d = 0; d < S::D / 16; d += 2) {
      uint32_t a[2][4];
      load_matrices(a[0], columns_of<S>(row, d) + m * kMmaKeys * 128);
      load_matrices(a[1], columns_of<S>(row, d + 1) + m * kMmaKeys * 128);
#pragma unroll
      for (int n = 0; n < S::kMmaTiles; ++n) {
        uint32_t b[4];
        queries.load_fragment(b, n, d / 2);
        mma_16x8x16<typename S::T>(s[m][n], a[0], b[0], b[1]);
        mma_16x8x16<typename S::T>(odd[n], a[1], b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < S::kMmaTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] += odd[n][i];
    }
  }
}

// Causal mask, window and padding: the keys [lower, upper) of the split that each query of this lane sees. `first`: the
// work tile's first query.
template <typename S>
struct Mask {
  int lower[S::kMmaTiles][2], upper[S::kMmaTiles][2];

  __device__ Mask(const DecodeAttentionParams& params, const TileScheduler<S>& scheduler, int first, int group) {
    const int lane = threadIdx.x % 32, tokens = static_cast<int>(params.tokens), end = scheduler.end_key();
    const int window_left = window_left_of(params);
#pragma unroll
    for (int n = 0; n < S::kMmaTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = tokens == 1 ? 0 : divide(first + 8 * n + lane % 4 * 2 + i, group);
        const int last_key_end = scheduler.keys.end - tokens + t + 1;
        upper[n][i] = min(last_key_end, end);
        lower[n][i] =
            window_left >= 0 ? max(last_key_end - 1 - window_left, scheduler.keys.begin) : scheduler.keys.begin;
      }
    }
  }
};

// Softmax scale and softcap, then the mask.
struct ScoreMod {
  float scale, cap, cap_scale;  // for scores in base 2; cap 0: no softcap

  __device__ explicit ScoreMod(const DecodeAttentionParams& params)
      : scale(static_cast<float>(params.softmax_scale) * kLog2E),
        cap(static_cast<float>(params.softcap) * kLog2E),
        cap_scale(params.softcap > 0 ? static_cast<float>(params.softmax_scale / params.softcap) * 2 * kLog2E : 0.f) {}

  // For the keys from `key` on. Masked scores become -inf, whatever they are.
  template <typename S>
  __device__ void apply(Scores<S>& scores, int key, const Mask<S>& mask) const {
    const int first = key + threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < S::kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < S::kMmaTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = scores[m][n][i];
          if (cap > 0) {  // tanh(x) = 1 - 2 / (1 + e^2x)
            s = cap - 2 * cap * reciprocal_approximate(1.f + exp2_approximate(s * cap_scale));
          } else {
            s *= scale;
          }
          const int j = first + m * kMmaKeys + i / 2 * 8;
          if (j < mask.lower[n][i % 2] || j >= mask.upper[n][i % 2]) s = -INFINITY;
        }
      }
    }
  }
};

// The output of a warp, not yet normalized. A lane has two queries of each MMA tile, 2 (lane % 4) and the next; o holds
// for them elements lane / 4 and lane / 4 + 8 of every 16 of the head (transposed).
template <typename S>
struct Accumulator {
  static constexpr int kMmaTiles = S::kMmaTiles, kSteps = S::D / 16;
  float o[kSteps][kMmaTiles][4];
  float maximum[kMmaTiles][2], sum[kMmaTiles][2];
  uint32_t p[S::kKeyTiles][kMmaTiles][2];  // probabilities of the current KV tile, not yet normalized

  __device__ Accumulator() {
#pragma unroll
    for (int n = 0; n < kMmaTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) maximum[n][i] = -INFINITY, sum[n][i] = 0.f;
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][n][i] = 0.f;
      }
    }
  }

  // Online softmax: updates maximum and sum, rescales o, and stores the probabilities in p.
  __device__ void online_softmax(Scores<S>& s) {
    using P = Pair<typename S::T>;
#pragma unroll
    for (int n = 0; n < kMmaTiles; ++n) {
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float new_maximum = maximum[n][i];
#pragma unroll
        for (int m = 0; m < S::kKeyTiles; ++m) new_maximum = fmaxf(new_maximum, fmaxf(s[m][n][i], s[m][n][i + 2]));
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          new_maximum = fmaxf(new_maximum, __shfl_xor_sync(0xffffffffu, new_maximum, offset));
        const float base = finite(new_maximum);
        scale[i] = exp2_approximate(maximum[n][i] - base);
        maximum[n][i] = new_maximum;
        sum[n][i] *= scale[i];
#pragma unroll
        for (int m = 0; m < S::kKeyTiles; ++m) {
          s[m][n][i] = exp2_approximate(s[m][n][i] - base);
          s[m][n][i + 2] = exp2_approximate(s[m][n][i + 2] - base);
          sum[n][i] += s[m][n][i] + s[m][n][i + 2];
        }
      }
#pragma unroll
      for (int m = 0; m < S::kKeyTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto pair = P::from_floats(s[m][n][2 * half], s[m][n][2 * half + 1]);
          p[m][n][half] = transpose_matrix(*reinterpret_cast<const uint32_t*>(&pair));
        }
      }
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][n][i] *= scale[i % 2];
      }
    }
  }

  // o += V^T P^T. Rows outside [begin, end) are set to zero: they may hold NaN, and 0 * NaN is NaN.
  __device__ void multiply_values(uint32_t tile, int begin, int end) {
    const int lane = threadIdx.x % 32;
    const auto mask = [&](int row) {
      return (row >= begin && row < end ? 0xffffu : 0u) | (row + 1 >= begin && row + 1 < end ? 0xffff0000u : 0u);
    };
    const uint32_t row = swizzled_row(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < S::kKeyTiles; ++m) {
      const int key = m * kMmaKeys + lane % 4 * 2;
      const uint32_t low = mask(key), high = mask(key + 8);
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
        uint32_t a[4];
        load_matrices_transposed(a, columns_of<S>(row, d) + m * kMmaKeys * 128);
        a[0] &= low, a[1] &= low, a[2] &= high, a[3] &= high;
#pragma unroll
        for (int n = 0; n < kMmaTiles; ++n) mma_16x8x16<typename S::T>(o[d][n], a, p[m][n][0], p[m][n][1]);
      }
    }
  }

  // Stores the partial output to shared memory.
  __device__ void store_partials(unsigned char* shared, const Layout& layout, int warp) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    SoftmaxState* const softmaxes = reinterpret_cast<SoftmaxState*>(shared + layout.softmaxes) + warp * S::kQueries;
    float* const sums = reinterpret_cast<float*>(shared + layout.sums) + warp * S::kQueries * S::kSumRow + row;
#pragma unroll
    for (int n = 0; n < kMmaTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = 8 * n + lane % 4 * 2 + i;
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) sum[n][i] += __shfl_xor_sync(0xffffffffu, sum[n][i], offset);
        if (row == 0) softmaxes[query] = {maximum[n][i], sum[n][i]};
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
          sums[query * S::kSumRow + 16 * d] = o[d][n][i];
          sums[query * S::kSumRow + 16 * d + 8] = o[d][n][i + 2];
        }
      }
    }
  }
};

}  // namespace llmk::kernels
