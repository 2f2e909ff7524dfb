// Linear for many tokens on Hopper:
//
//   y = x W^T (+ bias)      y = act(x Wg^T) (x Wu^T)      residual += alpha (x W^T (+ bias))
//
// with the rounding of linear.cu. A gated activation, bias and residual are in the epilogue: [gate | up] is never in
// memory.
//
// A tile is 128 tokens by kColumns rows of W, with `glu` half of them of the gate and half of the up projection, so
// that a thread has both sums of an element. A warp copies 64 elements of K at a time into a ring, tile after tile, and
// two warpgroups multiply them:
//
//   kAlternates   each takes every other tile, so that the products of one run beside the epilogue of the other
//   else          each takes 64 tokens of every tile, which may be wider: the sums of a thread are half as many
//
// Of what the two blocks of a cluster share, each copies one half to both. Grids are persistent. The design is that of
// CUTLASS on Hopper ("ping-pong" and "cooperative").
//
//                    shares_weight                                     else
//   block 0   tokens 0 ... 127,    all rows of W; copies x 0      all tokens, rows of W 0; copies half of x
//             and the first half of W to both                     to both, and W 0
//   block 1   tokens 128 ... 255, the same rows; copies x 1       the same tokens, rows 1; copies the other
//             and the other half of W to both                     half of x to both, and W 1
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/tma.cuh"
#include "device/vec.cuh"
#include "device/wgmma.cuh"
#include "kernels/linear/finish.cuh"
#include "params/linear.h"
#include "plan.h"
#include "position.h"

namespace llmk::kernels::many_tokens {

constexpr int kRows = kGemmRows, kDepth = kGemmDepth;
constexpr int kWarps = 8, kThreads = 32 * (4 + kWarps);  // a warpgroup of which one warp copies, and two that compute
constexpr int kRowBytes = kDepth * kHalfBytes;           // of a stage, in 128-byte swizzle
constexpr int kStoreBytes = 16 * kRowBytes;              // of a warp: 16 tokens by 64 columns on their way to memory

// A stage of the ring: two halves of x, then two of W.
template <int kColumns>
struct Ring {
  static constexpr int kXBytes = kRows / 2 * kRowBytes, kWeightBytes = kColumns / 2 * kRowBytes;
  static constexpr int kStageBytes = 2 * (kXBytes + kWeightBytes);
  static constexpr int kStages = (227 * 1024 - 1024 - kWarps * kStoreBytes - 128) / kStageBytes;
  static constexpr size_t kSharedBytes = kStages * kStageBytes + kWarps * kStoreBytes + 16 * kStages + 1024;
};

struct Arguments {
  const void* bias;
  void* y;  // or the residual
  int64_t y_stride, columns;
  float alpha;
  bool adds;  // y is the residual
  Activation activation;
  int m, k_tiles;
  int cluster;
  bool shares_weight;
  bool weight_early;            // W may be read before the previous kernels have ended
  int half_step;                // rows of W from one half of a tile to the other
  int column_step;              // columns of y from tile to tile
  int row_tiles, column_tiles;  // of clusters
  int tiles;
};

// What a block computes.
struct Tile {
  int row;     // the first token
  int column;  // the first column of y, and row of W

  __device__ Tile(const Arguments& a, int index, int rank) {
    const GemmPosition at(index, a.row_tiles, a.column_tiles);
    row = kRows * (a.shares_weight ? a.cluster * at.row + rank : at.row);
    column = a.column_step * (a.shares_weight ? at.column : a.cluster * at.column + rank);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A position in the ring.
template <int kStages>
struct Position {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
  __device__ void advance(int count) {
    phase ^= (stage + count) / kStages & 1;
    stage = (stage + count) % kStages;
  }
};

// The thread that copies.
template <int kColumns>
__device__ void copy_tiles(const Arguments& a, const CUtensorMap& x, const CUtensorMap& weight, uint32_t ring,
                           uint32_t full, uint32_t empty, int rank, int first, int step) {
  using R = Ring<kColumns>;
  // One half of a tile, to this block; or to both blocks, if it is the half that this block copies of what they share.
  const auto copy_half = [&](const CUtensorMap& map, bool shared, int half, uint32_t to, int k, int row,
                             uint32_t barrier) {
    if (!shared) {
      tensor_load(to, map, k * kDepth, row, 0, barrier, kEvictNormal);
    } else if (half == rank) {
      tensor_load_multicast(to, map, k * kDepth, row, 0, barrier, 3, kEvictNormal);
    }
  };
  const auto copy_x = [&](const Tile& tile, int k, int stage) {
    for (int half = 0; half < 2; ++half) {
      copy_half(x, a.cluster > 1 && !a.shares_weight, half, ring + stage * R::kStageBytes + half * R::kXBytes, k,
                tile.row + half * (kRows / 2), full + 8 * stage);
    }
  };
  const auto copy_weight = [&](const Tile& tile, int k, int stage) {
    for (int half = 0; half < 2; ++half) {
      copy_half(weight, a.shares_weight, half, ring + stage * R::kStageBytes + 2 * R::kXBytes + half * R::kWeightBytes,
                k, tile.column + half * a.half_step, full + 8 * stage);
    }
  };
  int early = 0;  // stages whose rows of W are under way
  if (a.weight_early) {
    const Tile tile(a, first, rank);
    for (; early < min(R::kStages, a.k_tiles); ++early) {
      barrier_arrive_expecting(full + 8 * early, R::kStageBytes);
      copy_weight(tile, early, early);
    }
  }
  pdl_wait();
  Position<R::kStages> at;
  for (int index = first; index < a.tiles; index += step) {
    const Tile tile(a, index, rank);
    for (int k = 0; k < a.k_tiles; ++k, at.advance()) {
      if (early > 0) {
        --early;
      } else {
        barrier_wait(empty + 8 * at.stage, at.phase ^ 1);
        barrier_arrive_expecting(full + 8 * at.stage, R::kStageBytes);
        copy_weight(tile, k, at.stage);
      }
      copy_x(tile, k, at.stage);
    }
  }
}

// Writes columns [column, column + kCount) of a warp's 16 tokens, from `row` on: values(j) are columns 8 j + i and the
// next, i = 2 (lane % 4), of tokens lane / 4 (.x, .y) and lane / 4 + 8 (.z, .w). `place`: kStoreBytes of the warp's.
template <typename T, int kCount, typename Values>
__device__ void store_columns(const Arguments& a, unsigned char* place, int row, int64_t column, const Values& values) {
  static_assert(kCount % 8 == 0 && kCount <= 64);
  using V = Vec<T, 8>;
  using V2 = Vec<T, 2>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto vector = [&](int r, int chunk) {
    return reinterpret_cast<T*>(place + r * kRowBytes + ((chunk ^ r) & 7) * 16);
  };
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    const float4 v = values(j);
    V2::of([&](int e) { return e ? v.y : v.x; }).assign_to(vector(lane / 4, j) + lane % 4 * 2);
    V2::of([&](int e) { return e ? v.w : v.z; }).assign_to(vector(lane / 4 + 8, j) + lane % 4 * 2);
  }
  __syncwarp();
  const int chunk = lane % 8;
  const int64_t own = column + chunk * 8;
  T* const y = static_cast<T*>(a.y) + own;
  const bool inside = chunk < kCount / 8 && own < a.columns;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i * 4 + lane / 8;
    if (!inside || row + r >= a.m) continue;
    T* const to = y + (row + r) * a.y_stride;
    V result = V::load(vector(r, chunk));
    if (a.adds) result = add_to_residual(V::load(to), result, a.alpha);
    result.store(to);
  }
  __syncwarp();  // the place is free
}

// All of a warp's columns, 64 at a time.
template <typename T, int kCount, typename Values>
__device__ void store_all(const Arguments& a, unsigned char* place, int row, int64_t column, const Values& values) {
#pragma unroll
  for (int part = 0; part < kCount / 64; ++part) {
    store_columns<T, 64>(a, place, row, column + part * 64, [&](int j) { return values(part * 8 + j); });
  }
  if constexpr (kCount % 64 > 0) {
    store_columns<T, kCount % 64>(a, place, row, column + kCount / 64 * 64,
                                  [&](int j) { return values(kCount / 64 * 8 + j); });
  }
}

template <typename T, int kColumns, bool kGlu>
__device__ void epilogue(const Arguments& a, unsigned char* place, int row, int64_t column,
                         const float (&sums)[kColumns / 2]) {
  if constexpr (kGlu) {
    activation::dispatch_on_device(a.activation, [&](auto act) {
      using Act = decltype(act);
      store_all<T, kColumns / 2>(a, place, row, column, [&](int j) {
        const auto value = [&](int i) { return glu_of_sums<Act, T>(sums[4 * j + i], sums[kColumns / 4 + 4 * j + i]); };
        return float4{value(0), value(1), value(2), value(3)};
      });
    });
  } else {
    const int pair = static_cast<int>(threadIdx.x) % 4 * 2;
    store_all<T, kColumns>(a, place, row, column, [&](int j) {
      const int64_t own = column + 8 * j + pair;
      float first = 0.f, second = 0.f;
      if (a.bias && own < a.columns) {
        first = to_float(static_cast<const T*>(a.bias)[own]);
        second = to_float(static_cast<const T*>(a.bias)[own + 1]);
      }
      const float* const s = sums + 4 * j;
      return float4{s[0] + first, s[1] + second, s[2] + first, s[3] + second};
    });
  }
}

#endif

template <typename T, int kColumns, bool kGlu, bool kAlternates>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
                const __grid_constant__ Arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using R = Ring<kColumns>;
  extern __shared__ unsigned char shared[];
  const uint32_t base = shared_address(shared), ring = (base + 1023) & ~1023u;
  const uint32_t store = ring + R::kStages * R::kStageBytes, full = store + kWarps * kStoreBytes;
  const uint32_t empty = full + 8 * R::kStages;
  const int warp = static_cast<int>(threadIdx.x) / 32, rank = a.cluster > 1 ? cluster_rank() : 0;
  const int first = static_cast<int>(blockIdx.x) / a.cluster, step = static_cast<int>(gridDim.x) / a.cluster;
  if (threadIdx.x == 0) {
    tensor_map_prefetch(x);
    tensor_map_prefetch(weight);
    for (int stage = 0; stage < R::kStages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, a.cluster * (kAlternates ? kWarps / 2 : kWarps));
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (a.cluster > 1) cluster_barrier_relaxed();

  if (warp < 4) {
    fewer_registers<24>();
    if (warp == 0 && elect()) copy_tiles<kColumns>(a, x, weight, ring, full, empty, rank, first, step);
    __syncwarp();
  } else {
    more_registers<240>();
    pdl_launch_dependents();
    pdl_wait();
    constexpr int kParts = kAlternates ? 2 : 1;  // of 64 tokens each
    const int group = warp / 4 - 1, lane = threadIdx.x % 32;
    unsigned char* const place = shared + (store - base) + (warp - 4) * kStoreBytes;
    float sums[kParts][kColumns / 2];
    const auto release = [&](int stage) {
      if (lane < a.cluster) barrier_arrive_cluster(cluster_address(empty + 8 * stage, lane));
    };
    Position<R::kStages> at;
    if (kAlternates && group == 1) at.advance(a.k_tiles);
    for (int index = kAlternates ? first + group * step : first; index < a.tiles; index += kParts * step) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) wgmma_pin(sums[part]);
      // In turn: a barrier's parity tells only the next phase from this one, so a warpgroup must not wait for its
      // stages before the other has those in front of them.
      if (kAlternates && index != first) named_barrier(1 + group, 32 * kWarps);
      int before = 0;
      for (int k = 0; k < a.k_tiles; ++k, before = at.stage, at.advance()) {
        const uint32_t rows = ring + at.stage * R::kStageBytes + (kAlternates ? 0 : group * R::kXBytes);
        const uint32_t columns = ring + at.stage * R::kStageBytes + 2 * R::kXBytes;
        barrier_wait(full + 8 * at.stage, at.phase);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kDepth; d += 16) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            wgmma<T>(sums[part], wgmma_operand(rows + part * R::kXBytes + d * kHalfBytes),
                     wgmma_operand(columns + d * kHalfBytes), k > 0 || d > 0);
          }
        }
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          release(before);
        }
      }
      if (kAlternates && index + step < a.tiles) named_barrier_arrive(2 - group, 32 * kWarps);
      wgmma_wait<0>();
#pragma unroll
      for (int part = 0; part < kParts; ++part) wgmma_pin(sums[part]);
      release(before);
      if constexpr (kAlternates) at.advance(a.k_tiles);  // those of the other warpgroup
      const Tile tile(a, index, rank);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int row = tile.row + (kAlternates ? part : group) * 64 + warp % 4 * 16;
        epilogue<T, kColumns, kGlu>(a, place, row, tile.column, sums[part]);
      }
    }
  }
  if (a.cluster > 1) cluster_barrier_relaxed();  // no copy and no arrival of the other block is under way
#endif
}

}  // namespace llmk::kernels::many_tokens
