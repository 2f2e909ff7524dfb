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
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "softmax_rows.cuh"

namespace llmk::kernels::flash {

// `kDim`: elements of a head, at least; those behind head_dim are zeros in shared memory.
template <int kDim>
struct Tile {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kQueries = kDim <= 128 ? 128 : 64, kKeys = kDim <= 128 ? 64 : 32;
  static constexpr int kRowTiles = kQueries / (16 * kWarps);  // of 16 queries, of a warp
  static constexpr int kChunks = kDim / 8;                    // vectors of a row
  static constexpr size_t kSharedBytes = (kQueries + 2 * kKeys) * kDim * 2;
};

// Rows of kDim elements in shared memory. The vectors of eight rows at the same column lie in different banks.
template <typename T, int kDim>
struct Rows {
  T* data;

  __device__ T* vector(int row, int chunk) const { return data + row * kDim + (chunk ^ (row & 7)) * 8; }
  __device__ uint32_t address(int row, int chunk) const { return shared_address(vector(row, chunk)); }

  // Begins to copy rows [first, first + count) of `source`; zeros for those outside of [begin, end).
  __device__ void copy(const T* source, int64_t stride, int head_dim, int first, int count, int begin, int end) const {
    constexpr int kChunks = Tile<kDim>::kChunks, kStep = Tile<kDim>::kThreads;
#pragma unroll
    for (int v = threadIdx.x; v < count * kChunks; v += kStep) {
      const int row = v / kChunks, chunk = v % kChunks, of_source = first + row;
      const bool valid = of_source >= begin && of_source < end && chunk * 8 < head_dim;
      cp_async_16_or_zero(address(row, chunk), valid ? source + of_source * stride + chunk * 8 : source, valid);
    }
  }
};

template <typename T, int kDim>
__global__ void __launch_bounds__(Tile<kDim>::kThreads) flash_attention_kernel(const FlashAttentionParams params) {
  using Size = Tile<kDim>;
  constexpr int kQueries = Size::kQueries, kKeys = Size::kKeys, kRowTiles = Size::kRowTiles;
  extern __shared__ int4 shared[];
  const Rows<T, kDim> q_rows{reinterpret_cast<T*>(shared)}, k_rows{q_rows.data + kQueries * kDim},
      v_rows{k_rows.data + kKeys * kDim};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, pair = 2 * (lane % 4);
  const int head_dim = static_cast<int>(params.head_dim), q_tokens = static_cast<int>(params.q_tokens);
  const unsigned of_tile = static_cast<unsigned>(params.batch * params.heads);
  const int first = ((q_tokens + kQueries - 1) / kQueries - 1 - static_cast<int>(blockIdx.x / of_tile)) * kQueries;
  const int64_t b = blockIdx.x % of_tile / params.heads, h = blockIdx.x % of_tile % params.heads;
  const int64_t kv_head = h / (params.heads / params.kv_heads);
  const T* const q = static_cast<const T*>(params.q) + b * params.q_batch + h * params.q_head;
  const T* const k = static_cast<const T*>(params.k) + b * params.k_batch + kv_head * params.k_head;
  const T* const v = static_cast<const T*>(params.v) + b * params.v_batch + kv_head * params.v_head;
  pdl_launch_dependents();
  pdl_wait();
  const Visible visible(params, b);
  const int last = min(first + kQueries, q_tokens) - 1;
  const int begin = visible.begin(first), end = visible.end(last);  // of the keys that any of the queries sees
  const int first_tile = begin / kKeys, end_tile = begin < end ? (end + kKeys - 1) / kKeys : first_tile;
  const auto copy_k = [&](int tile) { k_rows.copy(k, params.k_token, head_dim, tile * kKeys, kKeys, begin, end); };
  const auto copy_v = [&](int tile) { v_rows.copy(v, params.v_token, head_dim, tile * kKeys, kKeys, begin, end); };
  if (first_tile < end_tile) {
    q_rows.copy(q, params.q_token, head_dim, first, kQueries, 0, q_tokens);
    copy_k(first_tile);
  }
  cp_async_commit();

  const ScoreScale scale(params);
  const int row_of_warp = warp * 16 * kRowTiles;
  float y[kRowTiles][kDim / 8][4];
  SoftmaxRow rows[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) y[r][d][0] = y[r][d][1] = y[r][d][2] = y[r][d][3] = 0.f;
  }

  for (int tile = first_tile; tile < end_tile; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // the keys have arrived, and the last values have been read
    copy_v(tile);
    cp_async_commit();
    float s[kRowTiles][kKeys / 8][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) s[r][n][0] = s[r][n][1] = s[r][n][2] = s[r][n][3] = 0.f;
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        load_matrices(a[r], q_rows.address(row_of_warp + r * 16 + lane % 16, 2 * d + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t m[4];
        load_matrices(m, k_rows.address(n * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_16x8x16<T>(s[r][2 * n], a[r], m[0], m[1]);
          mma_16x8x16<T>(s[r][2 * n + 1], a[r], m[2], m[3]);
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // the values have arrived, and the keys have been read
    if (tile + 1 < end_tile) copy_k(tile + 1);
    cp_async_commit();

    const int key = tile * kKeys;
    const bool whole = key >= visible.begin(last) && key + kKeys <= visible.end(first);  // every query sees every key
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first + row_of_warp + r * 16 + half * 8 + g, column = key + pair;
        const auto score = [&](int n, int i) -> float& { return s[r][n][2 * half + i]; };
        const float correction = rows[r][half].template update<kKeys / 8>(scale, whole, visible.begin(query) - column,
                                                                          visible.end(query) - column, score);
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) y[r][d][2 * half] *= correction, y[r][d][2 * half + 1] *= correction;
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        a[r][0] = pack<T>(s[r][2 * n][0], s[r][2 * n][1]);
        a[r][1] = pack<T>(s[r][2 * n][2], s[r][2 * n][3]);
        a[r][2] = pack<T>(s[r][2 * n + 1][0], s[r][2 * n + 1][1]);
        a[r][3] = pack<T>(s[r][2 * n + 1][2], s[r][2 * n + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t m[4];
        load_matrices_transposed(m, v_rows.address(n * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_16x8x16<T>(y[r][2 * d], a[r], m[0], m[1]);
          mma_16x8x16<T>(y[r][2 * d + 1], a[r], m[2], m[3]);
        }
      }
    }
  }

  // The result goes through the rows of the warp's own queries to whole vectors.
  cp_async_wait<0>();
  __syncthreads();
  float* const lse = params.lse ? params.lse + (b * params.heads + h) * q_tokens : nullptr;
  const float sink = params.sinks ? to_float(static_cast<const T*>(params.sinks)[h]) * kLog2E : -INFINITY;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of_warp + r * 16 + half * 8 + g;
      float log_sum;
      const float scale_of_row = rows[r][half].finish(scale, sink, log_sum);
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
  for (int i = lane; i < 16 * kRowTiles * Size::kChunks; i += 32) {
    const int row = row_of_warp + i / Size::kChunks, chunk = i % Size::kChunks;
    if (first + row < q_tokens && chunk * 8 < head_dim) {
      Vec<T, 8>::load(q_rows.vector(row, chunk))
          .store(target + static_cast<int64_t>(first + row) * params.heads * head_dim + chunk * 8);
    }
  }
}

}  // namespace llmk::kernels::flash
