// Gradients of attention over prompts on Hopper: what flash_attention_backward.cuh computes, by TMA and wgmma, for
// heads of up to 128 elements. The ideas are those of FlashAttention-3 (Shah et al. 2024), but for the sums, which stay
// in registers: the order of every sum is fixed, and the price is 7 products instead of 5.
//
// In both kernels a block has 128 rows (keys and values, or queries and grad_y) in shared memory. A warp copies tiles
// of 64 columns (the others) into a ring, and two warpgroups of 64 rows each compute:
//
//   keys       s^T = k q^T,  dp^T = v grad_y^T    grad_v += p^T grad_y,  grad_k += ds^T q    over queries of some heads
//   queries    s = q k^T,    dp = grad_y v^T      grad_q += ds k                             over keys
//
// Scores have the rows of their sums, so that p and ds are first operands of the second products without leaving the
// registers. A part of the query heads of a key head may be the work of a block; then it writes its sums in float32,
// and a third kernel adds those of a key.
#pragma once
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "flash_attention_backward.cuh"
#include "flash_attention_maps.h"
#include "tiles.h"

namespace llmk::kernels::flash {

// Two operands of rows and two of columns.
struct BackwardMaps {
  CUtensorMap rows[2], columns[2];
};

// Where heads are in a tensor: map_index().
struct MapStrides {
  int64_t head, batch;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What both kernels have in common: the memory of a block, its copies and its products.
template <typename T, int kDim>
struct BackwardBlock {
  using Size = Sm90Backward<kDim>;
  static constexpr int kWide = kDim % 128 == 0 ? 128 : 64;  // columns of sums of one wgmma

  char* memory;
  uint32_t base, rows_full;

  __device__ explicit BackwardBlock(int4* shared) {
    const uint32_t start = shared_address(shared);
    base = (start + 1023) & ~1023u;
    memory = reinterpret_cast<char*>(shared) + (base - start);
    rows_full = base + Size::kBarriers;
    if (threadIdx.x == 0) {
      barrier_init(rows_full, 1);
      for (int stage = 0; stage < Size::kStages; ++stage) {
        barrier_init(full(stage), 1);
        barrier_init(empty(stage), Size::kWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  __device__ uint32_t full(int step) const { return rows_full + 8 + step % Size::kStages * 16; }
  __device__ uint32_t empty(int step) const { return full(step) + 8; }
  __device__ static uint32_t phase(int step) { return static_cast<uint32_t>(step / Size::kStages) % 2; }
  __device__ uint32_t columns(int step, int operand) const {
    return base + Size::kRing + step % Size::kStages * Size::kStageBytes + operand * Size::kColumnBytes;
  }
  __device__ int statistics_offset(int step) const {
    return Size::kStatistics + step % Size::kStages * Size::kStatisticsBytes;
  }

  // By the thread that copies.
  __device__ void copy_box(uint32_t to, int box_bytes, const CUtensorMap& map, int row, const MapStrides& strides,
                           int head, int b, uint32_t barrier) const {
#pragma unroll
    for (int box = 0; box < Size::kBoxes; ++box) {
      tensor_load(to + box * box_bytes, map,
                  {box * 64, row, map_index(head, strides.head), map_index(b, strides.batch)}, barrier, kEvictNormal);
    }
  }
  __device__ void copy_rows(const BackwardMaps& maps, const MapStrides (&strides)[2], int first, int head,
                            int b) const {
    barrier_arrive_expecting(rows_full, 2 * Size::kRowBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_box(base + i * Size::kRowBytes, Size::kRowBoxBytes, maps.rows[i], first, strides[i], head, b, rows_full);
    }
  }
  // `statistics`: those of the columns, null for none; of_delta behind of_lse by `plane`.
  __device__ void copy_columns(int step, const BackwardMaps& maps, const MapStrides (&strides)[2], int first, int head,
                               int b, const float* statistics, int64_t plane) const {
    barrier_wait(empty(step), phase(step) ^ 1);
    barrier_arrive_expecting(full(step), Size::kStageBytes + (statistics ? Size::kStatisticsBytes : 0));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_box(columns(step, i), Size::kColumnBoxBytes, maps.columns[i], first, strides[i], head, b, full(step));
    }
    if (!statistics) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bulk_load(base + statistics_offset(step) + i * Size::kStatisticsBytes / 2, statistics + i * plane,
                Size::kStatisticsBytes / 2, full(step), kEvictNormal);
    }
  }

  // By the warpgroups. Waits for columns [first, first + kColumns), and makes those outside of [begin, end) zeros: even
  // no probability times infinity would be NaN. Those from `count` on, the end of the tensor, are zeros.
  __device__ void wait_for_columns(int step, int first, int begin, int end, int count) const {
    barrier_wait(full(step), phase(step));
    if (first >= begin && (first + Size::kColumns <= end || end == count)) return;
    const int thread = static_cast<int>(threadIdx.x) - 128;
    for (int i = thread; i < 2 * Size::kBoxes * Size::kColumns * 8; i += 256) {
      const int row = i / 8 % Size::kColumns;
      if (first + row >= begin && first + row < end) continue;
      const uint32_t at = columns(step, 0) - base + i * 16;  // both operands, box by box
      *reinterpret_cast<int4*>(memory + at) = int4{0, 0, 0, 0};
    }
    async_proxy_fence();
    named_barrier(5, 256);
  }
  __device__ void release(int step) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(step));
  }

  // s = a b^T of the warpgroup's 64 rows and all columns: of operand 0 or 1 of each.
  __device__ void begin_scores(float (&s)[Size::kColumns / 2], int operand, int group, int step) const {
    wgmma_pin(s);
    wgmma_fence();
    const uint64_t a = wgmma_operand(base + operand * Size::kRowBytes + group * 64 * 128);
    const uint64_t b = wgmma_operand(columns(step, operand));
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      wgmma<T>(s, wgmma_advance(a, d / 64 * Size::kRowBoxBytes + d % 64 * 2),
               wgmma_advance(b, d / 64 * Size::kColumnBoxBytes + d % 64 * 2), d > 0);
    }
    wgmma_commit();
  }
  // sums += x b, of columns' operand 0 or 1.
  __device__ void begin_sums(float (&sums)[kDim / kWide][kWide / 2], const uint32_t (&x)[Size::kColumns / 16][4],
                             int operand, int step) const {
    pin(sums);
    wgmma_fence();
    const uint64_t b = wgmma_rows(columns(step, operand), Size::kColumnBoxBytes);
#pragma unroll
    for (int n = 0; n < Size::kColumns / 16; ++n) {
#pragma unroll
      for (int c = 0; c < kDim / kWide; ++c) {
        wgmma_rows_of<T>(sums[c], x[n], wgmma_advance(b, c * (kWide / 64) * Size::kColumnBoxBytes + n * 2048));
      }
    }
    wgmma_commit();
  }
  __device__ static void pin(float (&sums)[kDim / kWide][kWide / 2]) {
#pragma unroll
    for (int c = 0; c < kDim / kWide; ++c) wgmma_pin(sums[c]);
  }
  __device__ static void set_zero(float (&sums)[kDim / kWide][kWide / 2]) {
#pragma unroll
    for (int c = 0; c < kDim / kWide; ++c) {
#pragma unroll
      for (int i = 0; i < kWide / 2; ++i) sums[c][i] = 0.f;
    }
  }
  __device__ static void pack_scores(uint32_t (&x)[Size::kColumns / 16][4], const float (&s)[Size::kColumns / 2]) {
#pragma unroll
    for (int n = 0; n < Size::kColumns / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = pack<T>(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
    }
  }

  // Of columns 8 d + pair and the next, row g (half 0) or g + 8 of the warp's 16.
  __device__ static float2 sums_of(const float (&sums)[kDim / kWide][kWide / 2], int d, int half) {
    const float* const at = &sums[d / (kWide / 8)][d % (kWide / 8) * 4 + 2 * half];
    return {at[0], at[1]};
  }
  // The sums times `scale`, through the place of an operand of the warpgroup's own rows, to rows [first, end) of
  // `target`.
  __device__ void store(const float (&sums)[kDim / kWide][kWide / 2], float scale, int operand, int group, T* target,
                        int64_t stride, int head_dim, int first, int end) const {
    const int lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
    const int first_row = group * 64 + threadIdx.x / 32 % 4 * 16;
    const auto vector = [&](int row, int chunk) {
      return reinterpret_cast<T*>(memory + operand * Size::kRowBytes + chunk / 8 * Size::kRowBoxBytes +
                                  (first_row + row) * 128 + ((chunk ^ row) & 7) * 16);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        const float2 x = sums_of(sums, d, half);
        *reinterpret_cast<uint32_t*>(vector(half * 8 + g, d) + pair) = pack<T>(x.x * scale, x.y * scale);
      }
    }
    __syncwarp();
    for (int i = lane; i < 16 * kDim / 8; i += 32) {
      const int row = i / (kDim / 8), chunk = i % (kDim / 8), at = first + first_row + row;
      if (at < end && chunk * 8 < head_dim) {
        Vec<T, 8>::load(vector(row, chunk)).store(target + at * stride + chunk * 8);
      }
    }
  }
  // The sums in float32.
  __device__ void store_part(const float (&sums)[kDim / kWide][kWide / 2], int group, float* target, int64_t stride,
                             int head_dim, int first, int end) const {
    const int lane = threadIdx.x % 32, pair = 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first + group * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        if (at < end && 8 * d < head_dim) {
          *reinterpret_cast<float2*>(target + at * stride + 8 * d + pair) = sums_of(sums, d, half);
        }
      }
    }
  }
};

#endif

// grad_k and grad_v of a tile of keys: over the queries that see any of them, of a part of the heads that have them.
// `parts`: the sums of each part in float32, [splits, 2, batch, k_tokens, kv_heads, head_dim]; null if there is one.
template <typename T, int kDim>
__global__ void __launch_bounds__(Sm90Backward<kDim>::kThreads, 1)
    flash_attention_backward_keys_sm90_kernel(const FlashAttentionBackwardParams params,
                                              const __grid_constant__ BackwardMaps maps, int splits, float* parts) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Size = Sm90Backward<kDim>;
  constexpr int kColumns = Size::kColumns;
  extern __shared__ int4 shared[];
  const BackwardBlock<T, kDim> block(shared);
  const int head_dim = static_cast<int>(params.head_dim), q_tokens = static_cast<int>(params.q_tokens);
  const int kv_heads = static_cast<int>(params.kv_heads), heads = static_cast<int>(params.heads) / kv_heads / splits;
  const unsigned of_tile = static_cast<unsigned>(params.batch * kv_heads * splits), at = blockIdx.x % of_tile;
  const int first = static_cast<int>(blockIdx.x / of_tile) * Size::kRows;  // key
  const int split = static_cast<int>(at % splits), kv_head = static_cast<int>(at / splits % kv_heads);
  const int b = static_cast<int>(at / splits / kv_heads), first_head = (kv_head * splits + split) * heads;
  pdl_launch_dependents();
  pdl_wait();
  const Visible visible(params, b);
  const int last = min(first + Size::kRows, visible.k_tokens) - 1;
  const int begin = visible.first_query(first), end = visible.end_query(last);  // of the queries that see any of them
  const int first_tile = begin / kColumns, tiles = begin < end ? (end + kColumns - 1) / kColumns - first_tile : 0;
  const int steps = tiles * heads;  // a tile of queries of a head each

  if (threadIdx.x < 128) {  // copies
    fewer_registers<24>();
    if (threadIdx.x >= 32 || !elect() || steps == 0) return;
    block.copy_rows(maps, {{params.k_head, params.k_batch}, {params.v_head, params.v_batch}}, first, kv_head, b);
    const int64_t padded = padded_q_tokens(params), plane = params.batch * params.heads * padded;
    for (int step = 0; step < steps; ++step) {
      const int head = first_head + step / tiles, query = (first_tile + step % tiles) * kColumns;
      block.copy_columns(step, maps, {{params.q_head, params.q_batch}, {params.grad_y_head, params.grad_y_batch}},
                         query, head, b, params.statistics + (b * params.heads + head) * padded + query, plane);
    }
    return;
  }

  more_registers<240>();
  const int group = warpgroup_number() - 1, lane = threadIdx.x % 32;
  const int key = first + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4, pair = 2 * (lane % 4);
  const ScoreGradient gradient(params);
  float v_sums[kDim / block.kWide][block.kWide / 2], k_sums[kDim / block.kWide][block.kWide / 2];
  block.set_zero(v_sums);
  block.set_zero(k_sums);
  // The queries that see all the keys, and those that see each of this lane's.
  const int all_begin = visible.first_query(last, begin, end), all_end = visible.end_query(first, begin, end);
  const int from[2] = {visible.first_query(key, begin, end), visible.first_query(key + 8, begin, end)};
  const int to[2] = {visible.end_query(key, begin, end), visible.end_query(key + 8, begin, end)};
  if (steps > 0) barrier_wait(block.rows_full, 0);
  gradient.dispatch_cap([&](auto capped) {
    for (int step = 0; step < steps; ++step) {
      const int query = (first_tile + step % tiles) * kColumns, last_query = min(query + kColumns, q_tokens) - 1;
      const bool whole = query >= all_begin && last_query < all_end;
      const float* const statistics = reinterpret_cast<const float*>(block.memory + block.statistics_offset(step));
      float s[kColumns / 2], ds[kColumns / 2];
      uint32_t x[kColumns / 16][4];
      block.wait_for_columns(step, query, begin, end, q_tokens);
      block.begin_scores(s, 0, group, step);
      block.begin_scores(ds, 1, group, step);
      wgmma_wait<1>();
      wgmma_pin(s);
      if (capped.value) {
        wgmma_wait<0>();
        wgmma_pin(ds);
      }
      const auto for_all = [&](const auto& body) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = n * 8 + pair + i;
#pragma unroll
            for (int half = 0; half < 2; ++half) body(column, s[4 * n + 2 * half + i], ds[4 * n + 2 * half + i], half);
          }
        }
      };
      for_all([&](int column, float& p, float& of_score, int) {
        if constexpr (capped.value) {
          gradient.template apply<true>(p, of_score, statistics[column], statistics[kColumns + column]);
        } else {
          p = exp2_approximate(fmaf(p, gradient.factor, -statistics[column]));
        }
      });
      const auto hide = [&](bool scores) {  // what a query does not see
        for_all([&](int column, float& p, float& of_score, int half) {
          if (query + column < from[half] || query + column >= to[half]) (scores ? p : of_score) = 0.f;
        });
      };
      if (!whole) hide(true);
      block.pack_scores(x, s);
      block.begin_sums(v_sums, x, 1, step);
      if (!capped.value) {
        wgmma_wait<1>();
        wgmma_pin(ds);
      }
      for_all([&](int column, float& p, float& of_score, int) {
        of_score = p * (capped.value ? of_score : of_score - statistics[kColumns + column]);
      });
      if (!whole) hide(false);
      uint32_t dx[kColumns / 16][4];
      block.pack_scores(dx, ds);
      block.begin_sums(k_sums, dx, 0, step);
      wgmma_wait<0>();
      block.pin(v_sums);
      block.pin(k_sums);
      block.release(step);
    }
  });

  named_barrier(1 + group, 128);  // the warpgroup has read its keys and values
  const int64_t target = (static_cast<int64_t>(b) * params.k_tokens * kv_heads + kv_head) * head_dim;
  const int64_t stride = static_cast<int64_t>(kv_heads) * head_dim, all = params.batch * params.k_tokens * stride;
  if (parts) {
    float* const part = parts + 2 * split * all + target;
    block.store_part(k_sums, group, part, stride, head_dim, first, visible.k_tokens);
    block.store_part(v_sums, group, part + all, stride, head_dim, first, visible.k_tokens);
  } else {
    block.store(k_sums, gradient.scale, 0, group, static_cast<T*>(params.grad_k) + target, stride, head_dim, first,
                visible.k_tokens);
    block.store(v_sums, 1.f, 1, group, static_cast<T*>(params.grad_v) + target, stride, head_dim, first,
                visible.k_tokens);
  }
#endif
}

// grad_q of a tile of queries of a head: over the keys that any of them sees. Tiles of the last queries start first: if
// causal, they see the most keys.
template <typename T, int kDim>
__global__ void __launch_bounds__(Sm90Backward<kDim>::kThreads, 1)
    flash_attention_backward_queries_sm90_kernel(const FlashAttentionBackwardParams params,
                                                 const __grid_constant__ BackwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Size = Sm90Backward<kDim>;
  constexpr int kColumns = Size::kColumns;
  extern __shared__ int4 shared[];
  const BackwardBlock<T, kDim> block(shared);
  const int head_dim = static_cast<int>(params.head_dim), q_tokens = static_cast<int>(params.q_tokens);
  const int heads = static_cast<int>(params.heads);
  const unsigned of_tile = static_cast<unsigned>(params.batch * heads);
  const int first =
      ((q_tokens + Size::kRows - 1) / Size::kRows - 1 - static_cast<int>(blockIdx.x / of_tile)) * Size::kRows;
  const int b = static_cast<int>(blockIdx.x % of_tile) / heads, h = static_cast<int>(blockIdx.x % of_tile) % heads;
  pdl_launch_dependents();
  pdl_wait();
  const Visible visible(params, b);
  const int last = min(first + Size::kRows, q_tokens) - 1;
  const int begin = visible.begin(first), end = visible.end(last);          // of the keys that any of the queries sees
  const int all_begin = visible.begin(last), all_end = visible.end(first);  // of those that all of them see
  const int tiles = begin < end ? (end - begin + kColumns - 1) / kColumns : 0;

  if (threadIdx.x < 128) {  // copies
    fewer_registers<24>();
    if (threadIdx.x >= 32 || !elect() || tiles == 0) return;
    const int kv_head = h / (heads / static_cast<int>(params.kv_heads));
    block.copy_rows(maps, {{params.q_head, params.q_batch}, {params.grad_y_head, params.grad_y_batch}}, first, h, b);
    for (int tile = 0; tile < tiles; ++tile) {
      block.copy_columns(tile, maps, {{params.k_head, params.k_batch}, {params.v_head, params.v_batch}},
                         begin + tile * kColumns, kv_head, b, nullptr, 0);
    }
    return;
  }

  more_registers<240>();
  const int group = warpgroup_number() - 1, lane = threadIdx.x % 32, pair = 2 * (lane % 4);
  const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int64_t padded = padded_q_tokens(params), plane = params.batch * params.heads * padded;
  const float* const statistics = params.statistics + (static_cast<int64_t>(b) * heads + h) * padded + first + row;
  const float lse[2] = {statistics[0], statistics[8]}, delta[2] = {statistics[plane], statistics[plane + 8]};
  const ScoreGradient gradient(params);
  float sums[kDim / block.kWide][block.kWide / 2];
  block.set_zero(sums);
  if (tiles > 0) barrier_wait(block.rows_full, 0);
  gradient.dispatch_cap([&](auto capped) {
    for (int tile = 0; tile < tiles; ++tile) {
      const int key = begin + tile * kColumns;
      const bool whole = key >= all_begin && key + kColumns <= all_end;
      float s[kColumns / 2], ds[kColumns / 2];
      uint32_t x[kColumns / 16][4];
      block.wait_for_columns(tile, key, begin, end, visible.k_tokens);
      block.begin_scores(s, 0, group, tile);
      block.begin_scores(ds, 1, group, tile);
      wgmma_wait<0>();
      wgmma_pin(s);
      wgmma_pin(ds);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first + row + 8 * half;
        const int from = whole ? 0 : visible.begin(query) - key - pair;
        const int to = whole ? 0 : visible.end(query) - key - pair;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &p = s[4 * n + 2 * half + i], &of_score = ds[4 * n + 2 * half + i];
            gradient.template apply<capped.value>(p, of_score, lse[half], delta[half]);
            of_score *= p;
            if (!whole && (n * 8 + i < from || n * 8 + i >= to)) of_score = 0.f;
          }
        }
      }
      block.pack_scores(x, ds);
      block.begin_sums(sums, x, 0, tile);
      wgmma_wait<0>();
      block.pin(sums);
      block.release(tile);
    }
  });

  named_barrier(1 + group, 128);  // the warpgroup has read its queries
  T* const target = static_cast<T*>(params.grad_q) + (static_cast<int64_t>(b) * q_tokens * heads + h) * head_dim;
  block.store(sums, gradient.scale, 0, group, target, params.heads * head_dim, head_dim, first, q_tokens);
#endif
}

// grad_k (`which` 0) or grad_v from its parts, always in the same order. `count`: its elements.
template <typename T>
__global__ void __launch_bounds__(256) add_parts_kernel(const FlashAttentionBackwardParams params, const float* parts,
                                                        int splits, int64_t count, int which) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * 8;
  if (at >= count) return;
  float total[8] = {};
  for (int split = 0; split < splits; ++split) {
    const float* const part = parts + (2 * split + which) * count + at;
    const auto low = Vec<float, 4>::load(part), high = Vec<float, 4>::load(part + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += low[i], total[4 + i] += high[i];
  }
  const float scale = which ? 1.f : static_cast<float>(params.softmax_scale);
  T* const target = static_cast<T*>(which ? params.grad_v : params.grad_k);
  Vec<T, 8>::of([&](int i) { return total[i] * scale; }).store(target + at);
}

}  // namespace llmk::kernels::flash
