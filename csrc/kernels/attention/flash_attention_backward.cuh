// Gradients of attention over prompts by tensor cores (FlashAttention-2, Dao 2023), with mma.sync, for compute
// capability 8.0 and up. The probabilities are not kept but computed again, from the log-sum-exp of each query:
//
//   p[i, j] = e^(s[i, j] - lse[i])         dp[i, j] = grad_y[i] . v[j]     delta[i] = grad_y[i] . y[i] - grad_lse[i]
//   ds[i, j] = p[i, j] (dp[i, j] - delta[i]), times the derivative of the softcap
//
//   grad_v[j] = sum_i p[i, j] grad_y[i]    grad_k[j] = softmax_scale sum_i ds[i, j] q[i]    a block has a tile of keys
//   grad_q[i] = softmax_scale sum_j ds[i, j] k[j]                                           a block has one of queries
//   grad_sink = -sum_i e^(sink - lse[i]) delta[i]
//
// Sums stay in registers: nothing is added in memory, so the order is always the same. The price is that the second
// kernel computes p and ds once more: 7 products instead of 5.
//
// Both kernels have tiles of rows (keys and values, or queries and grad_y) that stay in shared memory, and go over
// tiles of columns (the others), of which the next one is on its way while one is computed. Scores are keys by queries
// in the first kernel, so that p and ds are first operands of the second products in both, without leaving the
// registers.
//
//   copy      columns 0 |columns 1          |columns 2         |        cp.async
//   compute             |s, dp, p, ds, sums |s, dp, p, ds, ... |
#pragma once
#include <type_traits>

#include "products.cuh"
#include "score_bias.cuh"
#include "softmax.cuh"
#include "statistics.cuh"
#include "tiles.h"
#include "visible.cuh"

namespace llmk::kernels::flash {

// From products q k and grad_y v to p and to ds / p.
struct ScoreGradient {
  float scale, cap, factor;  // of scores, in base 2

  __device__ explicit ScoreGradient(const FlashAttentionParams& params)
      : scale(static_cast<float>(params.softmax_scale)),
        cap(static_cast<float>(params.softcap)),
        factor((cap > 0.f ? 1.f : scale) * kLog2E) {}

  template <bool kCapped>
  __device__ void apply(float& s, float& dp, float lse, float delta) const {
    dp -= delta;
    if (kCapped) limit(s, dp);
    s = exp2_approximate(fmaf(s, factor, -lse));
  }
  // The same, where with_bias(score) is the score with what is added to it.
  template <bool kCapped, typename WithBias>
  __device__ void apply(float& s, float& dp, float lse, float delta, const WithBias& with_bias) const {
    dp -= delta;
    if (kCapped) {
      limit(s, dp);
    } else {
      s *= scale;
    }
    s = exp2_approximate(fmaf(with_bias(s), kLog2E, -lse));
  }

  // Calls body(std::true_type) if there is a cap, else body(std::false_type).
  template <typename Body>
  __device__ void dispatch_cap(const Body& body) const {
    if (cap > 0.f) {
      body(std::true_type{});
    } else {
      body(std::false_type{});
    }
  }

 private:
  __device__ void limit(float& s, float& dp) const {
    const float t = tanhf(s * scale / cap);
    s = cap * t;
    dp *= 1.f - t * t;
  }
};

// The sums of a warp, times `scale`, to rows of shared memory that no other warp has, and from there to `target`.
template <typename T, int kDim, int kThreads, int kRowTiles>
__device__ void store_sums(const float (&sums)[kRowTiles][kDim / 8][4], float scale,
                           const Rows<T, kDim, kThreads>& rows, int first_row, T* target, int64_t stride, int head_dim,
                           int first, int end) {
  const int lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        *reinterpret_cast<uint32_t*>(rows.vector(first_row + r * 16 + half * 8 + g, d) + pair) =
            pack<T>(sums[r][d][2 * half] * scale, sums[r][d][2 * half + 1] * scale);
      }
    }
  }
  __syncwarp();
  rows.store(target, stride, head_dim, first, first_row, 16 * kRowTiles, end);
}

// grad_k and grad_v of a tile of keys: over the queries that see any of them, of every head that has them.
template <typename T, int kDim, bool kBiased>
__global__ void __launch_bounds__(BackwardTile<kDim>::kKeyThreads)
    flash_attention_backward_keys_kernel(const FlashAttentionBackwardParams params) {
  using Size = BackwardTile<kDim>;
  using Tiles = Rows<T, kDim, Size::kKeyThreads>;
  constexpr int kRows = Size::kRows, kColumns = Size::kColumns, kRowTiles = Size::kKeyRowTiles;
  extern __shared__ int4 shared[];
  __shared__ int2 seen_by[kRows];  // of each key: the first query that sees it, and the one behind the last
  const Tiles k_rows{reinterpret_cast<T*>(shared)}, v_rows{k_rows.data + Size::kRowElements};
  T* const columns = v_rows.data + Size::kRowElements;                                      // two of q, two of grad_y
  float* const statistics = reinterpret_cast<float*>(columns + 4 * Size::kColumnElements);  // two of lse and delta
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
  const int head_dim = static_cast<int>(params.head_dim), q_tokens = static_cast<int>(params.q_tokens);
  const int heads = static_cast<int>(params.kv_heads ? params.heads / params.kv_heads : 0);  // of a kv head
  const unsigned of_tile = static_cast<unsigned>(params.batch * params.kv_heads);
  const int first = static_cast<int>(blockIdx.x / of_tile) * kRows;  // key
  const int64_t b = blockIdx.x % of_tile / params.kv_heads, kv_head = blockIdx.x % of_tile % params.kv_heads;
  const int64_t first_head = kv_head * heads;
  const T* const q = static_cast<const T*>(params.q) + b * params.q_batch + first_head * params.q_head;
  const T* const grad_y =
      static_cast<const T*>(params.grad_y) + b * params.grad_y_batch + first_head * params.grad_y_head;
  const T* const k = static_cast<const T*>(params.k) + b * params.k_batch + kv_head * params.k_head;
  const T* const v = static_cast<const T*>(params.v) + b * params.v_batch + kv_head * params.v_head;
  const int64_t padded = padded_q_tokens(params), plane = params.batch * params.heads * padded;
  const float* const of_first_head = params.statistics + (b * params.heads + first_head) * padded;
  pdl_launch_dependents();
  pdl_wait();
  const Visible visible(params, b);
  const int last = min(first + kRows, visible.k_tokens) - 1;
  const int begin = visible.first_query(first), end = visible.end_query(last);  // of the queries that see any of them
  if (const int row = threadIdx.x; row < kRows) {
    seen_by[row] = {visible.first_query(first + row, begin, end), visible.end_query(first + row, begin, end)};
  }
  const int first_tile = begin / kColumns, tiles = begin < end ? (end + kColumns - 1) / kColumns - first_tile : 0;
  const int steps = tiles * heads;  // a tile of queries of a head each

  const auto q_of = [&](int stage) { return Tiles{columns + stage * Size::kColumnElements}; };
  const auto grad_y_of = [&](int stage) { return Tiles{columns + (2 + stage) * Size::kColumnElements}; };
  const auto copy = [&](int step) {
    const int stage = step % 2, head = step / tiles, query = (first_tile + step % tiles) * kColumns;
    // Zeros for queries that see none of the keys, since even no probability times an infinite gradient is NaN.
    q_of(stage).copy(q + head * params.q_head, params.q_token, head_dim, query, kColumns, begin, end);
    grad_y_of(stage).copy(grad_y + head * params.grad_y_head, params.grad_y_token, head_dim, query, kColumns, begin,
                          end);
    if (threadIdx.x < kColumns / 2) {  // vectors of lse, then of delta
      const int of_delta = threadIdx.x / (kColumns / 4), vector = threadIdx.x % (kColumns / 4);
      cp_async_16_or_zero(shared_address(statistics + (2 * stage + of_delta) * kColumns + 4 * vector),
                          of_first_head + of_delta * plane + head * padded + query + 4 * vector, true);
    }
  };
  if (steps > 0) {
    k_rows.copy(k, params.k_token, head_dim, first, kRows, 0, visible.k_tokens);
    v_rows.copy(v, params.v_token, head_dim, first, kRows, 0, visible.k_tokens);
    copy(0);
  }
  cp_async_commit();

  constexpr bool kSplit = Size::kSums == 1;
  constexpr int kRowWarps = kRows / (16 * kRowTiles);
  const bool has_v = !kSplit || warp < kRowWarps, has_k = !kSplit || warp >= kRowWarps;
  const int row_of_warp = warp % kRowWarps * 16 * kRowTiles;
  const ScoreGradient gradient(params);
  float sums[Size::kSums][kRowTiles][kDim / 8][4];
  float(&v_sums)[kRowTiles][kDim / 8][4] = sums[0], (&k_sums)[kRowTiles][kDim / 8][4] = sums[Size::kSums - 1];
  set_zero(v_sums), set_zero(k_sums);

  for (int step = 0; step < steps; ++step) {
    const int stage = step % 2;
    cp_async_wait<0>();
    __syncthreads();  // this step's queries have arrived, and the last one's have been read
    if (step + 1 < steps) copy(step + 1);
    cp_async_commit();
    float s[kRowTiles][kColumns / 8][4], ds[kRowTiles][kColumns / 8][4];
    multiply(s, k_rows, row_of_warp, q_of(stage));
    if (has_k) {
      multiply(ds, v_rows, row_of_warp, grad_y_of(stage));
    } else {
      set_zero(ds);
    }

    const int query = (first_tile + step % tiles) * kColumns, last_query = min(query + kColumns, q_tokens) - 1;
    const HeadBias<T> bias(params, b, first_head + step / tiles, visible.shift);
    const bool whole = query >= seen_by[kRows - 1].x && last_query < seen_by[0].y;  // every query sees every key
    gradient.dispatch_cap([&](auto capped) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = n * 8 + pair + i;
          const float lse = statistics[2 * stage * kColumns + column];
          const float delta = statistics[(2 * stage + 1) * kColumns + column];
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float &p = s[r][n][2 * half + i], &of_score = ds[r][n][2 * half + i];
              const int row = row_of_warp + r * 16 + half * 8 + g;
              if constexpr (kBiased) {
                gradient.apply<capped.value>(p, of_score, lse, delta,
                                             [&](float score) { return bias.add(score, query + column, first + row); });
              } else {
                gradient.apply<capped.value>(p, of_score, lse, delta);
              }
              const int2 queries = whole ? int2{} : seen_by[row];
              if (!whole && (query + column < queries.x || query + column >= queries.y)) p = of_score = 0.f;
              of_score *= p;
            }
          }
        }
      }
    });
    if (has_v) multiply_add(v_sums, s, grad_y_of(stage));
    if (has_k) multiply_add(k_sums, ds, q_of(stage));
  }

  cp_async_wait<0>();
  __syncthreads();  // the keys and the values have been read
  const int64_t target = (b * params.k_tokens * params.kv_heads + kv_head) * head_dim;
  const int64_t stride = params.kv_heads * head_dim;
  if (has_v) {
    store_sums(v_sums, 1.f, v_rows, row_of_warp, static_cast<T*>(params.grad_v) + target, stride, head_dim, first,
               visible.k_tokens);
  }
  if (has_k) {
    store_sums(k_sums, gradient.scale, k_rows, row_of_warp, static_cast<T*>(params.grad_k) + target, stride, head_dim,
               first, visible.k_tokens);
  }
}

// grad_q of a tile of queries of a head: over the keys that any of them sees. Tiles of the last queries start first: if
// causal, they see the most keys.
template <typename T, int kDim, bool kBiased>
__global__ void __launch_bounds__(BackwardTile<kDim>::kQueryThreads)
    flash_attention_backward_queries_kernel(const FlashAttentionBackwardParams params) {
  using Size = BackwardTile<kDim>;
  using Tiles = Rows<T, kDim, Size::kQueryThreads>;
  constexpr int kRows = Size::kRows, kColumns = Size::kColumns, kRowTiles = Size::kQueryRowTiles;
  extern __shared__ int4 shared[];
  __shared__ int2 seen[kRows];  // by each query: the first key, and the one behind the last
  const Tiles q_rows{reinterpret_cast<T*>(shared)}, grad_y_rows{q_rows.data + Size::kRowElements};
  T* const columns = grad_y_rows.data + Size::kRowElements;  // two of k, two of v
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
  const int head_dim = static_cast<int>(params.head_dim), q_tokens = static_cast<int>(params.q_tokens);
  const unsigned of_tile = static_cast<unsigned>(params.batch * params.heads);
  const int first = ((q_tokens + kRows - 1) / kRows - 1 - static_cast<int>(blockIdx.x / of_tile)) * kRows;
  const int64_t b = blockIdx.x % of_tile / params.heads, h = blockIdx.x % of_tile % params.heads;
  const int64_t kv_head = h / (params.heads / params.kv_heads);
  const T* const q = static_cast<const T*>(params.q) + b * params.q_batch + h * params.q_head;
  const T* const grad_y = static_cast<const T*>(params.grad_y) + b * params.grad_y_batch + h * params.grad_y_head;
  const T* const k = static_cast<const T*>(params.k) + b * params.k_batch + kv_head * params.k_head;
  const T* const v = static_cast<const T*>(params.v) + b * params.v_batch + kv_head * params.v_head;
  const int64_t padded = padded_q_tokens(params), plane = params.batch * params.heads * padded;
  const float* const statistics = params.statistics + (b * params.heads + h) * padded + first;
  pdl_launch_dependents();
  pdl_wait();
  const Visible visible(params, b);
  const int last = min(first + kRows, q_tokens) - 1;
  const int begin = visible.begin(first), end = visible.end(last);  // of the keys that any of the queries sees
  if (const int row = threadIdx.x; row < kRows) seen[row] = {visible.begin(first + row), visible.end(first + row)};
  const int first_tile = begin / kColumns, end_tile = begin < end ? (end + kColumns - 1) / kColumns : first_tile;

  const auto k_of = [&](int stage) { return Tiles{columns + stage * Size::kColumnElements}; };
  const auto v_of = [&](int stage) { return Tiles{columns + (2 + stage) * Size::kColumnElements}; };
  const auto copy = [&](int tile) {
    k_of(tile % 2).copy(k, params.k_token, head_dim, tile * kColumns, kColumns, begin, end);
    v_of(tile % 2).copy(v, params.v_token, head_dim, tile * kColumns, kColumns, begin, end);
  };
  if (first_tile < end_tile) {
    q_rows.copy(q, params.q_token, head_dim, first, kRows, 0, q_tokens);
    grad_y_rows.copy(grad_y, params.grad_y_token, head_dim, first, kRows, 0, q_tokens);
    copy(first_tile);
  }
  cp_async_commit();

  const int row_of_warp = warp * 16 * kRowTiles;
  const ScoreGradient gradient(params);
  const HeadBias<T> bias(params, b, h, visible.shift);
  float sums[kRowTiles][kDim / 8][4], lse[kRowTiles][2], delta[kRowTiles][2];
  set_zero(sums);
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_warp + r * 16 + half * 8 + g;
      lse[r][half] = statistics[row], delta[r][half] = statistics[plane + row];
    }
  }

  for (int tile = first_tile; tile < end_tile; ++tile) {
    const int stage = tile % 2;
    cp_async_wait<0>();
    __syncthreads();  // this tile's keys and values have arrived, and the last one's have been read
    if (tile + 1 < end_tile) copy(tile + 1);
    cp_async_commit();
    float s[kRowTiles][kColumns / 8][4], ds[kRowTiles][kColumns / 8][4];
    multiply(s, q_rows, row_of_warp, k_of(stage));
    multiply(ds, grad_y_rows, row_of_warp, v_of(stage));

    const int key = tile * kColumns;
    const bool whole = key >= seen[kRows - 1].x && key + kColumns <= seen[0].y;
    gradient.dispatch_cap([&](auto capped) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int2 keys = whole ? int2{} : seen[row_of_warp + r * 16 + half * 8 + g];
          const int from = keys.x - key - pair, to = keys.y - key - pair;
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float &p = s[r][n][2 * half + i], &of_score = ds[r][n][2 * half + i];
              if constexpr (kBiased) {
                gradient.apply<capped.value>(p, of_score, lse[r][half], delta[r][half], [&](float score) {
                  return bias.add(score, first + row_of_warp + r * 16 + half * 8 + g, key + pair + n * 8 + i);
                });
              } else {
                gradient.apply<capped.value>(p, of_score, lse[r][half], delta[r][half]);
              }
              if (!whole && (n * 8 + i < from || n * 8 + i >= to)) p = of_score = 0.f;
              of_score *= p;
            }
          }
        }
      }
    });
    multiply_add(sums, ds, k_of(stage));
  }

  cp_async_wait<0>();
  __syncthreads();  // the queries have been read
  T* const target = static_cast<T*>(params.grad_q) + (b * q_tokens * params.heads + h) * head_dim;
  store_sums(sums, gradient.scale, q_rows, row_of_warp, target, params.heads * head_dim, head_dim, first, q_tokens);
}

}  // namespace llmk::kernels::flash
