// Adam, AdamW, the norm of gradients and their clipping on the CPU: the formulas of kernels/optim, in float32 (float64
// for float64), each result rounded once.
#include "cpu/optim.h"

#include <cmath>

#include "cpu/convert.h"
#include "optim_arithmetic.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kBlock = 512;

// The memory of one tensor, from the first element to be processed.
template <typename P, typename S>
struct Operands {
  P* param;
  const P* grad;
  S *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
};

template <typename P>
inline float round_stochastically(float x, uint32_t random) {
  if constexpr (std::is_same_v<P, Half>) return optim::round_to_float16(x, random);
  return optim::round_to_bfloat16(x, random);
}

// `first` is the number of the first element in its tensor.
template <bool kAmsgrad, typename P, typename S>
inline void update(const AdamParams& params, int64_t number, const optim::AdamScalars<Wide<P>> scalars,
                   const Operands<P, S> at, int64_t first, int64_t size) {
  using A = Wide<P>;
  LoopType<P> param_buffer[kBlock], grad_buffer[kBlock], out_buffer[kBlock];
  A updated[kBlock];
  for_blocks<kBlock>(size, [&](int64_t begin, int64_t count) {
    const LoopType<P>* p = load(at.param + begin, count, param_buffer);
    const LoopType<P>* g = load(at.grad + begin, count, grad_buffer);
    S *const m = at.exp_avg + begin, *const v = at.exp_avg_sq + begin;
    [[maybe_unused]] S* const v_max = kAmsgrad ? at.max_exp_avg_sq + begin : nullptr;
    const optim::AdamScalars<A> local = scalars;
    for (int64_t i = 0; i < count; ++i) {
      A new_m = widen(m[i]), new_v = widen(v[i]), new_max = 0;
      if constexpr (kAmsgrad) new_max = widen(v_max[i]);
      updated[i] = local.template update<kAmsgrad>(widen(p[i]), widen(g[i]), new_m, new_v, new_max);
      m[i] = narrow<S>(new_m);
      v[i] = narrow<S>(new_v);
      if constexpr (kAmsgrad) v_max[i] = narrow<S>(new_max);
    }
    if constexpr (sizeof(P) == 2) {
      if (params.stochastic) {
        const AdamTensor& tensor = params.tensors[number];
        const optim::RandomQuads random(params.seed, *tensor.step, tensor.index);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t element = first + begin + i;
          const uint64_t bits = random(element / 4);
          updated[i] = round_stochastically<P>(updated[i], static_cast<uint32_t>(bits >> element % 4 * 16) & 0xffffu);
        }
      }
    }
    LoopType<P>* out = output_buffer(at.param + begin, out_buffer);
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<P>(updated[i]);
    store(out, count, at.param + begin);
  });
}

template <typename P, typename S>
inline void update(const AdamParams& params, int64_t number, int64_t begin, int64_t end) {
  const AdamTensor& tensor = params.tensors[number];
  using A = Wide<P>;
  const optim::AdamScalars<A> scalars =
      optim::AdamConstants<A>(params.options)
          .at(static_cast<A>(*tensor.step) + A(1), params.lr, params.grad_scale, params.grad_norm);
  const Operands<P, S> at{static_cast<P*>(tensor.param) + begin, static_cast<const P*>(tensor.grad) + begin,
                          static_cast<S*>(tensor.exp_avg) + begin, static_cast<S*>(tensor.exp_avg_sq) + begin,
                          params.amsgrad ? static_cast<S*>(tensor.max_exp_avg_sq) + begin : nullptr};
  if (params.amsgrad) {
    update<true>(params, number, scalars, at, begin, end - begin);
  } else {
    update<false>(params, number, scalars, at, begin, end - begin);
  }
}

}  // namespace

void adam(const AdamParams& params, int64_t number, int64_t begin, int64_t end) {
  const AdamTensor& tensor = params.tensors[number];
  dispatch_kernel(tensor.dtype, [&](auto tag) {
    using P = typename decltype(tag)::type;
    if constexpr (std::is_same_v<P, double>) {
      update<double, double>(params, number, begin, end);
    } else if (tensor.state_dtype == Dtype::kBFloat16) {
      update<P, BFloat16>(params, number, begin, end);
    } else {
      update<P, float>(params, number, begin, end);
    }
  });
}

double grad_norm(const GradTensor& tensor, bool infinity, int64_t begin, int64_t end) {
  double total = 0;
  dispatch_kernel(tensor.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kSums = 16;  // side by side, for the vector instructions
    const T* const data = static_cast<const T*>(tensor.data) + begin;
    LoopType<T> buffer[kBlock];
    double sums[kSums] = {};
    for_blocks<kBlock>(end - begin, [&](int64_t first, int64_t count) {
      const LoopType<T>* g = load(data + first, count, buffer);
      if (infinity) {
        for (int64_t i = 0; i < count; ++i) {
          const double magnitude = std::abs(static_cast<double>(widen(g[i])));
          double& largest = sums[i % kSums];
          largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
        }
      } else {
        for (int64_t i = 0; i < count; ++i) {
          const double x = static_cast<double>(widen(g[i]));
          sums[i % kSums] += x * x;
        }
      }
    });
    for (const double sum : sums) {
      total = !infinity ? total + sum : sum > total || sum != sum ? sum : total;
    }
  });
  return total;
}

void scale(const GradTensor& tensor, double factor, int64_t begin, int64_t end) {
  dispatch_kernel(tensor.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* const data = static_cast<T*>(tensor.data) + begin;
    const auto multiplier = static_cast<Wide<T>>(factor);
    LoopType<T> buffer[kBlock], out_buffer[kBlock];
    for_blocks<kBlock>(end - begin, [&](int64_t first, int64_t count) {
      const LoopType<T>* g = load(data + first, count, buffer);
      LoopType<T>* out = output_buffer(data + first, out_buffer);
      for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(widen(g[i]) * multiplier);
      store(out, count, data + first);
    });
  });
}

}  // namespace llmk::cpu
