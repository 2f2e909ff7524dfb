// Attention over prompts on Hopper (FlashAttention-3, Shah et al. 2024): what flash_attention.cuh computes, by TMA and
// wgmma.
//
// A block has 128 queries of one head: a warp copies keys and values, a tile at a time, and two warpgroups of 64
// queries each compute. A warpgroup's softmax of one tile runs beside its product with the values of the tile before:
//
//   copy      K 0 |K 1, V 0         |K 2, V 1         |
//   compute       |q k[0]  |softmax |q k[1], p v[0]   |
//                          |                |softmax  |q k[2], p v[1] ...
//
// The first tile begins at the first key that any of the queries sees, so that no padding is read.
#pragma once
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "products.cuh"
#include "softmax_rows.cuh"

namespace llmk::kernels::flash {

struct Maps {
  CUtensorMap q, k,
      v;  // boxes of 64 columns and as many rows as a tile has; one head, or batch, where all are the same memory
};

// `kDim`: elements of a head, at least; those behind head_dim are zeros in shared memory.
template <int kDim>
struct Sm90Tile {
  static constexpr int kQueries = 128, kKeys = kDim <= 128 ? 128 : 64;
  static constexpr int kThreads = 128 * 3, kStages = 2, kBoxes = kDim / 64;
  static constexpr int kQueryBoxBytes = kQueries * 128, kKeyBoxBytes = kKeys * 128;  // in shared memory
  static constexpr int kQueryBytes = kBoxes * kQueryBoxBytes, kKeyBytes = kBoxes * kKeyBoxBytes;
  static constexpr size_t kSharedBytes = kQueryBytes + 2 * kStages * kKeyBytes + 1024 + 128;
};

// The barriers of a stage of keys or of values.
struct Stage {
  uint32_t full, empty;
};

template <typename T, int kDim>
__global__ void __launch_bounds__(Sm90Tile<kDim>::kThreads, 1)
    flash_attention_sm90_kernel(const FlashAttentionParams params, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Size = Sm90Tile<kDim>;
  constexpr int kQueries = Size::kQueries, kKeys = Size::kKeys, kStages = Size::kStages, kWarps = 8;
  constexpr int kKeyBytes = Size::kKeyBytes;
  extern __shared__ int4 shared[];
  const uint32_t q_at = (shared_address(shared) + 1023) & ~1023u, k_at = q_at + Size::kQueryBytes;
  const uint32_t v_at = k_at + kStages * kKeyBytes, q_full = v_at + kStages * kKeyBytes;
  const auto k_stage = [&](int tile) {
    return Stage{q_full + 8 + tile % kStages * 16, q_full + 16 + tile % kStages * 16};
  };
  const auto v_stage = [&](int tile) {
    return Stage{k_stage(tile).full + kStages * 16, k_stage(tile).empty + kStages * 16};
  };
  const auto phase = [](int tile) { return static_cast<uint32_t>(tile / kStages) % 2; };
  if (threadIdx.x == 0) {
    barrier_init(q_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      for (const Stage& of : {k_stage(stage), v_stage(stage)}) {
        barrier_init(of.full, 1);
        barrier_init(of.empty, kWarps);
      }
    }
    barrier_init_fence();
  }
  const int q_tokens = static_cast<int>(params.q_tokens);
  const unsigned of_tile = static_cast<unsigned>(params.batch * params.heads);
  const int block_first =
      ((q_tokens + kQueries - 1) / kQueries - 1 - static_cast<int>(blockIdx.x / of_tile)) * kQueries;
  const int b = static_cast<int>(blockIdx.x % of_tile / params.heads),
            h = static_cast<int>(blockIdx.x % of_tile % params.heads);
  __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  const Visible visible(params, b);
  const int begin = visible.begin(block_first), end = visible.end(min(block_first + kQueries, q_tokens) - 1);
  const int tiles = begin < end ? (end - begin + kKeys - 1) / kKeys : 0;

  if (threadIdx.x < 128) {  // copies
    fewer_registers<24>();
    if (threadIdx.x >= 32 || !elect() || tiles == 0) return;
    const int kv_head = h / static_cast<int>(params.heads / params.kv_heads);
    const auto copy = [&](uint32_t to, int box_bytes, const CUtensorMap& map, int row, int head, int batch,
                          uint32_t full) {
      barrier_arrive_expecting(full, Size::kBoxes * box_bytes);
#pragma unroll
      for (int box = 0; box < Size::kBoxes; ++box) {
        tensor_load(to + box * box_bytes, map, {box * 64, row, head, batch}, full, kEvictNormal);
      }
    };
    const auto copy_keys = [&](uint32_t to, const CUtensorMap& map, int row, int64_t head, int64_t batch,
                               uint32_t full) {
      copy(to, Size::kKeyBoxBytes, map, row, head ? kv_head : 0, batch ? b : 0, full);
    };
    copy(q_at, Size::kQueryBoxBytes, maps.q, block_first, params.q_head ? h : 0, params.q_batch ? b : 0, q_full);
    for (int tile = 0; tile < tiles; ++tile) {
      const int row = begin + tile * kKeys, at = tile % kStages * kKeyBytes;
      barrier_wait(k_stage(tile).empty, phase(tile) ^ 1);
      copy_keys(k_at + at, maps.k, row, params.k_head, params.k_batch, k_stage(tile).full);
      barrier_wait(v_stage(tile).empty, phase(tile) ^ 1);
      copy_keys(v_at + at, maps.v, row, params.v_head, params.v_batch, v_stage(tile).full);
    }
    return;
  }

  more_registers<240>();
  const int group = static_cast<int>(threadIdx.x) / 128 - 1, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
  const int first = block_first + group * 64, last = min(first + 64, q_tokens) - 1;
  const ScoreScale scale(params);
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
    barrier_wait(k_stage(tile).full, phase(tile));
    wgmma_pin(s);
    wgmma_fence();
    const uint32_t q = q_at + group * 64 * 128, k = k_at + tile % kStages * kKeyBytes;
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      const uint32_t at_q = q + d / 64 * Size::kQueryBoxBytes + d % 64 * 2;
      const uint32_t at_k = k + d / 64 * Size::kKeyBoxBytes + d % 64 * 2;
      wgmma<T>(s, wgmma_operand(at_q), wgmma_operand(at_k), d > 0);
    }
    wgmma_commit();
  };
  const auto begin_values = [&](int tile) {  // y += p v
    barrier_wait(v_stage(tile).full, phase(tile));
    pin_sums();
    wgmma_fence();
    const uint32_t v = v_at + tile % kStages * kKeyBytes;
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int c = 0; c < kDim / kColumns; ++c) {
        const uint32_t at = v + c * (kColumns / 64) * Size::kKeyBoxBytes + n * 2048;
        wgmma_rows_of<T>(y[c], p[n], wgmma_rows(at, Size::kKeyBoxBytes));
      }
    }
    wgmma_commit();
  };
  const auto softmax = [&](int tile, float(&corrections)[2]) {
    const int key = begin + tile * kKeys, column = key + pair;
    const bool whole = first <= last && key >= visible.begin(last) && key + kKeys <= visible.end(first);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first + warp * 16 + half * 8 + g;
      const auto score = [&](int n, int i) -> float& { return s[4 * n + 2 * half + i]; };
      corrections[half] = rows[half].template update<kKeys / 8>(scale, whole, visible.begin(query) - column,
                                                                visible.end(query) - column, score);
    }
  };
  const auto pack_scores = [&] {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = pack<T>(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
    }
  };

  if (tiles > 0) {
    float corrections[2];
    barrier_wait(q_full, 0);
    begin_scores(0);
    wgmma_wait<0>();
    wgmma_pin(s);
    release(k_stage(0));
    softmax(0, corrections);
    pack_scores();
    for (int tile = 1; tile < tiles; ++tile) {
      begin_scores(tile);
      begin_values(tile - 1);
      wgmma_wait<1>();
      wgmma_pin(s);
      release(k_stage(tile));
      softmax(tile, corrections);
      wgmma_wait<0>();
      pin_sums();
      release(v_stage(tile - 1));
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        sum(d, 0) *= corrections[0], sum(d, 1) *= corrections[0];
        sum(d, 2) *= corrections[1], sum(d, 3) *= corrections[1];
      }
      pack_scores();
    }
    begin_values(tiles - 1);
    wgmma_wait<0>();
    pin_sums();
  }

  // The result goes through the place of the warpgroup's own queries to whole vectors.
  named_barrier(1 + group, 128);
  const int64_t q_head = static_cast<int64_t>(b) * params.heads + h;
  float* const lse = params.lse ? static_cast<float*>(params.lse) + q_head * q_tokens : nullptr;
  const float sink = params.sinks ? to_float(static_cast<const T*>(params.sinks)[h]) * kLog2E : -INFINITY;
  char* const memory = reinterpret_cast<char*>(shared) + (q_at - shared_address(shared));
  const auto vector = [&](int row, int chunk) {  // row of the warp
    const int of_block = group * 64 + warp * 16 + row;
    return reinterpret_cast<T*>(memory + chunk / 8 * Size::kQueryBoxBytes + of_block * 128 + ((chunk ^ row) & 7) * 16);
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
  const int head_dim = static_cast<int>(params.head_dim);
  T* const target = static_cast<T*>(params.y) + (static_cast<int64_t>(b) * q_tokens * params.heads + h) * head_dim;
  for (int i = lane; i < 16 * kDim / 8; i += 32) {
    const int row = i / (kDim / 8), chunk = i % (kDim / 8), query = first + warp * 16 + row;
    if (query < q_tokens && chunk * 8 < head_dim) {
      Vec<T, 8>::load(vector(row, chunk))
          .store(target + static_cast<int64_t>(query) * params.heads * head_dim + chunk * 8);
    }
  }
#endif
}

}  // namespace llmk::kernels::flash
