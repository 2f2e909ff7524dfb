// Linear for many tokens on Hopper:
//
//   y = x W^T (+ bias)      y = act(x Wg^T) (x Wu^T)      residual += alpha (x W^T (+ bias))
//
// with the rounding of linear.cu. A gated activation, bias and residual are in the epilogue: [gate | up] is never in
// memory. So are both ends of a norm hand-off, of up to 128 tokens: norm_handoff.cuh.
//
// A tile is 128 tokens, or a few less so that all tiles have as many, by kColumns rows of W, with `glu` half of them of
// the gate and half of the up projection, so that a thread has both sums of an element. A warp copies 64 elements of K
// at a time into a ring, tile after tile, and two warpgroups multiply them:
//
//   kAlternate    each takes every other tile, so that the products of one run beside the epilogue of the other
//   kTogether     each takes 64 tokens of every tile, which may be wider: the sums of a thread are half as many
//   kSplit        likewise, of one tile and a part of K: where the tiles are too few to fill the GPU. The blocks that
//                 have the parts of a tile are in one cluster. Each sends its sums to the blocks that finish them, of
//                 which each has its share of the tokens, and which add them up in the order of K
//
// Of what the two blocks of a pair share, each copies one half to both. Grids are persistent, but those of kSplit. The
// design is that of CUTLASS on Hopper ("ping-pong", "cooperative" and split-K).
//
//                    shares_weight                                     else
//   block 0   tokens 0 ... 127,    all rows of W; copies x 0      all tokens, rows of W 0; copies half of x
//             and the first half of W to both                     to both, and W 0
//   block 1   tokens 128 ... 255, the same rows; copies x 1       the same tokens, rows 1; copies the other
//             and the other half of W to both                     half of x to both, and W 1
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/reduce.cuh"
#include "device/tma.cuh"
#include "device/vec.cuh"
#include "device/wgmma.cuh"
#include "kernels/linear/finish.cuh"
#include "norm_handoff.cuh"
#include "params/linear.h"
#include "plan.h"
#include "position.h"

namespace llmk::kernels::many_tokens {

constexpr int kRows = kGemmRows, kDepth = kGemmDepth;
constexpr int kWarps = 8, kThreads = 32 * (4 + kWarps);  // a warpgroup of which one warp copies, and two that compute
constexpr int kRowBytes = kDepth * kHalfBytes;           // of a stage, in 128-byte swizzle
constexpr int kStoreBytes = 16 * kRowBytes;              // of a warp: 16 tokens by 64 columns on their way to memory

// A stage of the ring: two halves of x, then two of W. The split sums take the place of the ring; others are stored by
// way of memory behind it.
template <int kColumns, GemmSchedule kSchedule>
struct Ring {
  static constexpr int kXBytes = kRows / 2 * kRowBytes, kWeightBytes = kColumns / 2 * kRowBytes;
  static constexpr int kStageBytes = 2 * (kXBytes + kWeightBytes);
  static constexpr int kStore = kSchedule == GemmSchedule::kSplit ? 0 : kWarps * kStoreBytes;
  static constexpr int kStages = (227 * 1024 - 1024 - kStore - kGemmHandoffBytes - 128) / kStageBytes;
  static constexpr size_t kSharedBytes = kStages * kStageBytes + kStore + 16 * kStages + 8 + kGemmHandoffBytes + 1024;
  static constexpr int kPitch = kColumns + (kColumns % 32 == 0 ? 8 : 24);  // floats; stores of sums cover all banks
  // The sums of the block, and of the others those that it adds up.
  static_assert(kSchedule != GemmSchedule::kSplit ||
                kRows * kPitch * 4 * (2 * kGemmMaxSplits - 1) / kGemmMaxSplits <= kStages * kStageBytes);
};

struct Arguments {
  const void* bias;
  void* y;  // or the residual
  int64_t y_stride, columns;
  float alpha;
  bool adds;  // y is the residual
  Activation activation;
  int m, k_tiles;
  int pair;  // blocks that share x or W: 1 or 2
  bool shares_weight;
  int splits;                   // of K
  bool weight_early;            // W may be read before the previous kernels have ended
  bool weight_once;             // each row of W is read by one pair
  int half_rows;                // tokens of one half of a tile, a multiple of 8
  int half_step;                // rows of W from one half of a tile to the other
  int column_step;              // columns of y from tile to tile
  int row_tiles, column_tiles;  // of pairs
  int tiles;
  NormHandoff norm;
};

// The place of a block in its cluster: the pairs of all splits, one after the other.
struct Member {
  int pair;        // its place in the pair
  int split;       // its part of K,
  int first_k, k;  // which are k_tiles from first_k on

  __device__ Member(const Arguments& a, int rank, bool is_split) : pair(rank), split(0), first_k(0), k(a.k_tiles) {
    if (!is_split) return;
    split = rank / a.pair;
    pair = rank - split * a.pair;
    first_k = a.k_tiles * split / a.splits;
    k = a.k_tiles * (split + 1) / a.splits - first_k;
  }
  __device__ int rank(const Arguments& a, int of_split, int of_pair) const { return of_split * a.pair + of_pair; }
};

// What a block computes. Of each 64 rows that a warpgroup multiplies, the first half_rows are tokens.
struct Tile {
  int row;     // the first token
  int column;  // the first column of y, and row of W

  __device__ Tile(const Arguments& a, int index, int pair) {
    const GemmPosition at(index, a.row_tiles, a.column_tiles);
    row = 2 * a.half_rows * (a.shares_weight ? a.pair * at.row + pair : at.row);
    column = a.column_step * (a.shares_weight ? at.column : a.pair * at.column + pair);
  }
  // Of row `r` of a half; -1 if there is none.
  __device__ int token(const Arguments& a, int half, int r) const {
    const int token = row + half * a.half_rows + r;
    return r < a.half_rows && token < a.m ? token : -1;
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
template <typename R>
__device__ void copy_tiles(const Arguments& a, const CUtensorMap& x, const CUtensorMap& weight, uint32_t ring,
                           uint32_t full, uint32_t empty, const Member& member, int first, int step) {
  const uint16_t both = static_cast<uint16_t>(3 << member.rank(a, member.split, 0));
  // One half of a tile, to this block; or to both blocks, if it is the half that this block copies of what they share.
  const auto copy_half = [&](const CUtensorMap& map, bool shared, int half, uint32_t to, int k, int row,
                             uint32_t barrier, uint64_t policy) {
    const int column = (member.first_k + k) * kDepth;
    if (!shared) {
      tensor_load(to, map, column, row, 0, barrier, policy);
    } else if (half == member.pair) {
      tensor_load_multicast(to, map, column, row, 0, barrier, both, policy);
    }
  };
  const auto copy_x = [&](const Tile& tile, int k, int stage) {
    for (int half = 0; half < 2; ++half) {
      copy_half(x, a.pair > 1 && !a.shares_weight, half, ring + stage * R::kStageBytes + half * R::kXBytes, k,
                tile.row + half * a.half_rows, full + 8 * stage, kEvictNormal);
    }
  };
  const auto copy_weight = [&, policy = a.weight_once ? kEvictFirst : kEvictNormal](const Tile& tile, int k,
                                                                                    int stage) {
    for (int half = 0; half < 2; ++half) {
      copy_half(weight, a.shares_weight, half, ring + stage * R::kStageBytes + 2 * R::kXBytes + half * R::kWeightBytes,
                k, tile.column + half * a.half_step, full + 8 * stage, policy);
    }
  };
  const uint32_t stage_bytes = 2 * (a.half_rows * kRowBytes + R::kWeightBytes);
  int early = 0;  // stages whose rows of W are under way
  if (a.weight_early) {
    const Tile tile(a, first, member.pair);
    for (; early < min(R::kStages, member.k); ++early) {
      barrier_arrive_expecting(full + 8 * early, stage_bytes);
      copy_weight(tile, early, early);
    }
  }
  pdl_wait();
  Position<R::kStages> at;
  for (int index = first; index < a.tiles; index += step) {
    const Tile tile(a, index, member.pair);
    for (int k = 0; k < member.k; ++k, at.advance()) {
      if (early > 0) {
        --early;
      } else {
        barrier_wait(empty + 8 * at.stage, at.phase ^ 1);
        barrier_arrive_expecting(full + 8 * at.stage, stage_bytes);
        copy_weight(tile, k, at.stage);
      }
      copy_x(tile, k, at.stage);
    }
  }
}

// Writes columns [column, column + kCount) of a warp's 16 tokens, from `row` up to `end`: values(j) are columns 8 j + i
// and the next, i = 2 (lane % 4), of tokens lane / 4 (.x, .y) and lane / 4 + 8 (.z, .w). `place`: kStoreBytes of the
// warp's.
template <typename T, int kCount, typename Values>
__device__ void store_columns(const Arguments& a, unsigned char* place, int row, int end, int64_t column,
                              const Values& values) {
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
    if (!inside || row + r >= end) continue;
    T* const to = y + (row + r) * a.y_stride;
    V result = V::load(vector(r, chunk));
    if (a.adds) result = add_to_residual(V::load(to), result, a.alpha);
    result.store(to);
  }
  __syncwarp();  // the place is free
}

// All of a warp's columns, 64 at a time.
template <typename T, int kCount, typename Values>
__device__ void store_all(const Arguments& a, unsigned char* place, int row, int end, int64_t column,
                          const Values& values) {
#pragma unroll
  for (int part = 0; part < kCount / 64; ++part) {
    store_columns<T, 64>(a, place, row, end, column + part * 64, [&](int j) { return values(part * 8 + j); });
  }
  if constexpr (kCount % 64 > 0) {
    store_columns<T, kCount % 64>(a, place, row, end, column + kCount / 64 * 64,
                                  [&](int j) { return values(kCount / 64 * 8 + j); });
  }
}

// Multiplies a thread's sums, of the rows of `rstd` and of 8 rows behind.
template <int kCount>
__device__ void normalize(float (&sums)[kCount], const float* rstd) {
  const float first = rstd[0], second = rstd[8];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] *= i % 4 < 2 ? first : second;
}

template <typename T, int kColumns, bool kGlu>
__device__ void epilogue(const Arguments& a, unsigned char* place, int row, int end, int64_t column,
                         const float (&sums)[kColumns / 2]) {
  if constexpr (kGlu) {
    activation::dispatch_on_device(a.activation, [&](auto act) {
      using Act = decltype(act);
      store_all<T, kColumns / 2>(a, place, row, end, column, [&](int j) {
        const auto value = [&](int i) { return glu_of_sums<Act, T>(sums[4 * j + i], sums[kColumns / 4 + 4 * j + i]); };
        return float4{value(0), value(1), value(2), value(3)};
      });
    });
  } else {
    const int pair = static_cast<int>(threadIdx.x) % 4 * 2;
    store_all<T, kColumns>(a, place, row, end, column, [&](int j) {
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

// The sums of the block's rows in shared memory, kPitch floats apart; behind them, those of the other splits for the
// rows that this block finishes.
template <int kPitch>
struct SplitSums {
  uint32_t place;
  int rows;  // that a block finishes

  __device__ SplitSums(const Arguments& a, uint32_t place) : place(place), rows(kRows / a.splits) {}
  __device__ uint32_t bytes() const { return rows * kPitch * 4; }
  __device__ uint32_t own(int row) const { return place + row * kPitch * 4; }
  __device__ uint32_t received(int split, int by) const { return own(kRows) + (split - (split > by)) * bytes(); }
};

// Adds up the squares of the rows that this block has finished, which lie where the first of 8 sums was, to a partial
// sum for each token, with 2, 4 or 8 lanes per row. A block whose columns are beyond the end leaves zeros.
template <int kVectors, int kPitch>
__device__ void reduce_squares(const Arguments& a, const Member& member, const Tile& tile,
                               const SplitSums<kPitch>& in_shared, float scale) {
  named_barrier(3, 32 * kWarps);
  const int thread = static_cast<int>(threadIdx.x) - 128, lanes = 32 * kWarps / in_shared.rows;
  const int row = member.split * in_shared.rows + thread / lanes, lane = thread % lanes;
  const int vectors = static_cast<int>(min(int64_t{kVectors}, (a.columns - tile.column) / 8));
  float sum[1] = {};
  for (int i = lane; i < vectors; i += lanes) sum[0] += shared_load_float(in_shared.own(row) + 32 * i);
  warp_sum(sum, lanes);
  const int token = tile.token(a, row / 64, row % 64);
  if (lane == 0 && token >= 0) a.norm.next_squares[tile.column / a.column_step * kHandoffTokens + token] = sum[0];
  if (tile.column + member.split + thread == 0) a.norm.next_squares[a.column_tiles * a.pair * kHandoffTokens] = scale;
}

// Adds up the sums of all splits, of the rows that are this block's to finish, and finishes them. `sent`: the barrier
// that waits for those of the other splits; `ready`, for what `place` has of a norm.
template <typename T, int kColumns, int kPitch>
__device__ void finish_splits(const Arguments& a, const Member& member, const Tile& tile,
                              const SplitSums<kPitch>& in_shared, uint32_t sent, uint32_t ready,
                              const HandoffPlace& place, const float (&sums)[kColumns / 2]) {
  const int thread = static_cast<int>(threadIdx.x) - 128, warp = thread / 32, lane = thread % 32;
  const uint32_t to = in_shared.own(warp * 16 + lane / 4) + lane % 4 * 8;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float* const s = sums + 4 * j;
    shared_store_float2(to + 32 * j, {s[0], s[1]});
    shared_store_float2(to + 32 * j + 32 * kPitch, {s[2], s[3]});
  }
  async_proxy_fence();
  cluster_wait();  // the rings of all blocks are free
  named_barrier(3, 32 * kWarps);
  if (thread < a.splits && thread != member.split) {
    const int rank = member.rank(a, thread, member.pair);
    bulk_send(cluster_address(in_shared.received(member.split, thread), rank), in_shared.own(thread * in_shared.rows),
              in_shared.bytes(), cluster_address(sent, rank));
  }
  using V = Vec<T, 8>;
  constexpr int kVectors = kColumns / 8;
  barrier_wait(sent, 0);
  cluster_arrive_relaxed();
  if (a.norm.is_used()) barrier_wait(ready, 0);
  const float scale = a.norm.scaled ? place.next_scale<T>() : 1.f, factor = 1.f / scale;
  for (int i = thread; i < in_shared.rows * kVectors; i += 32 * kWarps) {
    const int r = i / kVectors, c = i % kVectors * 8, row = member.split * in_shared.rows + r;
    const int token = tile.token(a, row / 64, row % 64);
    const int64_t column = tile.column + c;
    if (token < 0 || column >= a.columns) continue;
    T* const y = static_cast<T*>(a.y) + token * a.y_stride + column;
    V bias, residual, next_weight;
    if (a.bias) bias = V::load(static_cast<const T*>(a.bias) + column);
    if (a.adds) residual = V::load(y);
    if (a.norm.scaled) next_weight = V::load(static_cast<const T*>(a.norm.next_norm_weight) + column);
    const float rstd = a.norm.parts > 0 ? place.squares[0][token] : 1.f;
    float sum[8] = {};
    for (int split = 0; split < a.splits; ++split) {
      const uint32_t from = 4 * c + (split == member.split ? in_shared.own(row)
                                                           : in_shared.received(split, member.split) + 4 * r * kPitch);
      const float4 low = shared_load_float4(from), high = shared_load_float4(from + 16);
      sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
      sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
    }
    V result = V::of([&](int e) { return a.bias ? sum[e] * rstd + bias[e] : sum[e] * rstd; });
    if (a.adds) result = add_to_residual(residual, result, a.alpha);
    result.store(y);
    if (a.norm.scaled) {
      const V scaled = V::of([&](int e) { return result[e] * ((a.norm.next_offset + next_weight[e]) * factor); });
      scaled.store(static_cast<T*>(a.norm.scaled) + token * a.columns + column);
      float squares = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) squares += result[e] * result[e];
      shared_store_float(in_shared.own(row) + 4 * c, squares);  // this thread alone reads these sums, and has done so
    }
  }
  if (a.norm.scaled) reduce_squares<kVectors>(a, member, tile, in_shared, scale);
  cluster_wait();  // this block's sums have been sent, and may be overwritten
}

#endif

template <typename T, int kColumns, bool kGlu, GemmSchedule kSchedule>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
                const __grid_constant__ Arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using R = Ring<kColumns, kSchedule>;
  constexpr bool kAlternates = kSchedule == GemmSchedule::kAlternate, kSplits = kSchedule == GemmSchedule::kSplit;
  constexpr bool kHandsOff = kGlu || kSplits;  // a norm: takes the hand-off, or makes it
  extern __shared__ unsigned char shared[];
  const uint32_t base = shared_address(shared), ring = (base + 1023) & ~1023u;
  const uint32_t store = ring + R::kStages * R::kStageBytes, full = store + R::kStore;
  const uint32_t empty = full + 8 * R::kStages, sent = empty + 8 * R::kStages, ready = sent + 8;
  auto& handoff = *reinterpret_cast<HandoffPlace*>(shared + (ready + 8 - base));
  const int cluster = kSplits ? a.pair * a.splits : a.pair;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Member member(a, cluster > 1 ? cluster_rank() : 0, kSplits);
  const int first = static_cast<int>(blockIdx.x) / cluster, step = static_cast<int>(gridDim.x) / cluster;
  if (threadIdx.x == 0) {
    tensor_map_prefetch(x);
    tensor_map_prefetch(weight);
    for (int stage = 0; stage < R::kStages; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, a.pair * (kAlternates ? kWarps / 2 : kWarps));
    }
    barrier_init(sent, 1);
    barrier_init(ready, kGemmHelpers);
    barrier_init_fence();
    if (kSplits) barrier_arrive_expecting(sent, (a.splits - 1) * SplitSums<R::kPitch>(a, ring).bytes());
  }
  __syncthreads();
  if (cluster > 1) cluster_barrier_relaxed();

  if (warp < 4) {
    fewer_registers<24>();
    if (warp == 0) {
      if (elect()) copy_tiles<R>(a, x, weight, ring, full, empty, member, first, step);
      if (kSplits) cluster_arrive_relaxed();  // the first barrier of finish_splits()
      __syncwarp();
    } else {
      if (kSplits) cluster_arrive_relaxed();  // likewise, which need not wait for what follows
      if (kHandsOff && a.norm.is_used()) {
        const int column = Tile(a, first, member.pair).column;
        prepare_handoff<T>(a.norm, a.m, a.weight_early, static_cast<int>(a.columns), column, column + kColumns, handoff,
                           ready, warp - 1);
      }
    }
  } else {
    more_registers<240>();
    pdl_launch_dependents();
    pdl_wait();
    constexpr int kParts = kAlternates ? 2 : 1;  // of 64 tokens each
    const int group = warpgroup_number() - 1, lane = threadIdx.x % 32;
    unsigned char* const place = shared + (store - base) + (warp - 4) * kStoreBytes;
    float sums[kParts][kColumns / 2];
    const auto release = [&](int stage) {
      if (lane < a.pair) {
        barrier_arrive_cluster(cluster_address(empty + 8 * stage, member.rank(a, member.split, lane)));
      }
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
      for (int k = 0; k < member.k; ++k, before = at.stage, at.advance()) {
        const uint32_t stage = ring + at.stage * R::kStageBytes;
        const uint64_t rows = wgmma_operand(stage + (kAlternates ? 0 : group * R::kXBytes));
        const uint64_t columns = wgmma_operand(stage + 2 * R::kXBytes);
        barrier_wait(full + 8 * at.stage, at.phase);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kDepth; d += 16) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            wgmma<T>(sums[part], wgmma_advance(rows, part * R::kXBytes + d * kHalfBytes),
                     wgmma_advance(columns, d * kHalfBytes), k > 0 || d > 0);
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
      const Tile tile(a, index, member.pair);
      if constexpr (kSplits) {
        static_assert(!kGlu);
        cluster_arrive_relaxed();
        named_barrier(3, 32 * kWarps);  // the ring of this block is free
        finish_splits<T, kColumns>(a, member, tile, SplitSums<R::kPitch>(a, ring), sent, ready, handoff, sums[0]);
      } else {
        if (kHandsOff && a.norm.parts > 0) barrier_wait(ready, 0);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int first_row = tile.row + (kAlternates ? part : group) * a.half_rows;
          if (kHandsOff && a.norm.parts > 0)
            normalize(sums[part], &handoff.squares[0][first_row + warp % 4 * 16 + lane / 4]);
          epilogue<T, kColumns, kGlu>(a, place, first_row + warp % 4 * 16, min(a.m, first_row + a.half_rows),
                                      tile.column, sums[part]);
        }
      }
    }
  }
  if constexpr (kSplits) {
    if (warp < 4) {  // the barriers of finish_splits(): this warpgroup has arrived at the first
      cluster_wait();
      cluster_barrier_relaxed();
    }
  } else if (cluster > 1) {
    cluster_barrier_relaxed();  // no copy and no arrival of the other block is under way
  }
#endif
}

}  // namespace llmk::kernels::many_tokens
