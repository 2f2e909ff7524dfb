// Rotary position embedding on the CPU. For every pair (a, b) = (x[i], x[i + R/2]), or (x[2i], x[2i + 1]) interleaved:
//   a' = a cos - b sin, b' = b cos + a sin, each product and each sum rounded to the dtype, as eager PyTorch does;
//   the transpose (backward) has the two sines exchanged and negated.
// The factors of a token are prepared once for all its heads.
#include "cpu/rope.h"

#include <algorithm>

#include "cpu/convert.h"

// Tells the compiler that iterations are independent, also in place: each overwrites only what it has read itself.
#if defined(__GNUC__) && !defined(__clang__)
#define LLMK_INDEPENDENT _Pragma("GCC ivdep")
#else
#define LLMK_INDEPENDENT
#endif

namespace llmk::cpu {
namespace {

constexpr int64_t kPairs = 128;  // pairs that are rotated at a time

// The factors of some pairs: a' = a cos_a - b sin_a, b' = b cos_b + a sin_b.
template <typename A>
struct Factors {
  A cos_a[kPairs], cos_b[kPairs], sin_a[kPairs], sin_b[kPairs];
};

// Where some pairs are in a row: a run of the a and a run of the b; interleaved, the pairs cut into two equal runs.
struct Runs {
  int64_t first, second, count;
  bool interleaved;

  static Runs of(bool interleaved, int64_t begin, int64_t count, int64_t distance) {
    if (interleaved) return {2 * begin, 2 * begin + count, count, true};
    return {begin, begin + distance, count, false};
  }
};

template <typename S>
struct Pairs {
  S *a, *b;
};

template <typename T>
inline Pairs<const LoopType<T>> load_pairs(const T* row, const Runs& runs, LoopType<T>* buffer) {
  const LoopType<T>* a = load(row + runs.first, runs.count, buffer);
  const LoopType<T>* b = load(row + runs.second, runs.count, buffer + runs.count);
  return {a, runs.interleaved ? a + 1 : b};
}

template <typename T>
inline void load_factors(const RopeParams& p, const T* cos, const T* sin, int64_t begin, int64_t count,
                         Factors<Wide<T>>& f) {
  const Runs runs =
      p.half_width ? Runs::of(false, begin, count, 0) : Runs::of(p.interleaved, begin, count, p.rotary_dim / 2);
  LoopType<T> buffer[2 * kPairs];
  const int64_t step = runs.interleaved ? 2 : 1;
  const auto c = load_pairs(cos, runs, buffer);
  for (int64_t i = 0; i < count; ++i) {
    f.cos_a[i] = widen(c.a[i * step]);
    f.cos_b[i] = widen(c.b[i * step]);
  }
  const auto s = load_pairs(sin, runs, buffer);
  for (int64_t i = 0; i < count; ++i) {
    const Wide<T> sin_a = widen(s.a[i * step]), sin_b = widen(s.b[i * step]);
    f.sin_a[i] = p.transposed ? -sin_b : sin_a;
    f.sin_b[i] = p.transposed ? -sin_a : sin_b;
  }
}

template <typename T, int kStep>
inline void rotate(Pairs<const LoopType<T>> in, Pairs<LoopType<T>> out, int64_t count, const Factors<Wide<T>>& f) {
  using A = Wide<T>;
  LLMK_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const A a = widen(in.a[i * kStep]), b = widen(in.b[i * kStep]);
    out.a[i * kStep] = narrow<T>(rounded<T>(a * f.cos_a[i]) - rounded<T>(b * f.sin_a[i]));
    out.b[i * kStep] = narrow<T>(rounded<T>(b * f.cos_b[i]) + rounded<T>(a * f.sin_b[i]));
  }
}

template <typename T>
inline void rotate_heads(const RopeTensor& x, int64_t batch, int64_t token, const Runs& runs,
                         const Factors<Wide<T>>& f) {
  const T* in = static_cast<const T*>(x.in) + batch * x.in_batch + token * x.in_token;
  T* out = static_cast<T*>(x.out) + batch * x.out_batch + token * x.out_token;
  LoopType<T> in_buffer[2 * kPairs], out_buffer[2 * kPairs];
  for (int64_t head = 0; head < x.heads; ++head, in += x.in_head, out += x.out_head) {
    const auto from = load_pairs(in, runs, in_buffer);
    LoopType<T>* first = output_buffer(out + runs.first, out_buffer);
    LoopType<T>* second = output_buffer(out + runs.second, out_buffer + runs.count);
    if (runs.interleaved) {
      rotate<T, 2>(from, {first, first + 1}, runs.count, f);
    } else {
      rotate<T, 1>(from, {first, second}, runs.count, f);
    }
    store(first, runs.count, out + runs.first);
    store(second, runs.count, out + runs.second);
  }
}

// Copies the dimensions from rotary_dim on.
template <typename T>
inline void copy_rest(const RopeParams& p, const RopeTensor& x, int64_t batch, int64_t token) {
  if (p.rotary_dim == p.head_dim || x.in == x.out) return;
  const T* in = static_cast<const T*>(x.in) + batch * x.in_batch + token * x.in_token + p.rotary_dim;
  T* out = static_cast<T*>(x.out) + batch * x.out_batch + token * x.out_token + p.rotary_dim;
  for (int64_t head = 0; head < x.heads; ++head, in += x.in_head, out += x.out_head) {
    std::copy_n(in, p.head_dim - p.rotary_dim, out);
  }
}

inline int64_t position_at(const RopeParams& p, int64_t batch, int64_t token) {
  const int64_t i = batch * p.positions_batch + token * p.positions_token;
  return p.position_ids_int64 ? static_cast<const int64_t*>(p.position_ids)[i]
                              : static_cast<const int32_t*>(p.position_ids)[i];
}

template <typename T>
inline void rope_tokens(const RopeParams& p, int64_t flat_begin, int64_t flat_end) {
  Factors<Wide<T>> factors;
  for (int64_t flat = flat_begin; flat < flat_end; ++flat) {
    const int64_t batch = flat / p.tokens, token = flat % p.tokens;
    const T* cos = static_cast<const T*>(p.cos);
    const T* sin = static_cast<const T*>(p.sin);
    if (p.position_ids != nullptr) {
      const int64_t position = position_at(p, batch, token);
      cos += position * p.cos_row;
      sin += position * p.sin_row;
    } else {
      cos += batch * p.cos_batch + token * p.cos_token;
      sin += batch * p.sin_batch + token * p.sin_token;
    }
    for_blocks<kPairs>(p.rotary_dim / 2, [&](int64_t begin, int64_t count) {
      load_factors(p, cos, sin, begin, count, factors);
      const Runs runs = Runs::of(p.interleaved, begin, count, p.rotary_dim / 2);
      rotate_heads<T>(p.q, batch, token, runs, factors);
      rotate_heads<T>(p.k, batch, token, runs, factors);
    });
    copy_rest<T>(p, p.q, batch, token);
    copy_rest<T>(p, p.k, batch, token);
  }
}

}  // namespace

void rope(const RopeParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { rope_tokens<typename decltype(tag)::type>(params, begin, end); });
}

int64_t first_bad_position(const RopeParams& params) {
  if (params.position_ids == nullptr) return -1;
  for (int64_t batch = 0; batch < params.batch; ++batch) {
    for (int64_t token = 0; token < params.tokens; ++token) {
      const int64_t position = position_at(params, batch, token);
      if (position < 0 || position >= params.table_rows) return batch * params.tokens + token;
    }
  }
  return -1;
}

}  // namespace llmk::cpu
