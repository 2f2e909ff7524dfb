// Cross-entropy on the CPU, computed in float32 (float64 for float64), by the formulas of
// csrc/kernels/loss/row_terms.cuh. Rows are read in blocks: for the maximum, for the sums, for the gradient, the later
// times from cache. Targets have been checked.
#include "cpu/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/convert.h"
#include "cpu/exponential.h"
#include "cpu/row_sums.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kBlock = 1024;

// What all rows have in common.
template <typename A>
struct LossTerms {
  const A* weight;
  A divisor, class_weights, smoothing, kept, lse_square_scale, softcap;

  explicit LossTerms(const CrossEntropyParams& p)
      : weight(static_cast<const A*>(p.weight)),
        divisor(p.sums != nullptr ? static_cast<const A*>(p.sums)[0] : A(1)),
        class_weights(p.sums != nullptr ? static_cast<const A*>(p.sums)[1] : static_cast<A>(p.vocab)),
        smoothing(static_cast<A>(p.options.label_smoothing / static_cast<double>(p.vocab))),
        kept(static_cast<A>(1.0 - p.options.label_smoothing)),
        lse_square_scale(static_cast<A>(p.options.lse_square_scale)),
        softcap(static_cast<A>(p.options.softcap)) {}

  A of_target(int64_t target) const { return kept * (weight != nullptr ? weight[target] : A(1)); }

  template <typename S>
  void scores(const S* x, int64_t count, A* z) const {
    const A cap = softcap;
    if (cap > A(0)) {
      for (int64_t i = 0; i < count; ++i) z[i] = cap * std::tanh(widen(x[i]) / cap);
    } else {
      for (int64_t i = 0; i < count; ++i) z[i] = widen(x[i]);
    }
  }
};

// The gradient of a row, with e^(z - shift) of the probabilities times `factor`.
template <typename T>
inline void write_gradient(const CrossEntropyParams& p, const LossTerms<Wide<T>>& terms, int64_t row, Wide<T> shift,
                           Wide<T> factor, Wide<T> scale) {
  using A = Wide<T>;
  A z[kBlock], g[kBlock];
  LoopType<T> buffer[kBlock], out_buffer[kBlock];
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  T* grad = static_cast<T*>(p.grad) + row * p.grad_stride;
  const int64_t target = p.target[row];
  const bool ignored = target == p.options.ignore_index;
  const A uniform = terms.smoothing * scale, cap = terms.softcap;
  for_blocks<kBlock>(p.vocab, [&](int64_t begin, int64_t count) {
    if (ignored) {
      std::fill_n(g, count, A(0));
    } else {
      terms.scores(load(logits + begin, count, buffer), count, z);
      for (int64_t i = 0; i < count; ++i) {
        const A x = z[i] - shift, e = exponential(x);
        g[i] = (x == x ? e : x) * factor;
      }
      if (uniform != A(0)) {
        for (int64_t i = 0; i < count; ++i)
          g[i] -= uniform * (terms.weight != nullptr ? terms.weight[begin + i] : A(1));
      }
      if (target >= begin && target < begin + count) g[target - begin] -= terms.of_target(target) * scale;
      if (cap > A(0)) {
        for (int64_t i = 0; i < count; ++i) g[i] *= A(1) - (z[i] / cap) * (z[i] / cap);
      }
    }
    LoopType<T>* out = output_buffer(grad + begin, out_buffer);
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(g[i]);
    store(out, count, grad + begin);
  });
}

template <typename A>
inline A probability_factor(const LossTerms<A>& terms, A of_target, A lse) {
  return of_target + terms.smoothing * terms.class_weights + A(2) * terms.lse_square_scale * lse;
}

template <typename T>
inline void forward_rows(const CrossEntropyParams& p, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  A z[kBlock];
  LoopType<T> buffer[kBlock];
  const LossTerms<A> terms(p);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
    const int64_t target = p.target[row];
    A *loss = static_cast<A*>(p.losses) + row, *lse = static_cast<A*>(p.lse) + row;
    if (target == p.options.ignore_index) {
      *loss = *lse = A(0);
      if (p.grad != nullptr) write_gradient<T>(p, terms, row, A(0), A(0), A(0));
      continue;
    }
    A max = -std::numeric_limits<A>::infinity(), sum = 0, weighted = 0, z_target;
    for_blocks<kBlock>(p.vocab, [&](int64_t begin, int64_t count) {
      terms.scores(load(logits + begin, count, buffer), count, z);
      max = std::max(max, max_of(count, z));
    });
    const A shift = std::isinf(max) && max < A(0) ? A(0) : max;  // -inf - -inf is NaN
    for_blocks<kBlock>(p.vocab, [&](int64_t begin, int64_t count) {
      terms.scores(load(logits + begin, count, buffer), count, z);
      sum += sum_of<A>(count, [&](int64_t i) {
        const A x = z[i] - shift, e = exponential(x);
        return x == x ? e : x;
      });
      if (terms.smoothing > A(0)) {
        const A* weight = terms.weight != nullptr ? terms.weight + begin : nullptr;
        weighted += sum_of<A>(count, [&](int64_t i) { return weight != nullptr ? weight[i] * z[i] : z[i]; });
      }
    });
    terms.scores(load(logits + target, 1, buffer), 1, &z_target);
    const A of_target = terms.of_target(target), log_sum = std::log(sum);
    *lse = shift + log_sum;
    *loss = of_target * (log_sum + (shift - z_target)) + terms.lse_square_scale * *lse * *lse;
    if (terms.smoothing > A(0)) *loss += terms.smoothing * (terms.class_weights * *lse - weighted);
    if (p.grad != nullptr) {
      const A scale = A(1) / terms.divisor;
      write_gradient<T>(p, terms, row, shift, probability_factor(terms, of_target, *lse) * scale / sum, scale);
    }
  }
}

template <typename T>
inline void backward_rows(const CrossEntropyParams& p, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  const LossTerms<A> terms(p);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const A grad_loss = static_cast<const A*>(p.grad_loss)[row * p.grad_loss_stride];
    if (p.grad_is_of_one && grad_loss == A(1)) continue;
    const int64_t target = p.target[row];
    const A of_target = target == p.options.ignore_index ? A(0) : terms.of_target(target);
    const A lse = static_cast<const A*>(p.lse)[row];
    const A scale = grad_loss / terms.divisor;
    write_gradient<T>(p, terms, row, lse, probability_factor(terms, of_target, lse) * scale, scale);
  }
}

template <typename T>
inline void scale_rows(const CrossEntropyScaleParams& p, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  LoopType<T> buffer[kBlock], out_buffer[kBlock];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const A factor = static_cast<const A*>(p.grad_loss)[row * p.grad_loss_stride];
    if (factor == A(1)) continue;
    T* grad = static_cast<T*>(p.grad) + row * p.vocab;
    for_blocks<kBlock>(p.vocab, [&](int64_t begin, int64_t count) {
      const LoopType<T>* g = load(grad + begin, count, buffer);
      LoopType<T>* out = output_buffer(grad + begin, out_buffer);
      for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(widen(g[i]) * factor);
      store(out, count, grad + begin);
    });
  }
}

template <typename A>
inline void write_sums(const CrossEntropyParams& p, bool mean, A* sums) {
  const A* weight = static_cast<const A*>(p.weight);
  A targets = 0;
  for (int64_t row = 0; mean && row < p.rows; ++row) {
    if (p.target[row] != p.options.ignore_index) targets += weight != nullptr ? weight[p.target[row]] : A(1);
  }
  sums[0] = mean ? targets : A(1);
  sums[1] = weight != nullptr ? sum_of<A>(p.vocab, [=](int64_t i) { return weight[i]; }) : static_cast<A>(p.vocab);
}

}  // namespace

void cross_entropy_sums(const CrossEntropyParams& params, bool mean, Dtype dtype, void* sums) {
  dispatch_kernel(dtype, [&](auto tag) {
    using A = Wide<typename decltype(tag)::type>;
    write_sums(params, mean, static_cast<A*>(sums));
  });
}

void cross_entropy(const CrossEntropyParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) { forward_rows<typename decltype(tag)::type>(params, row_begin, row_end); });
}

void cross_entropy_reduce(const CrossEntropyParams& params, Dtype dtype, void* loss) {
  dispatch_kernel(dtype, [&](auto tag) {
    using A = Wide<typename decltype(tag)::type>;
    const A* losses = static_cast<const A*>(params.losses);
    const A sum = sum_of<A>(params.rows, [=](int64_t i) { return losses[i]; });
    *static_cast<A*>(loss) = sum / (params.sums != nullptr ? static_cast<const A*>(params.sums)[0] : A(1));
  });
}

void cross_entropy_backward(const CrossEntropyParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) { backward_rows<typename decltype(tag)::type>(params, row_begin, row_end); });
}

void cross_entropy_scale(const CrossEntropyScaleParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) { scale_rows<typename decltype(tag)::type>(params, row_begin, row_end); });
}

}  // namespace llmk::cpu
