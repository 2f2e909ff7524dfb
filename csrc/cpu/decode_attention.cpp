// Decode attention on the CPU: softmax(scale q k^T) v over the keys of a sequence, in float32 (float64 for float64).
// Lengths and pages have been checked.
//
//   work tile   (sequence, kv head, query tile): up to 16 queries of one kv head against all keys that they see
//   split       some consecutive KV tiles, of 64 keys, of a work tile (split-KV)
//   task        one split of one work tile: what a thread takes
//
// For each KV tile of its split, a task computes
//
//   scores = scale q k^T                               each key is converted once, for all queries of the tile
//   weights = exp(scores - maximum)                    with a running maximum per query (online softmax)
//   sum = sum * exp(old maximum - maximum) + weights v
//
// The partial output of a query is [maximum, total of the weights, sum]; those of several splits are merged at the end.
// Idea: Dao et al. 2023, "Flash-Decoding".
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/attention.h"
#include "cpu/convert.h"
#include "cpu/online_softmax.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kQueryTile = 16;      // queries
constexpr int64_t kKvTile = 64;         // keys
constexpr int64_t kMinSplitKeys = 256;  // fewer are not worth a merge
constexpr int64_t kMinTasks = 64;       // keys are split until there are this many tasks
constexpr int64_t kPrefetchAhead = 8;   // keys or values: each may lie on a memory page of its own
constexpr int kValuesAtOnce = 4;        // added to the sum in one pass, so that it is read and written less often
constexpr int64_t kStep = 4 * kLanes;   // elements that a dot product takes at a time

// A row of the cache in the type computed in: the row itself, or a converted copy in the buffer. With kPadded it is
// followed by zeros up to a multiple of kStep.
template <bool kPadded, typename T>
inline const Wide<T>* widened(const T* source, int64_t dim, Wide<T>* __restrict buffer) {
  const int64_t padding = kPadded ? (kStep - dim % kStep) % kStep : 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (int64_t d = 0; d < dim; ++d) buffer[d] = widen(source[d]);
  } else {
    const Wide<T>* const x = load(source, dim, buffer);
    if (padding == 0) return x;
    if (x != buffer) std::copy_n(x, dim, buffer);
  }
  if (padding > 0) std::fill_n(buffer + dim, padding, Wide<T>(0));
  return buffer;
}

// The dot product of `count` elements, a multiple of kStep. It has several accumulators (lanes), since an addition to
// one accumulator would wait for the addition before it.
template <typename A>
inline A dot_product(const A* __restrict q, const A* __restrict k, int64_t count) {
  A lanes[kLanes] = {};
  for (int64_t d = 0; d < count; d += kStep) {
    for (int i = 0; i < kLanes; ++i) {
      lanes[i] += (q[d + i] * k[d + i] + q[d + kLanes + i] * k[d + kLanes + i]) +
                  (q[d + 2 * kLanes + i] * k[d + 2 * kLanes + i] + q[d + 3 * kLanes + i] * k[d + 3 * kLanes + i]);
    }
  }
  return sum_of_lanes(lanes);
}

// Pointers to the keys (or values) [begin, begin + count) of a sequence. Prefetches the first of them.
template <typename T>
class CacheRows {
 public:
  CacheRows(const DecodeAttentionParams& p, int64_t b, int64_t begin, int64_t count, int64_t kv_head, bool values)
      : count_(count), bytes_(p.head_dim * static_cast<int64_t>(sizeof(T))) {
    const auto* const base = static_cast<const T*>(values ? p.cache.v : p.cache.k);
    for (int64_t j = 0; j < count; ++j) rows_[j] = base + cache_offset(p.cache, b, begin + j, kv_head, values);
    for (int64_t j = 0; j < std::min(kPrefetchAhead, count); ++j) prefetch(j);
  }

  // Also prefetches the row kPrefetchAhead further on.
  const T* row(int64_t j) const {
    if (j + kPrefetchAhead < count_) prefetch(j + kPrefetchAhead);
    return rows_[j];
  }

 private:
  void prefetch(int64_t j) const {
    const char* const row = reinterpret_cast<const char*>(rows_[j]);
    for (int64_t byte = 0; byte < bytes_; byte += 64) __builtin_prefetch(row + byte);
  }

  int64_t count_, bytes_;
  const T* rows_[kKvTile];
};

// sum += the sum of weights[i] * values[i].
template <int kCount, typename A>
inline void add_weighted(A* __restrict sum, const A* weights, const A* const* values, int64_t dim) {
  A w[kCount];
  const A* v[kCount];
  for (int i = 0; i < kCount; ++i) w[i] = weights[i], v[i] = values[i];
  for (int64_t d = 0; d < dim; ++d) {
    if constexpr (kCount == kValuesAtOnce) {
      sum[d] += (w[0] * v[0][d] + w[1] * v[1][d]) + (w[2] * v[2][d] + w[3] * v[3][d]);
    } else {
      sum[d] += w[0] * v[0][d];
    }
  }
}

template <typename T>
inline void write_output(const DecodeAttentionParams& p, int64_t flat, Wide<T> total, const Wide<T>* sum,
                         LoopType<T>* buffer) {
  T* const out = static_cast<T*>(p.out) + flat * p.head_dim;
  LoopType<T>* output = output_buffer(out, buffer);
  const Wide<T> factor = total == 0 ? Wide<T>(0) : 1 / total;  // no key: zeros
  for (int64_t d = 0; d < p.head_dim; ++d) output[d] = narrow<T>(sum[d] * factor);
  store(output, p.head_dim, out);
}

// A query of a work tile: its row of the output, the keys that it sees, and its state of the online softmax.
template <typename A>
struct Query {
  int64_t flat, begin, end;
  A maximum, total;
};

// Turns the products q . k of one query into weights, relative to the largest score so far. Rescales the sum if that
// has grown.
template <typename A>
inline void online_softmax(const DecodeAttentionParams& p, A* scores, int64_t count, Query<A>& query, A* sum) {
  scale_and_cap(scores, count, static_cast<A>(p.softmax_scale), static_cast<A>(p.softcap));
  const A maximum = std::max(query.maximum, largest(scores, count));
  if (maximum != query.maximum) {
    const A rescale = std::exp(query.maximum - maximum);
    for (int64_t d = 0; d < p.head_dim; ++d) sum[d] *= rescale;
    query.total *= rescale;
    query.maximum = maximum;
  }
  query.total += weights_of(scores, count, maximum);
}

template <typename T>
inline void process_tasks(const DecodeAttentionParams& p, const AttentionPlan& plan, int64_t task_begin,
                          int64_t task_end) {
  using A = Wide<T>;
  const int64_t dim = p.head_dim, padded = (dim + kStep - 1) / kStep * kStep, group = p.heads / p.kv_heads;
  Query<A> queries[kQueryTile];
  A scores[kQueryTile][kKvTile];
  std::vector<A> q(kQueryTile * padded), sums(kQueryTile * dim), buffer(kValuesAtOnce * padded);
  std::vector<LoopType<T>> out_buffer(dim);
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t split = task % plan.splits, query_tile = task / plan.splits % plan.query_tiles;
    const int64_t kv_head = task / plan.splits / plan.query_tiles % p.kv_heads;
    const int64_t b = task / plan.splits / plan.query_tiles / p.kv_heads;
    const int64_t rows = std::min(kQueryTile, p.tokens * group - query_tile * kQueryTile);
    const int64_t start = p.cache_leftpad != nullptr ? std::max<int64_t>(p.cache_leftpad[b], 0) : 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t t = (query_tile * kQueryTile + r) / group,
                    head = kv_head * group + (query_tile * kQueryTile + r) % group;
      const int64_t end = std::max<int64_t>(p.cache_seqlens[b] - p.tokens + t + 1, 0);
      queries[r] = {(b * p.tokens + t) * p.heads + head,
                    p.window_left >= 0 ? std::max(start, end - 1 - p.window_left) : start, end,
                    -std::numeric_limits<A>::infinity(), 0};
      const T* const row = static_cast<const T*>(p.q) + b * p.q_batch + t * p.q_token + head * p.q_head;
      std::copy_n(widened<true>(row, dim, buffer.data()), padded, &q[r * padded]);
    }
    std::fill_n(sums.begin(), rows * dim, A(0));

    // The keys that any query of the tile sees (both ends grow with the token), and those of this split.
    const int64_t first = queries[0].begin, live = std::max<int64_t>(queries[rows - 1].end - first, 0);
    const int64_t kv_tiles = (live + kKvTile - 1) / kKvTile;
    const int64_t begin = first + kv_tiles * split / plan.splits * kKvTile;
    const int64_t end = first + std::min(live, kv_tiles * (split + 1) / plan.splits * kKvTile);
    for (int64_t tile_begin = begin; tile_begin < end; tile_begin += kKvTile) {
      const int64_t count = std::min(kKvTile, end - tile_begin);
      const CacheRows<T> keys(p, b, tile_begin, count, kv_head, false);
      for (int64_t j = 0; j < count; ++j) {
        const A* const k = widened<true>(keys.row(j), dim, buffer.data());
        for (int64_t r = 0; r < rows; ++r) scores[r][j] = dot_product(&q[r * padded], k, padded);
      }
      const CacheRows<T> values(p, b, tile_begin, count, kv_head, true);
      for (int64_t r = 0; r < rows; ++r) {
        Query<A>& query = queries[r];
        const int64_t from = std::max(query.begin - tile_begin, int64_t{0}),
                      visible = std::min(query.end - tile_begin, count) - from;
        if (visible > 0) online_softmax(p, scores[r] + from, visible, query, &sums[r * dim]);
      }
      for (int64_t j = 0; j < count; j += kValuesAtOnce) {
        const A* v[kValuesAtOnce];
        const int64_t together = std::min<int64_t>(kValuesAtOnce, count - j);
        for (int64_t i = 0; i < together; ++i) {
          v[i] = widened<false>(values.row(j + i), dim, buffer.data() + i * padded);
        }
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t from = std::max(queries[r].begin - tile_begin, j);
          const int64_t to = std::min(queries[r].end - tile_begin, j + together);
          if (to - from == kValuesAtOnce) {
            add_weighted<kValuesAtOnce>(&sums[r * dim], scores[r] + j, v, dim);
          } else {
            for (int64_t i = from; i < to; ++i) add_weighted<1>(&sums[r * dim], scores[r] + i, v + (i - j), dim);
          }
        }
      }
    }

    for (int64_t r = 0; r < rows; ++r) {
      if (plan.splits == 1) {
        write_output<T>(p, queries[r].flat, queries[r].total, &sums[r * dim], out_buffer.data());
      } else {
        A* const partial = static_cast<A*>(p.workspace) + (queries[r].flat * plan.splits + split) * (dim + 2);
        partial[0] = queries[r].maximum;
        partial[1] = queries[r].total;
        std::copy_n(&sums[r * dim], dim, partial + 2);
      }
    }
  }
}

template <typename T>
inline void merge(const DecodeAttentionParams& p, const AttentionPlan& plan, int64_t flat_begin, int64_t flat_end) {
  using A = Wide<T>;
  const int64_t dim = p.head_dim, size = dim + 2;
  std::vector<A> sum(dim);
  std::vector<LoopType<T>> out_buffer(dim);
  for (int64_t flat = flat_begin; flat < flat_end; ++flat) {
    const A* const partials = static_cast<const A*>(p.workspace) + flat * plan.splits * size;
    A maximum = partials[0], total = 0;
    for (int64_t split = 1; split < plan.splits; ++split) maximum = std::max(maximum, partials[split * size]);
    std::fill(sum.begin(), sum.end(), A(0));
    for (int64_t split = 0; split < plan.splits; ++split) {
      const A* const partial = partials + split * size;
      const A weight = partial[0] == maximum ? A(1) : std::exp(partial[0] - maximum);
      total += partial[1] * weight;
      add_weighted<1>(sum.data(), &weight, std::array{partial + 2}.data(), dim);
    }
    write_output<T>(p, flat, total, sum.data(), out_buffer.data());
  }
}

}  // namespace

AttentionPlan plan_decode_attention(const DecodeAttentionParams& p, int64_t longest) {
  const int64_t query_tiles = (p.tokens * (p.heads / p.kv_heads) + kQueryTile - 1) / kQueryTile,
                work_tiles = p.batch * p.kv_heads * query_tiles;
  const int64_t splits = std::clamp<int64_t>(kMinTasks / work_tiles, 1, std::max<int64_t>(1, longest / kMinSplitKeys));
  return {query_tiles, splits, work_tiles * splits};
}

size_t attention_partials_bytes(const DecodeAttentionParams& p, const AttentionPlan& plan, Dtype dtype) {
  if (plan.splits == 1) return 0;
  const size_t size = dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  return static_cast<size_t>(p.batch * p.tokens * p.heads * plan.splits * (p.head_dim + 2)) * size;
}

void decode_attention(const DecodeAttentionParams& params, const AttentionPlan& plan, Dtype dtype, int64_t begin,
                      int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { process_tasks<typename decltype(tag)::type>(params, plan, begin, end); });
}

void merge_attention(const DecodeAttentionParams& params, const AttentionPlan& plan, Dtype dtype, int64_t begin,
                     int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { merge<typename decltype(tag)::type>(params, plan, begin, end); });
}

}  // namespace llmk::cpu
