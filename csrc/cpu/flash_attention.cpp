// Attention over prompts on the CPU: softmax(scale q k^T) v in float32 (float64 for float64), without the scores in
// memory.
//
//   task      (sequence, head, query tile): up to 64 queries of one head against all keys that any of them sees
//   KV tile   32 keys: converted once for all queries of the task, and the keys transposed
//
// For each KV tile, each query of the task computes, over the keys of the tile that it sees,
//
//   scores = scale q k^T
//   weights = exp(scores - maximum)                    with a running maximum (online softmax)
//   sum = sum * exp(old maximum - maximum) + weights v
//
// Both products are sums of scaled rows, of k^T and of v: loops along contiguous rows. A sink is a score without a
// value, so it is where maximum and total begin. Idea: Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2".
#include "cpu/flash_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/flash_attention_rows.h"
#include "cpu/online_softmax.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kQueryTile = 64;  // queries

// Keys of a KV tile. float32, 512 tokens, 8 heads of 128, one core with AVX-512 and 48 KiB of L1:
//
//   value | result
//   ------|------------
//   64    | 31 GFLOP/s: keys and values do not fit into L1
//   32    | 41 GFLOP/s
constexpr int64_t kKvTile = 32;

// The keys that a query sees, and its state of the online softmax.
template <typename A>
struct Query {
  int64_t begin, end;
  A maximum, total;
};

// Turns scores into weights relative to the largest score so far. Rescales the sum if that has grown.
template <typename A>
inline void online_softmax(A* scores, int64_t count, Query<A>& query, A* sum, int64_t dim) {
  const A maximum = std::max(query.maximum, largest(scores, count));
  if (maximum != query.maximum) {
    const A rescale = std::exp(query.maximum - maximum);
    for (int64_t d = 0; d < dim; ++d) sum[d] *= rescale;
    query.total *= rescale;
    query.maximum = maximum;
  }
  query.total += weights_of(scores, count, maximum);
}

// What a thread keeps for its tasks.
template <typename T>
struct Buffers {
  explicit Buffers(int64_t dim) : q(kQueryTile * dim), sums(kQueryTile * dim), k(dim * kKvTile), v(kKvTile * dim) {
    row.resize(dim);
    out.resize(dim);
  }

  std::vector<Wide<T>> q, sums, k, v, row;  // k: transposed
  std::vector<LoopType<T>> out;
  Query<Wide<T>> queries[kQueryTile];
};

// Keys and values [begin, begin + count) of a kv head, converted.
template <typename T>
inline void load_kv_tile(const FlashAttentionParams& p, int64_t b, int64_t kv_head, int64_t begin, int64_t count,
                         Buffers<T>& buffers) {
  const T* const k = static_cast<const T*>(p.k) + b * p.k_batch + begin * p.k_token + kv_head * p.k_head;
  const T* const v = static_cast<const T*>(p.v) + b * p.v_batch + begin * p.v_token + kv_head * p.v_head;
  for (int64_t j = 0; j < count; ++j) {
    widen_row(k + j * p.k_token, p.head_dim, buffers.row.data());
    for (int64_t d = 0; d < p.head_dim; ++d) buffers.k[d * kKvTile + j] = buffers.row[d];
    widen_row(v + j * p.v_token, p.head_dim, &buffers.v[j * p.head_dim]);
  }
}

// The query at `token`, with a sink or nothing as its only score.
template <typename T>
inline Query<Wide<T>> begin_query(const FlashAttentionParams& p, int64_t b, int64_t head, int64_t token) {
  using A = Wide<T>;
  const auto [begin, end] = visible_keys(p, b, token);
  constexpr A kNone = -std::numeric_limits<A>::infinity();
  A sink = kNone;
  if (p.sinks != nullptr) widen_row(static_cast<const T*>(p.sinks) + head, 1, &sink);
  return {begin, end, sink, sink == kNone ? A(0) : A(1)};
}

template <typename T>
inline void write_output(const FlashAttentionParams& p, int64_t b, int64_t head, int64_t token,
                         const Query<Wide<T>>& query, const Wide<T>* sum, LoopType<T>* buffer) {
  T* const y = static_cast<T*>(p.y) + ((b * p.q_tokens + token) * p.heads + head) * p.head_dim;
  LoopType<T>* const output = output_buffer(y, buffer);
  const Wide<T> factor = query.total == 0 ? Wide<T>(0) : 1 / query.total;  // no score: zeros
  for (int64_t d = 0; d < p.head_dim; ++d) output[d] = narrow<T>(sum[d] * factor);
  store(output, p.head_dim, y);
  if (p.lse == nullptr) return;
  static_cast<Wide<T>*>(p.lse)[(b * p.heads + head) * p.q_tokens + token] = query.maximum + std::log(query.total);
}

template <typename T>
inline void process_task(const FlashAttentionParams& p, int64_t b, int64_t head, int64_t first, Buffers<T>& buffers) {
  using A = Wide<T>;
  const int64_t dim = p.head_dim, rows = std::min(kQueryTile, p.q_tokens - first);
  const A scale = static_cast<A>(p.softmax_scale), cap = static_cast<A>(p.softcap);
  const T* const q = static_cast<const T*>(p.q) + b * p.q_batch + first * p.q_token + head * p.q_head;
  for (int64_t r = 0; r < rows; ++r) {
    widen_row(q + r * p.q_token, dim, &buffers.q[r * dim]);
    buffers.queries[r] = begin_query<T>(p, b, head, first + r);
  }
  std::fill_n(buffers.sums.begin(), rows * dim, A(0));

  A scores[kKvTile];
  // The keys that any query of the tile sees: both ends grow with the token.
  const int64_t begin = buffers.queries[0].begin, end = buffers.queries[rows - 1].end;
  for (int64_t tile = begin; tile < end; tile += kKvTile) {
    const int64_t keys = std::min(kKvTile, end - tile);
    load_kv_tile(p, b, head / (p.heads / p.kv_heads), tile, keys, buffers);
    for (int64_t r = 0; r < rows; ++r) {
      Query<A>& query = buffers.queries[r];
      const int64_t from = std::max(query.begin - tile, int64_t{0}), count = std::min(query.end - tile, keys) - from;
      if (count <= 0) continue;
      A* const sum = &buffers.sums[r * dim];
      std::fill_n(scores, count, A(0));
      add_weighted_rows(scores, &buffers.q[r * dim], &buffers.k[from], kKvTile, dim, count);
      scale_and_cap(scores, count, scale, cap);
      if (p.bias) {
        add_bias<T>(p, b, head, first + r, tile + from, count, scores);
        if (std::all_of(scores, scores + count, [](A score) { return score == -std::numeric_limits<A>::infinity(); })) {
          continue;
        }
      }
      online_softmax(scores, count, query, sum, dim);
      add_weighted_rows(sum, scores, &buffers.v[from * dim], dim, count, dim);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    write_output<T>(p, b, head, first + r, buffers.queries[r], &buffers.sums[r * dim], buffers.out.data());
  }
}

int64_t query_tiles(const FlashAttentionParams& p) { return (p.q_tokens + kQueryTile - 1) / kQueryTile; }

template <typename T>
inline void process_tasks(const FlashAttentionParams& p, int64_t task_begin, int64_t task_end) {
  const int64_t tiles = query_tiles(p);
  Buffers<T> buffers(p.head_dim);
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t row = task / tiles;
    process_task(p, row / p.heads, row % p.heads, task % tiles * kQueryTile, buffers);
  }
}

}  // namespace

int64_t flash_attention_tasks(const FlashAttentionParams& params) {
  return params.batch * params.heads * query_tiles(params);
}

void flash_attention(const FlashAttentionParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { process_tasks<typename decltype(tag)::type>(params, begin, end); });
}

}  // namespace llmk::cpu
