// Attention over prompts by tensor cores (FlashAttention-2, Dao 2023), with mma.sync, for compute capability 8.0 and
// up:
//
//   s[i, j] = softmax_scale q[i] . k[j]   (softcap tanh(s / softcap))      y[i] = sum_j softmax(s[i])[j] v[j]
//
// A block has a tile of queries of one head, and goes over the keys that any of them sees, a tile at a time. The scores
// stay in registers: as rows of an mma's result they become rows of the next one's first operand. Maximum and sum of a
// row are those of an online softmax in base 2. Each warp has whole rows, so it needs nothing of another one.
//
//   copy      K 0 |V 0     |K 1        |V 1     |K 2        |          cp.async
//   compute       |q k[0]  |softmax, v[0]       |...
//
// Tiles of the last queries start first: if causal, they see the most keys.
#pragma once
#include "key_pages.cuh"
#include "products.cuh"
#include "score_bias.cuh"
#include "softmax_rows.cuh"
#include "tiles.h"

namespace llmk::kernels::flash {

template <typename T, int kDim, Extra kExtra>
__global__ void __launch_bounds__(Tile<kDim>::kThreads) flash_attention_kernel(const FlashAttentionParams params) {
  using Size = Tile<kDim>;
  constexpr int kQueries = Size::kQueries, kKeys = Size::kKeys, kRowTiles = Size::kRowTiles;
  extern __shared__ int4 shared[];
  __shared__ int2 seen[kQueries];  // by each query: the first key, and the one behind the last
  constexpr bool kPaged = kExtra == Extra::kPages;
  __shared__ int2 places[2][kPaged ? kKeys : 1];  // of two tiles of keys, in their pages
  using Tiles = Rows<T, kDim, Size::kThreads>;
  const Tiles q_rows{reinterpret_cast<T*>(shared)}, k_rows{q_rows.data + kQueries * kDim},
      v_rows{k_rows.data + kKeys * kDim};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
  const int head_dim = static_cast<int>(params.head_dim), q_tokens = static_cast<int>(params.q_tokens);
  const unsigned of_tile = static_cast<unsigned>(params.batch * params.heads);
  const int first = ((q_tokens + kQueries - 1) / kQueries - 1 - static_cast<int>(blockIdx.x / of_tile)) * kQueries;
  const int64_t b = blockIdx.x % of_tile / params.heads, h = blockIdx.x % of_tile % params.heads;
  const int64_t kv_head = h / (params.heads / params.kv_heads);
  const T* const q = static_cast<const T*>(params.q) + b * params.q_batch + h * params.q_head;
  const int64_t sequence = kPaged ? 0 : b;
  const T* const k = static_cast<const T*>(params.k) + sequence * params.k_batch + kv_head * params.k_head;
  const T* const v = static_cast<const T*>(params.v) + sequence * params.v_batch + kv_head * params.v_head;
  pdl_launch_dependents();
  pdl_wait();
  const Visible visible(params, b);
  const int last = min(first + kQueries, q_tokens) - 1;
  const int begin = visible.begin(first), end = visible.end(last);  // of the keys that any of the queries sees
  if (const int row = threadIdx.x; row < kQueries) seen[row] = {visible.begin(first + row), visible.end(first + row)};
  const int first_tile = begin / kKeys, end_tile = begin < end ? (end + kKeys - 1) / kKeys : first_tile;
  const auto find_pages = [&](int tile) {
    if constexpr (kPaged) {
      if (threadIdx.x < kKeys) places[tile % 2][threadIdx.x] = KeyPages(params, b).find(tile * kKeys + threadIdx.x);
    }
  };
  const auto copy = [&](const Tiles& rows, const T* source, int64_t page, int64_t token, int tile) {
    if constexpr (kPaged) {
      rows.copy_rows(source, head_dim, tile * kKeys, kKeys, begin, end, [&](int key) -> const T* {
        const int2 at = places[tile % 2][key - tile * kKeys];
        return at.x < 0 ? nullptr : source + at.x * page + at.y * token;
      });
    } else {
      rows.copy(source, token, head_dim, tile * kKeys, kKeys, begin, end);
    }
  };
  const auto copy_k = [&](int tile) { copy(k_rows, k, params.k_batch, params.k_token, tile); };
  const auto copy_v = [&](int tile) { copy(v_rows, v, params.v_batch, params.v_token, tile); };
  if (first_tile < end_tile) {
    if (kPaged) {
      find_pages(first_tile);
      __syncthreads();
    }
    q_rows.copy(q, params.q_token, head_dim, first, kQueries, 0, q_tokens);
    copy_k(first_tile);
  }
  cp_async_commit();

  const ScoreScale<kExtra> scale(params);
  const HeadBias<T> bias(params, b, h, visible.shift);
  const int row_of_warp = warp * 16 * kRowTiles;
  float y[kRowTiles][kDim / 8][4];
  SoftmaxRow rows[2 * kRowTiles];  // of one dimension: nvcc 13.0 initializes the first row alone of two
  set_zero(y);

  for (int tile = first_tile; tile < end_tile; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // the keys have arrived, and the last values have been read
    copy_v(tile);
    cp_async_commit();
    find_pages(tile + 1);
    float s[kRowTiles][kKeys / 8][4];
    multiply(s, q_rows, row_of_warp, k_rows);
    cp_async_wait<0>();
    __syncthreads();  // the values have arrived, and the keys have been read
    if (tile + 1 < end_tile) copy_k(tile + 1);
    cp_async_commit();

    const int key = tile * kKeys, column = key + pair;
    const bool whole = key >= seen[kQueries - 1].x && key + kKeys <= seen[0].y;  // every query sees every key
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int2 keys = whole ? int2{} : seen[row_of_warp + r * 16 + half * 8 + g];
        const auto score = [&](int n, int i) -> float& { return s[r][n][2 * half + i]; };
        if constexpr (kExtra == Extra::kBias) {
          const int query = first + row_of_warp + r * 16 + half * 8 + g;
          bias.template exponents_of_row<kKeys / 8>(scale, query, column, score);
        }
        const int from = keys.x - column, to = keys.y - column;
        float correction;
        update_rows<1, kKeys / 8>(
            &rows[2 * r + half], scale, whole, &from, &to, [&](int, int n, int i) -> float& { return score(n, i); },
            &correction);
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) y[r][d][2 * half] *= correction, y[r][d][2 * half + 1] *= correction;
      }
    }
    multiply_add(y, s, v_rows);
  }

  // The result goes through the rows of the warp's own queries to whole vectors.
  cp_async_wait<0>();
  __syncthreads();
  float* const lse = params.lse ? static_cast<float*>(params.lse) + (b * params.heads + h) * q_tokens : nullptr;
  const float sink = params.sinks ? to_float(static_cast<const T*>(params.sinks)[h]) * kLog2E : -INFINITY;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_warp + r * 16 + half * 8 + g;
      float log_sum;
      const float scale_of_row = rows[2 * r + half].finish(scale, sink, log_sum);
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        *reinterpret_cast<uint32_t*>(q_rows.vector(row, d) + pair) =
            pack<T>(y[r][d][2 * half] * scale_of_row, y[r][d][2 * half + 1] * scale_of_row);
      }
      if (lse && pair == 0 && first + row < q_tokens) lse[first + row] = log_sum;
    }
  }
  __syncwarp();
  T* const target = static_cast<T*>(params.y) + (b * q_tokens * params.heads + h) * head_dim;
  q_rows.store(target, params.heads * head_dim, head_dim, first, row_of_warp, 16 * kRowTiles, q_tokens);
}

}  // namespace llmk::kernels::flash
