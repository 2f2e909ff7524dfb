// Attention over prompts on Hopper (FlashAttention-3, Shah et al. 2024): what flash_attention.cuh computes, by TMA and
// wgmma.
//
// A block takes 128 queries of one head at a time: a warp copies keys and values, a tile at a time, and two warpgroups
// of 64 queries each compute. A warpgroup's softmax of one tile runs beside its product with the values of the tile
// before, and beside the products of the other warpgroup, since they issue theirs in turn ("ping-pong"):
//
//   copy      K 0 |K 1, V 0         |K 2, V 1         |
//   compute       |q k[0]  |softmax |q k[1], p v[0]   |
//                          |                |softmax  |q k[2], p v[1] ...
//
// The first tile begins at the first key that any of the queries sees, so that no padding is read; with pages or a mask
// at most a tile before, at a multiple of its size. The grid is persistent: the thread that copies is ahead, so that
// the queries and the first keys of a block's next work are there when the last one ends. It says what that work is,
// too, by shared memory: to find out takes some 500 cycles.
//
// From 4096 tokens on an H200 runs at its limit of power, so that its clock falls as fewer cycles are lost. Of the 2690
// cycles that two warpgroups take per tile of 128 keys (heads of 128), 2048 are products. What was tried against the
// others (one H200, 2048 to 16384 tokens, heads of 64 to 256):
//
//   change                                                               | time
//   ---------------------------------------------------------------------|----------------------------------
//   the copies are waited for before the turn, and the products with     | 0 to 2 % more; 7 %, heads of 64
//   values between the maxima and the exponents, which hide corrections  |
//   no turns                                                             | 2 % less to 1 % more
//   no correction by 1                                                   | 2 % less to 4 % more
//   probabilities packed before the wait, into registers of their own    | the same; heads of 128 spill: 40 %
//
// Sums are corrected after every tile. To do so only where the maximum has risen by a factor of 2^8, as
// FlashAttention-4 does, was 1 to 4 % slower from 2048 tokens on (one H200), with heads of 64 to 256.
// Clusters of two blocks with neighbouring queries, each of which copied half of the keys and values to both, were no
// faster: 0 to 1 % from 2048 tokens on, and up to 1024 tokens 2 % slower; with heads of 64 and 256 3 to 6 % slower.
#pragma once
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "flash_attention_maps.h"
#include "key_pages.cuh"
#include "products.cuh"
#include "score_bias.cuh"
#include "softmax_rows.cuh"
#include "tiles.h"

namespace llmk::kernels::flash {

struct Maps {
  // Boxes of 64 columns and as many rows as a tile has, or a page if that is less; one head, or batch, where all are
  // the same memory.
  CUtensorMap q, k, v;
};

// The barriers of a stage of queries, of keys or of values.
struct Stage {
  uint32_t full, empty;
};

// Whether tiles of keys begin at multiples of their size: then a tile is a part of a page or some whole ones, and rows
// of a mask can be read in pairs.
template <Extra kExtra>
constexpr bool kTilesFromZero = kExtra == Extra::kBias || kExtra == Extra::kPages;

// 128 queries of a head, and the tiles of keys that they see.
template <int kDim, Extra kExtra>
struct Work {
  int first, b, h, begin, end;
  int origin, tiles;  // where the first tile begins, and how many there are

  // One section after the other: the heads of `section` key heads, whose keys and values stay in the L2 cache. In a
  // section queries that see the same keys are neighbours. The last section begins with those that have most tiles, the
  // one before ends with them, and so on, so that what the blocks do at the same time is about as long.
  __device__ Work(const FlashAttentionParams& params, int section, int index) {
    using Size = Sm90Tile<kDim>;
    const int q_tokens = static_cast<int>(params.q_tokens), q_tiles = (q_tokens + Size::kQueries - 1) / Size::kQueries;
    const int heads = static_cast<int>(params.heads), group = heads / static_cast<int>(params.kv_heads);
    const int of_section = section * group * q_tiles, number = index / of_section, at = index - number * of_section;
    const int in_section = min(section, static_cast<int>(params.batch * params.kv_heads) - number * section) * group;
    const int head = number * section * group + at % in_section;  // of all sequences
    const int sections = (static_cast<int>(params.batch * params.kv_heads) + section - 1) / section;
    const int row = at / in_section;
    first = ((sections - number) % 2 == 1 ? q_tiles - 1 - row : row) * Size::kQueries;
    b = head / heads;
    h = head % heads;
    const Visible visible(params, b);
    begin = visible.begin(first);
    end = visible.end(min(first + Size::kQueries, q_tokens) - 1);
    origin = kTilesFromZero<kExtra> ? begin / Size::kKeys * Size::kKeys : begin;
    tiles = begin < end ? (end - origin + Size::kKeys - 1) / Size::kKeys : 0;
  }

  // From and to shared memory, in two vectors: the compiler copies a struct byte by byte.
  __device__ explicit Work(const char* memory) {
    const int4* const words = reinterpret_cast<const int4*>(memory);
    const int4 x = words[0], y = words[1];
    first = x.x, b = x.y, h = x.z, begin = x.w, end = y.x, origin = y.y, tiles = y.z;
  }
  __device__ void store(char* memory) const {
    int4* const words = reinterpret_cast<int4*>(memory);
    words[0] = {first, b, h, begin}, words[1] = {end, origin, tiles, 0};
  }
};

// Calls body(index, number) for all the work of a block, number = 0, 1, 2, ... Every other round goes backwards, so
// that all blocks get as much.
template <typename Body>
__device__ void for_all_work(int count, Body&& body) {
  int number = 0;
  for (int64_t round = 0; round < count; round += gridDim.x, ++number) {
    const int64_t index = round + (number % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (index < count) body(static_cast<int>(index), number);
  }
}

// `page_rows`: of a box, where pages are smaller than a tile.
template <typename T, int kDim, Extra kExtra>
__global__ void __launch_bounds__(Sm90Tile<kDim>::kThreads, 1)
    flash_attention_sm90_kernel(const FlashAttentionParams params, const __grid_constant__ Maps maps, int section,
                                int count, int page_rows) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Size = Sm90Tile<kDim>;
  using WorkOf = Work<kDim, kExtra>;
  constexpr bool kPaged = kExtra == Extra::kPages;
  constexpr int kKeys = Size::kKeys, kStages = Size::kStages, kQueryStages = Size::kQueryStages, kWarps = 8;
  constexpr int kKeyBytes = Size::kKeyBytes;
  extern __shared__ int4 shared[];
  const uint32_t queries_at = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t k_at = queries_at + kQueryStages * Size::kQueryBytes, v_at = k_at + kStages * kKeyBytes;
  const uint32_t barriers = v_at + kStages * kKeyBytes;
  const auto stage_at = [&](int index) { return Stage{barriers + index * 16, barriers + index * 16 + 8}; };
  const auto k_stage = [&](int tile) { return stage_at(tile % kStages); };
  const auto v_stage = [&](int tile) { return stage_at(kStages + tile % kStages); };
  const auto q_stage = [&](int number) { return stage_at(2 * kStages + number % kQueryStages); };
  const auto phase = [](int tile) { return static_cast<uint32_t>(tile / kStages) % 2; };
  const auto q_phase = [](int number) { return static_cast<uint32_t>(number / kQueryStages) % 2; };
  const auto pointer = [&](uint32_t at) { return reinterpret_cast<char*>(shared) + (at - shared_address(shared)); };
  const auto work_at = [&](int number) {
    return pointer(barriers + Size::kBarrierBytes + number % kQueryStages * Size::kWorkBytes);
  };
  if (threadIdx.x == 0) {
    tensor_map_prefetch(maps.q);
    tensor_map_prefetch(maps.k);
    tensor_map_prefetch(maps.v);
    const auto init = [](const Stage& of) {
      barrier_init(of.full, 1);
      barrier_init(of.empty, kWarps);
    };
    for (int stage = 0; stage < 2 * kStages + kQueryStages; ++stage) init(stage_at(stage));
    barrier_init_fence();
  }
  __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  int done = 0;  // tiles of earlier work

  if (threadIdx.x < 128) {                // copies
    fewer_registers<kPaged ? 40 : 24>();  // three warpgroups of 168, together
    if (threadIdx.x >= 32 || !elect()) return;
    for_all_work(count, [&](int index, int number) {
      const WorkOf work(params, section, index);
      const int kv_head = work.h / static_cast<int>(params.heads / params.kv_heads);
      const auto copy = [&](uint32_t to, int box_bytes, const CUtensorMap& map, int row, int head, int batch,
                            uint32_t full) {
        barrier_arrive_expecting(full, Size::kBoxes * box_bytes);
#pragma unroll
        for (int box = 0; box < Size::kBoxes; ++box) {
          tensor_load(to + box * box_bytes, map, {box * 64, row, head, batch}, full, kEvictNormal);
        }
      };
      const auto copy_keys = [&](uint32_t to, const CUtensorMap& map, int tile, int64_t head, int64_t batch,
                                 const Stage& stage) {
        barrier_wait(stage.empty, phase(done + tile) ^ 1);
        const uint32_t to_stage = to + (done + tile) % kStages * kKeyBytes;
        const int key = work.origin + tile * kKeys, of_head = map_index(kv_head, head);
        if constexpr (kPaged) {
          const KeyPages pages(params, work.b);
          barrier_arrive_expecting(stage.full, kKeyBytes);
          for (int row = 0; row < kKeys; row += page_rows) {
            const int2 at = pages.find(key + row);  // what is outside of the map is zeros
#pragma unroll
            for (int box = 0; box < Size::kBoxes; ++box) {
              tensor_load(to_stage + box * Size::kKeyBoxBytes + row * 128, map, {box * 64, at.y, of_head, at.x},
                          stage.full, kEvictNormal);
            }
          }
        } else {
          copy(to_stage, Size::kKeyBoxBytes, map, key, of_head, map_index(work.b, batch), stage.full);
        }
      };
      const auto copy_k = [&](int tile) {
        copy_keys(k_at, maps.k, tile, params.k_head, params.k_batch, k_stage(done + tile));
      };
      const auto copy_v = [&](int tile) {
        copy_keys(v_at, maps.v, tile, params.v_head, params.v_batch, v_stage(done + tile));
      };
      if (work.tiles > 0) copy_k(0);  // while the queries' place may still be that of results
      const Stage queries = q_stage(number);
      barrier_wait(queries.empty, q_phase(number) ^ 1);
      work.store(work_at(number));
      if (work.tiles == 0) {
        barrier_arrive(queries.full);
      } else {
        const uint32_t q_at = queries_at + number % kQueryStages * Size::kQueryBytes;
        copy(q_at, Size::kQueryBoxBytes, maps.q, work.first, map_index(work.h, params.q_head),
             map_index(work.b, params.q_batch), queries.full);
        copy_v(0);
      }
      for (int tile = 1; tile < work.tiles; ++tile) copy_k(tile), copy_v(tile);
      done += work.tiles;
    });
    return;
  }

  more_registers<kPaged ? 232 : 240>();
  const int group = warpgroup_number() - 1, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
  const int q_tokens = static_cast<int>(params.q_tokens), head_dim = static_cast<int>(params.head_dim);
  const ScoreScale<kExtra> scale(params);
  for_all_work(count, [&](int, int number) {
    barrier_wait(q_stage(number).full, q_phase(number));
    const WorkOf work(work_at(number));
    const uint32_t q_at = queries_at + number % kQueryStages * Size::kQueryBytes;
    const int first = work.first + group * 64, last = min(first + 64, q_tokens) - 1, tiles = work.tiles;
    const Visible visible(params, work.b);
    // Of the keys that all queries see.
    const int all_begin = visible.begin(last), all_end = first <= last ? visible.end(first) : 0;
    constexpr int kColumns = kDim % 128 == 0 ? 128 : 64;  // of one wgmma
    float s[kKeys / 2], y[kDim / kColumns][kColumns / 2];
    uint32_t p[kKeys / 16][4];
    SoftmaxRow rows[2];
    const auto sum = [&](int d, int i) -> float& {  // of columns 8 d + pair and the next, two rows
      return y[d / (kColumns / 8)][d % (kColumns / 8) * 4 + i];
    };
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) sum(d, 0) = sum(d, 1) = sum(d, 2) = sum(d, 3) = 0.f;

    const auto pin_sums = [&] {
#pragma unroll
      for (int c = 0; c < kDim / kColumns; ++c) wgmma_pin(y[c]);
    };
    const auto release = [&](const Stage& stage) {
      if (lane == 0) barrier_arrive(stage.empty);
    };
    const auto begin_scores = [&](int tile) {  // s = q k^T
      barrier_wait(k_stage(done + tile).full, phase(done + tile));
      wgmma_pin(s);
      wgmma_fence();
      const uint64_t q = wgmma_operand(q_at + group * 64 * 128);
      const uint64_t k = wgmma_operand(k_at + (done + tile) % kStages * kKeyBytes);
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        wgmma<T>(s, wgmma_advance(q, d / 64 * Size::kQueryBoxBytes + d % 64 * 2),
                 wgmma_advance(k, d / 64 * Size::kKeyBoxBytes + d % 64 * 2), d > 0);
      }
      wgmma_commit();
    };
    const auto begin_values = [&](int tile) {  // y += p v
      barrier_wait(v_stage(done + tile).full, phase(done + tile));
      pin_sums();
      wgmma_fence();
      const uint64_t v = wgmma_rows(v_at + (done + tile) % kStages * kKeyBytes, Size::kKeyBoxBytes);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
        for (int c = 0; c < kDim / kColumns; ++c) {
          wgmma_rows_of<T>(y[c], p[n], wgmma_advance(v, c * (kColumns / 64) * Size::kKeyBoxBytes + n * 2048));
        }
      }
      wgmma_commit();
    };
    // Zeros instead of the values of rows [from, to) of a tile, which may be padding that is not a number: even no
    // probability times NaN is NaN. Each warpgroup writes them for itself.
    const auto clear = [&](int tile, int from, int to) {
      if (from >= to) return;
      barrier_wait(v_stage(done + tile).full, phase(done + tile));
      char* const rows_from = pointer(v_at + (done + tile) % kStages * kKeyBytes + from * 128);
      const int vectors = (to - from) * 8;
      for (int i = threadIdx.x % 128; i < Size::kBoxes * vectors; i += 128) {
        const int box = i / vectors, vector = i % vectors;
        *reinterpret_cast<int4*>(rows_from + box * Size::kKeyBoxBytes + vector * 16) = int4{0, 0, 0, 0};
      }
      async_proxy_fence();
      named_barrier(1 + group, 128);
    };
    // Of what is before the first key that any query sees, and of what is behind the last one.
    const auto clear_before = [&] { clear(0, 0, work.begin - work.origin); };
    const auto clear_behind = [&] {
      if (!params.k_end && !params.k_seqlens) return;
      if (!kPaged && work.end == params.k_tokens) return;  // the copy has written zeros
      clear(tiles - 1, work.end - work.origin - (tiles - 1) * kKeys, kKeys);
    };
    const auto pack_scores = [&] {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = pack<T>(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
      }
    };
    const auto softmax_of = [&](int tile, bool whole, float(&corrections)[2]) {
      const int column = work.origin + tile * kKeys + pair;
      const auto score = [&](int half, int n, int i) -> float& { return s[4 * n + 2 * half + i]; };
      int from[2] = {}, to[2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first + warp * 16 + half * 8 + g;
        if constexpr (kExtra == Extra::kBias) {
          HeadBias<T>(params, work.b, work.h, visible.shift)
              .template exponents_of_row<kKeys / 8>(scale, query, column,
                                                    [&](int n, int i) -> float& { return score(half, n, i); });
        }
        if (!whole) from[half] = visible.begin(query) - column, to[half] = visible.end(query) - column;
      }
      update_rows<2, kKeys / 8>(rows, scale, whole, from, to, score, corrections);
    };
    // A branch for both rows, so that there is none between them, and that the compiler cannot move the wait for the
    // products with values, which comes next, in between.
    const auto softmax = [&](int tile, float(&corrections)[2]) {
      const int key = work.origin + tile * kKeys;
      if (key >= all_begin && key + kKeys <= all_end) {
        softmax_of(tile, true, corrections);
      } else {
        softmax_of(tile, false, corrections);
      }
    };

    if (tiles > 0) {
      float corrections[2];
      // The warpgroups issue their products in turn, so that the softmax of one runs beside the products of the other.
      const int turn = 3 + group, other = 4 - group;  // named barriers
      if (group == 1 && tiles > 1) named_barrier_arrive(other, 256);
      begin_scores(0);
      wgmma_wait<0>();
      wgmma_pin(s);
      release(k_stage(done));
      softmax(0, corrections);
      pack_scores();
      if (kTilesFromZero<kExtra>) clear_before();
      for (int tile = 1; tile < tiles; ++tile) {
        named_barrier(turn, 256);
        begin_scores(tile);
        begin_values(tile - 1);
        if (group == 0 || tile + 1 < tiles) named_barrier_arrive(other, 256);
        wgmma_wait<1>();
        wgmma_pin(s);
        release(k_stage(done + tile));
        softmax(tile, corrections);
        wgmma_wait<0>();
        pin_sums();
        release(v_stage(done + tile - 1));
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
          sum(d, 0) *= corrections[0], sum(d, 1) *= corrections[0];
          sum(d, 2) *= corrections[1], sum(d, 3) *= corrections[1];
        }
        pack_scores();
      }
      clear_behind();
      begin_values(tiles - 1);
      wgmma_wait<0>();
      pin_sums();
      release(v_stage(done + tiles - 1));
    }

    // The result goes through the place of the warpgroup's own queries to whole vectors.
    named_barrier(1 + group, 128);
    const int64_t q_head = static_cast<int64_t>(work.b) * params.heads + work.h;
    float* const lse = params.lse ? static_cast<float*>(params.lse) + q_head * q_tokens : nullptr;
    const float sink = params.sinks ? to_float(static_cast<const T*>(params.sinks)[work.h]) * kLog2E : -INFINITY;
    char* const memory = pointer(q_at);
    const auto vector = [&](int row, int chunk) {  // row of the warp
      const int of_block = group * 64 + warp * 16 + row;
      return reinterpret_cast<T*>(memory + chunk / 8 * Size::kQueryBoxBytes + of_block * 128 +
                                  ((chunk ^ row) & 7) * 16);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + g, query = first + warp * 16 + row;
      float log_sum;
      const float scale_of_row = rows[half].finish(scale, sink, log_sum);
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        *reinterpret_cast<uint32_t*>(vector(row, d) + pair) =
            pack<T>(sum(d, 2 * half) * scale_of_row, sum(d, 2 * half + 1) * scale_of_row);
      }
      if (lse && pair == 0 && query < q_tokens) lse[query] = log_sum;
    }
    __syncwarp();
    T* const target =
        static_cast<T*>(params.y) + (static_cast<int64_t>(work.b) * q_tokens * params.heads + work.h) * head_dim;
    for (int i = lane; i < 16 * kDim / 8; i += 32) {
      const int row = i / (kDim / 8), chunk = i % (kDim / 8), query = first + warp * 16 + row;
      if (query < q_tokens && chunk * 8 < head_dim) {
        Vec<T, 8>::load(vector(row, chunk))
            .store(target + static_cast<int64_t>(query) * params.heads * head_dim + chunk * 8);
      }
    }
    async_proxy_fence();  // copies may write there again
    __syncwarp();
    release(q_stage(number));
    done += tiles;
  });
#endif
}

}  // namespace llmk::kernels::flash
