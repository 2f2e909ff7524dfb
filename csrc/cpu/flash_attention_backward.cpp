// Gradients of attention over prompts on the CPU, in float32 (float64 for float64), without the scores in memory. They
// are computed again, from the log-sum-exp of each query:
//
//   p[i, j] = e^(s[i, j] - lse[i])    delta[i] = grad_y[i] . y[i] - grad_lse[i]
//   ds[i, j] = softmax_scale p[i, j] (grad_y[i] . v[j] - delta[i]), times the derivative of the softcap
//
// Tasks of three kinds, of which none adds to what another one writes:
//
//   (sequence, kv head, 32 keys)     grad_k[j] = sum_i ds[i, j] q[i],  grad_v[j] = sum_i p[i, j] grad_y[i]
//   (sequence, head, 32 queries)     grad_q[i] = sum_j ds[i, j] k[j]
//   (head)                           grad_sink = -sum_i e^(sink - lse[i]) delta[i]
//
// As in the forward, all products are sums of scaled rows: loops along contiguous memory. Idea: Dao 2023,
// "FlashAttention-2".
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/flash_attention.h"
#include "cpu/flash_attention_rows.h"
#include "cpu/online_softmax.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kTile = 32;  // queries and keys

using Params = FlashAttentionBackwardParams;

int64_t tiles(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

// lse and delta of a query.
template <typename A>
struct Statistics {
  A lse, delta;
};

// A tile of queries of a head and one of keys of its kv head, converted, and their weights. What a thread keeps.
template <typename T>
class Tiles {
 public:
  using A = Wide<T>;

  explicit Tiles(const Params& params) : p(params), dim(params.head_dim) {
    for (std::vector<A>* rows : {&q, &grad_y, &k, &k_columns, &v_columns, &q_sums, &k_sums, &v_sums}) {
      rows->resize(kTile * dim);
    }
    row.resize(dim);
    out.resize(dim);
  }

  void load_queries(int64_t b, int64_t head, int64_t first) {
    first_query = first, queries = std::min(kTile, p.q_tokens - first);
    for (int64_t r = 0; r < queries; ++r) {
      const int64_t token = first + r;
      widen_row(static_cast<const T*>(p.q) + b * p.q_batch + token * p.q_token + head * p.q_head, dim, &q[r * dim]);
      statistics[r] = load_grad_y(b, head, token, &grad_y[r * dim]);
    }
  }

  // `rows`: whether the keys are needed by rows, too.
  void load_keys(int64_t b, int64_t kv_head, int64_t first, bool rows) {
    first_key = first, keys = std::min(kTile, p.k_tokens - first);
    const T* const from_k = static_cast<const T*>(p.k) + b * p.k_batch + kv_head * p.k_head;
    const T* const from_v = static_cast<const T*>(p.v) + b * p.v_batch + kv_head * p.v_head;
    for (int64_t j = 0; j < keys; ++j) {
      const auto load = [&](const T* source, std::vector<A>& columns) {
        widen_row(source, dim, row.data());
        for (int64_t d = 0; d < dim; ++d) columns[d * kTile + j] = row[d];
      };
      load(from_v + (first + j) * p.v_token, v_columns);
      load(from_k + (first + j) * p.k_token, k_columns);
      if (rows) std::copy_n(row.begin(), dim, &k[j * dim]);
    }
  }

  // p and ds of the tile, zeros for keys that a query does not see; false if there is nothing else.
  bool compute_weights(int64_t b, int64_t head) {
    const A scale = static_cast<A>(p.softmax_scale), cap = static_cast<A>(p.softcap);
    bool any = false;
    for (int64_t r = 0; r < queries; ++r) {
      const auto [begin, end] = visible_keys(p, b, first_query + r);
      const int64_t from = std::clamp<int64_t>(begin - first_key, 0, keys);
      const int64_t count = std::clamp<int64_t>(end - first_key, from, keys) - from;
      A *const of_p = weights + r * kTile, *const of_ds = gradients + r * kTile;
      std::fill_n(of_p, kTile, A(0));
      std::fill_n(of_ds, kTile, A(0));
      const Statistics<A> of_query = statistics[r];
      const bool sees = count > 0 && of_query.lse != -std::numeric_limits<A>::infinity();
      seen[r] = {from, sees ? count : 0};
      if (!sees) continue;
      any = true;
      add_weighted_rows(of_p + from, &q[r * dim], &k_columns[from], kTile, dim, count);
      add_weighted_rows(of_ds + from, &grad_y[r * dim], &v_columns[from], kTile, dim, count);
      const auto add = [&](A* scores) {
        if (p.bias) add_bias<T>(p, b, head, first_query + r, first_key + from, count, scores);
      };
      row_of_weights(of_p + from, of_ds + from, count, scale, cap, of_query, add);
    }
    return any;
  }

  void add_to_queries() {
    for (int64_t r = 0; r < queries; ++r) {
      const auto [from, count] = seen[r];
      add_weighted_rows(&q_sums[r * dim], gradients + r * kTile + from, &k[from * dim], dim, count, dim);
    }
  }
  void add_to_keys() {
    A of_p[kTile], of_ds[kTile];  // of a key
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t r = 0; r < queries; ++r) of_p[r] = weights[r * kTile + j], of_ds[r] = gradients[r * kTile + j];
      add_weighted_rows(&v_sums[j * dim], of_p, grad_y.data(), dim, queries, dim);
      add_weighted_rows(&k_sums[j * dim], of_ds, q.data(), dim, queries, dim);
    }
  }

  void clear() {
    for (std::vector<A>* sums : {&q_sums, &k_sums, &v_sums}) std::fill(sums->begin(), sums->end(), A(0));
  }
  void store_queries(int64_t b, int64_t head) {
    for (int64_t r = 0; r < queries; ++r) {
      store_row(&q_sums[r * dim], p.grad_q, (b * p.q_tokens + first_query + r) * p.heads + head);
    }
  }
  void store_keys(int64_t b, int64_t kv_head) {
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t index = (b * p.k_tokens + first_key + j) * p.kv_heads + kv_head;
      store_row(&k_sums[j * dim], p.grad_k, index);
      store_row(&v_sums[j * dim], p.grad_v, index);
    }
  }

  // grad_y of a query to `target`.
  Statistics<A> load_grad_y(int64_t b, int64_t head, int64_t token, A* target) {
    const T* const source =
        static_cast<const T*>(p.grad_y) + b * p.grad_y_batch + token * p.grad_y_token + head * p.grad_y_head;
    const T* const y = static_cast<const T*>(p.y) + ((b * p.q_tokens + token) * p.heads + head) * dim;
    const int64_t index = (b * p.heads + head) * p.q_tokens + token;
    widen_row(source, dim, target);
    widen_row(y, dim, row.data());
    A lanes[kLanes] = {};
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) lanes[i] += target[d + i] * row[d + i];
    }
    for (; d < dim; ++d) lanes[0] += target[d] * row[d];
    const A of_lse = p.grad_lse != nullptr ? static_cast<const A*>(p.grad_lse)[index] : A(0);
    return {static_cast<const A*>(p.lse)[index], sum_of_lanes(lanes) - of_lse};
  }

 private:
  // From q k and grad_y v. add(scores) adds a bias.
  template <typename Add>
  static void row_of_weights(A* __restrict p, A* __restrict ds, int64_t count, A scale, A cap,
                             const Statistics<A>& of_query, const Add& add) {
    const A lse = of_query.lse, delta = of_query.delta;
    for (int64_t j = 0; j < count; ++j) p[j] *= scale, ds[j] = (ds[j] - delta) * scale;
    if (cap > 0) {
      for (int64_t j = 0; j < count; ++j) {
        const A t = hyperbolic_tangent(p[j] / cap);
        p[j] = cap * t;
        ds[j] *= A(1) - t * t;
      }
    }
    add(p);
    for (int64_t j = 0; j < count; ++j) {
      const A score = p[j], weight = exponential(score - lse);
      p[j] = score == score ? weight : score;  // NaN stays
      ds[j] *= p[j];
    }
  }

  void store_row(const A* sums, void* target, int64_t index) {
    T* const row = static_cast<T*>(target) + index * dim;
    LoopType<T>* const output = output_buffer(row, out.data());
    for (int64_t d = 0; d < dim; ++d) output[d] = narrow<T>(sums[d]);
    store(output, dim, row);
  }

  const Params& p;
  const int64_t dim;
  int64_t first_query = 0, queries = 0, first_key = 0, keys = 0;
  std::vector<A> q, grad_y, k, k_columns, v_columns, q_sums, k_sums, v_sums, row;
  std::vector<LoopType<T>> out;
  Statistics<A> statistics[kTile];
  std::pair<int64_t, int64_t> seen[kTile];  // of each query: the first key of the tile, and how many
  A weights[kTile * kTile], gradients[kTile * kTile];
};

template <typename T>
inline void process_keys(const Params& p, int64_t task, Tiles<T>& buffers) {
  const int64_t tile = task % tiles(p.k_tokens), row = task / tiles(p.k_tokens);
  const int64_t b = row / p.kv_heads, kv_head = row % p.kv_heads, heads = p.heads / p.kv_heads;
  buffers.load_keys(b, kv_head, tile * kTile, false);
  buffers.clear();
  const int64_t last = std::min((tile + 1) * kTile, p.k_tokens) - 1;
  for (int64_t head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
    for (int64_t first = 0; first < p.q_tokens; first += kTile) {
      const int64_t last_query = std::min(first + kTile, p.q_tokens) - 1;
      if (visible_keys(p, b, last_query).second <= tile * kTile || visible_keys(p, b, first).first > last) continue;
      buffers.load_queries(b, head, first);
      if (buffers.compute_weights(b, head)) buffers.add_to_keys();
    }
  }
  buffers.store_keys(b, kv_head);
}

template <typename T>
inline void process_queries(const Params& p, int64_t task, Tiles<T>& buffers) {
  const int64_t first = task % tiles(p.q_tokens) * kTile, row = task / tiles(p.q_tokens);
  const int64_t b = row / p.heads, head = row % p.heads, kv_head = head / (p.heads / p.kv_heads);
  buffers.load_queries(b, head, first);
  buffers.clear();
  const int64_t end = visible_keys(p, b, std::min(first + kTile, p.q_tokens) - 1).second;
  for (int64_t key = visible_keys(p, b, first).first / kTile * kTile; key < end; key += kTile) {
    buffers.load_keys(b, kv_head, key, true);
    if (buffers.compute_weights(b, head)) buffers.add_to_queries();
  }
  buffers.store_queries(b, head);
}

template <typename T>
inline void process_sink(const Params& p, int64_t head, Tiles<T>& buffers) {
  using A = Wide<T>;
  std::vector<A> grad_y(p.head_dim);
  A sink, total = 0;
  widen_row(static_cast<const T*>(p.sinks) + head, 1, &sink);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t token = 0; token < p.q_tokens; ++token) {
      const auto [lse, delta] = buffers.load_grad_y(b, head, token, grad_y.data());
      if (lse != -std::numeric_limits<A>::infinity()) total -= std::exp(sink - lse) * delta;
    }
  }
  T* const target = static_cast<T*>(p.grad_sinks) + head;
  LoopType<T> buffer;
  LoopType<T>* const output = output_buffer(target, &buffer);
  *output = narrow<T>(total);
  store(output, 1, target);
}

template <typename T>
inline void process_tasks(const Params& p, int64_t begin, int64_t end) {
  const int64_t of_keys = p.batch * p.kv_heads * tiles(p.k_tokens), of_queries = p.batch * p.heads * tiles(p.q_tokens);
  Tiles<T> buffers(p);
  for (int64_t task = begin; task < end; ++task) {
    if (task < of_keys) {
      process_keys(p, task, buffers);
    } else if (task < of_keys + of_queries) {
      process_queries(p, task - of_keys, buffers);
    } else {
      process_sink(p, task - of_keys - of_queries, buffers);
    }
  }
}

}  // namespace

int64_t flash_attention_backward_tasks(const Params& p) {
  return p.batch * (p.kv_heads * tiles(p.k_tokens) + p.heads * tiles(p.q_tokens)) + (p.grad_sinks ? p.heads : 0);
}

void flash_attention_backward(const Params& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { process_tasks<typename decltype(tag)::type>(params, begin, end); });
}

}  // namespace llmk::cpu
