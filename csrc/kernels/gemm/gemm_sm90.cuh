// Linear for many tokens on Hopper:
//
//   y = x W^T (+ bias)      y = act(x Wg^T) (x Wu^T)      residual += alpha (x W^T (+ bias))
//
// with the rounding of linear.cu. A gated activation, bias and residual are in the epilogue: [gate | up] is never in
// memory.
//
// A block computes 128 tokens by 256 rows of W, with `glu` 128 of the gate and the same 128 of the up projection, so
// that a thread has both sums of an element. A warp copies tiles of 64 elements of K into a ring; two warpgroups of 64
// tokens each multiply them. Two blocks of a cluster have the same rows of W: each copies half of them to both. Grids
// are persistent: the next tile's copies run beside the epilogue. The design is that of CUTLASS on Hopper.
//
//   block 0   tokens   0 ... 127      copies  x 0, W rows   0 ... 127 to both
//   block 1   tokens 128 ... 255      copies  x 1, W rows 128 ... 255 to both
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/tma.cuh"
#include "device/vec.cuh"
#include "device/wgmma.cuh"
#include "kernels/activation/activation.cuh"
#include "params/linear.h"

namespace llmk::kernels::many_tokens {

constexpr int kRows = 128, kColumns = 256, kDepth = 64, kStages = 4;
constexpr int kWarps = 8, kThreads = 32 * (4 + kWarps);  // a warpgroup of which one warp copies, and two that compute
constexpr int kRowBytes = kDepth * 2;                    // of a stage, in 128-byte swizzle
constexpr int kXBytes = kRows * kRowBytes, kHalfBytes = kColumns / 2 * kRowBytes;
constexpr int kStageBytes = kXBytes + 2 * kHalfBytes;
constexpr int kStoreBytes = 16 * kRowBytes;  // of a warp: 16 tokens by 64 columns on their way to memory
constexpr size_t kSharedBytes = kStages * kStageBytes + kWarps * kStoreBytes + 16 * kStages + 1024;
constexpr int kGroup = 8;  // clusters whose tokens take the same rows of W one after the other

enum class Epilogue { kStore, kAdd, kGlu };

struct Arguments {
  const void* bias;
  void* y;  // or the residual
  int64_t y_stride, columns;
  float alpha;
  Activation activation;
  int m, k_tiles;
  int half_step;         // rows of W from one half of a tile to the other
  int column_step;       // columns of y from tile to tile
  int row_tiles, tiles;  // of clusters
};

// A position in the ring.
struct Position {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Tiles in groups of rows, so that those which run together share both operands in the L2 cache.
struct Tile {
  int row, column;

  __device__ Tile(const Arguments& a, int index) {
    const int columns = a.tiles / a.row_tiles, group = index / (kGroup * columns);
    const int rows = min(kGroup, a.row_tiles - group * kGroup), at = index - group * kGroup * columns;
    row = group * kGroup + at % rows;
    column = at / rows;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kCluster>
__device__ void copy_tiles(const Arguments& a, const CUtensorMap& x, const CUtensorMap& weight, uint32_t ring,
                           uint32_t full, uint32_t empty, int rank, int first, int step) {
  Position at;
  for (int index = first; index < a.tiles; index += step) {
    const Tile tile(a, index);
    const int x_row = (tile.row * kCluster + rank) * kRows, w_row = tile.column * a.column_step;
    for (int k = 0; k < a.k_tiles; ++k, at.advance()) {
      const uint32_t stage = ring + at.stage * kStageBytes, barrier = full + 8 * at.stage;
      barrier_wait_cluster(empty + 8 * at.stage, at.phase ^ 1);
      barrier_arrive_expecting(barrier, kStageBytes);
      tensor_load(stage, x, k * kDepth, x_row, 0, barrier, kEvictNormal);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t to = stage + kXBytes + half * kHalfBytes;
        const int row = w_row + half * a.half_step;
        if constexpr (kCluster == 1) {
          tensor_load(to, weight, k * kDepth, row, 0, barrier, kEvictNormal);
        } else if (half == rank) {
          tensor_load_multicast(to, weight, k * kDepth, row, 0, barrier, 3, kEvictNormal);
        }
      }
    }
  }
}

// Columns [column, column + 64) of a warp's 16 tokens, from first_row on: sums(j, i) are those of columns 8 j + pair
// and the next, of tokens lane / 4 (i = 0, 1) and lane / 4 + 8 (i = 2, 3).
template <typename T, Epilogue kEpilogue, typename Sums>
__device__ void store_columns(const Arguments& a, unsigned char* place, int first_row, int64_t column,
                              const Sums& sums) {
  using V = Vec<T, 8>;
  const int lane = threadIdx.x % 32;
  const auto vector = [&](int row, int chunk) {
    return reinterpret_cast<T*>(place + row * kRowBytes + ((chunk ^ row) & 7) * 16);
  };
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const to = vector(lane / 4 + 8 * half, j) + lane % 4 * 2;
      to[0] = from_float<T>(sums(j, 2 * half));
      to[1] = from_float<T>(sums(j, 2 * half + 1));
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, chunk = lane % 8;
    const int64_t at = column + chunk * 8;
    if (first_row + row < a.m && at < a.columns) {
      T* const y = static_cast<T*>(a.y) + (first_row + row) * a.y_stride + at;
      V result = V::load(vector(row, chunk));
      if constexpr (kEpilogue == Epilogue::kAdd) {
        result = add(V::load(y), V::of([&](int e) { return a.alpha * result[e]; }));
      }
      result.store(y);
    }
  }
  __syncwarp();  // the place is free
}

#endif

// Template parameters: kEpilogue and kCluster, since the accumulators take the registers that a choice at run time
// would need.
template <typename T, Epilogue kEpilogue, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
                const __grid_constant__ Arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared[];
  const uint32_t base = shared_address(shared), ring = (base + 1023) & ~1023u;
  const uint32_t store = ring + kStages * kStageBytes, full = store + kWarps * kStoreBytes;
  const uint32_t empty = full + 8 * kStages;
  const int warp = static_cast<int>(threadIdx.x) / 32, rank = kCluster > 1 ? cluster_rank() : 0;
  const int first = static_cast<int>(blockIdx.x) / kCluster, step = static_cast<int>(gridDim.x) / kCluster;
  if (threadIdx.x == 0) {
    tensor_map_prefetch(x);
    tensor_map_prefetch(weight);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, kCluster * kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_sync();
  pdl_wait();

  if (warp < 4) {
    fewer_registers<24>();
    if (warp == 0 && elect()) copy_tiles<kCluster>(a, x, weight, ring, full, empty, rank, first, step);
    __syncwarp();
  } else {
    more_registers<240>();
    const int group = warp / 4 - 1, lane = threadIdx.x % 32;
    float sums[kColumns / 2];
    const auto release = [&](int stage) {
      if (lane >= kCluster) return;
      barrier_arrive_cluster(cluster_address(empty + 8 * stage, lane));
    };
    Position at;
    for (int index = first; index < a.tiles; index += step) {
      wgmma_pin(sums);
      for (int k = 0, before = 0; k < a.k_tiles; ++k, before = at.stage, at.advance()) {
        const uint32_t rows = ring + at.stage * kStageBytes + group * 64 * kRowBytes;
        const uint32_t columns = ring + at.stage * kStageBytes + kXBytes;
        barrier_wait_cluster(full + 8 * at.stage, at.phase);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kDepth; d += 16) {
          wgmma<T>(sums, wgmma_operand(rows + d * 2), wgmma_operand(columns + d * 2), k > 0 || d > 0);
        }
        wgmma_commit();
        if (k > 0) {
          wgmma_wait<1>();
          release(before);
        }
      }
      wgmma_wait<0>();
      wgmma_pin(sums);
      release((at.stage + kStages - 1) % kStages);
      const Tile tile(a, index);
      const int row = (tile.row * kCluster + rank) * kRows + group * 64 + warp % 4 * 16;
      const int64_t column = static_cast<int64_t>(tile.column) * a.column_step;
      unsigned char* const place = shared + (store - base) + (warp - 4) * kStoreBytes;
      if constexpr (kEpilogue == Epilogue::kGlu) {
        activation::dispatch_on_device(a.activation, [&](auto act) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            store_columns<T, kEpilogue>(a, place, row, column + part * 64, [&](int j, int i) {
              const int gate = part * 32 + 4 * j + i;
              return activation::glu_of_sums<decltype(act), T>(sums[gate], sums[64 + gate]);
            });
          }
        });
      } else {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int64_t first_column = column + part * 64;
          store_columns<T, kEpilogue>(a, place, row, first_column, [&](int j, int i) {
            const int64_t own = first_column + 8 * j + lane % 4 * 2 + i % 2;
            const float bias = a.bias && own < a.columns ? to_float(static_cast<const T*>(a.bias)[own]) : 0.f;
            return sums[part * 32 + 4 * j + i] + bias;
          });
        }
      }
    }
  }
  if constexpr (kCluster > 1) cluster_sync();  // no copy and no arrival of the other block is under way
#endif
}

}  // namespace llmk::kernels::many_tokens
