// RMSNorm and LayerNorm on the CPU, computed in float32 (float64 for float64):
//   rstd = 1 / sqrt(mean((x - m)^2) + eps), n = (x - m) * rstd, y = n * (offset + weight) + bias, after x has been
//   increased by the residual; m is mean(x) for LayerNorm, and 0 for RMSNorm, which has no bias.
//   With a target: target = addend + alpha y, where y, the product and the sum are rounded to the dtype.
//   Backward, with g = grad_y * (offset + weight): grad_x = rstd * (g - c - n * mean(g * n)) + grad_sum, where c is
//   mean(g) for LayerNorm and 0 for RMSNorm; grad_weight = sum over rows of grad_y * k, where k is what the weight was
//   multiplied by: round(n) with cast_before_weight, else n; grad_bias = sum over rows of grad_y.
// Rows are read twice, or three times for LayerNorm, all but the first time from cache, in blocks.
#include "cpu/norm.h"

#include <algorithm>
#include <cmath>

#include "cpu/convert.h"
#include "cpu/row_sums.h"
#include "cpu/rows.h"

namespace llmk::cpu {
namespace {

template <typename A>
inline A square(A x) {
  return x * x;
}

// Those of grad_bias come after those of grad_weight, if there are any.
template <typename A>
inline A* bias_partials(const NormBackwardParams& p) {
  return static_cast<A*>(p.partials) + (p.grad_weight != nullptr ? p.partial_rows * p.cols : 0);
}

// In double, since it is one per row, and its error is that of the whole row.
template <typename A>
inline A reciprocal_rms(A sum_of_squares, int64_t cols, double eps) {
  return static_cast<A>(1.0 / std::sqrt(static_cast<double>(sum_of_squares) / static_cast<double>(cols) + eps));
}

// The mean of x, from the differences to its first element: exact where all are equal. If that element is far larger
// than the others, their last digits are lost. So it is mended by the mean of the differences to it.
template <typename T>
inline Wide<T> mean_of(const T* x, int64_t cols, LoopType<T>* buffer) {
  using A = Wide<T>;
  A mean = widen(*load(x, 1, buffer));
  for (int pass = 0; pass < 2; ++pass) {
    A sum = 0;
    for_blocks<kBlock>(cols, [&](int64_t begin, int64_t count) {
      const LoopType<T>* v = load(x + begin, count, buffer);
      sum += sum_of<A>(count, [=](int64_t i) { return widen(v[i]) - mean; });
    });
    mean += sum / static_cast<A>(cols);
  }
  return mean;
}

// target = addend + alpha y. Two loops, since GCC might fuse the product and the sum of one.
template <typename T>
inline void add_scaled(const LoopType<T>* y, int64_t count, Wide<T> alpha, const T* addend, T* target,
                       LoopType<T>* buffer) {
  Wide<T> product[kBlock];
  for (int64_t i = 0; i < count; ++i) product[i] = rounded<T>(alpha * rounded<T>(widen(y[i])));
  const LoopType<T>* before = load(addend, count, buffer);
  LoopType<T>* sum = output_buffer(target, buffer);
  for (int64_t i = 0; i < count; ++i) sum[i] = narrow<T>(widen(before[i]) + product[i]);
  store(sum, count, target);
}

template <typename T, bool kCentered>
inline void forward_rows(const NormParams& p, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  LoopType<T> x_buffer[kBlock], residual_buffer[kBlock], out_buffer[kBlock];
  Operand<T> weight(static_cast<const T*>(p.weight), 1);
  [[maybe_unused]] Operand<T> bias(static_cast<const T*>(p.bias), 0);
  const A offset = p.weight != nullptr ? static_cast<A>(p.options.weight_offset) : A(0);
  const bool cast_before_weight = p.options.cast_before_weight;

  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    if (p.residual != nullptr) {
      const T* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
      T* sum = static_cast<T*>(p.sum) + row * p.cols;
      for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
        const LoopType<T>* a = load(x + begin, count, x_buffer);
        const LoopType<T>* b = load(residual + begin, count, residual_buffer);
        LoopType<T>* s = output_buffer(sum + begin, out_buffer);
        for (int64_t i = 0; i < count; ++i) s[i] = narrow<T>(widen(a[i]) + widen(b[i]));
        store(s, count, sum + begin);
      });
      x = sum;
    }

    const A mean = kCentered ? mean_of(x, p.cols, x_buffer) : A(0);
    A squares = 0;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      const LoopType<T>* v = load(x + begin, count, x_buffer);
      squares += sum_of<A>(count, [=](int64_t i) { return square(widen(v[i]) - mean); });
    });
    const A rstd = reciprocal_rms(squares, p.cols, p.options.eps);

    T* y = static_cast<T*>(p.y) + row * p.cols;
    const T* addend = static_cast<const T*>(p.addend) + row * p.addend_stride;
    T* target = static_cast<T*>(p.target) + row * p.target_stride;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      const LoopType<T>* v = load(x + begin, count, x_buffer);
      const LoopType<T>* w = weight.load(begin, count);
      LoopType<T>* out = p.target != nullptr ? out_buffer : output_buffer(y + begin, out_buffer);
      if constexpr (kCentered) {
        const LoopType<T>* b = bias.load(begin, count);
        for (int64_t i = 0; i < count; ++i) {
          out[i] = narrow<T>((widen(v[i]) - mean) * rstd * rounded<T>(offset + widen(w[i])) + widen(b[i]));
        }
      } else {
        for (int64_t i = 0; i < count; ++i) {
          const A n = widen(v[i]) * rstd;
          out[i] = narrow<T>((cast_before_weight ? rounded<T>(n) : n) * (offset + widen(w[i])));
        }
      }
      if (p.target != nullptr) {
        add_scaled(out, count, static_cast<A>(p.alpha), addend + begin, target + begin, x_buffer);
      } else {
        store(out, count, y + begin);
      }
    });
  }
}

template <typename T, bool kCentered>
inline void backward_chunks(const NormBackwardParams& p, int64_t partial_begin, int64_t partial_end) {
  using A = Wide<T>;
  LoopType<T> x_buffer[kBlock], grad_y_buffer[kBlock], out_buffer[kBlock];
  Operand<T> weight(static_cast<const T*>(p.weight), 1);
  Operand<T> grad_sum(static_cast<const T*>(p.grad_sum), 0);
  const A offset = p.weight != nullptr ? static_cast<A>(p.options.weight_offset) : A(0);
  const bool cast_before_weight = p.options.cast_before_weight;

  for (int64_t chunk = partial_begin; chunk < partial_end; ++chunk) {
    A* const weight_partial = p.grad_weight != nullptr ? static_cast<A*>(p.partials) + chunk * p.cols : nullptr;
    A* const bias_partial = p.grad_bias != nullptr ? bias_partials<A>(p) + chunk * p.cols : nullptr;
    for (A* partial : {weight_partial, bias_partial}) {
      if (partial != nullptr) std::fill_n(partial, p.cols, A(0));
    }
    const int64_t row_end = p.rows * (chunk + 1) / p.partial_rows;
    for (int64_t row = p.rows * chunk / p.partial_rows; row < row_end; ++row) {
      const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
      const T* grad_y = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride;
      if (p.grad_sum != nullptr) grad_sum.set_row(static_cast<const T*>(p.grad_sum) + row * p.grad_sum_stride);

      const A mean = kCentered ? mean_of(x, p.cols, x_buffer) : A(0);
      A squares = 0, products = 0, sum_g = 0;  // of x - mean with itself and with g; of g
      for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
        const LoopType<T>* v = load(x + begin, count, x_buffer);
        const LoopType<T>* dy = load(grad_y + begin, count, grad_y_buffer);
        const LoopType<T>* w = weight.load(begin, count);
        squares += sum_of<A>(count, [=](int64_t i) { return square(widen(v[i]) - mean); });
        products +=
            sum_of<A>(count, [=](int64_t i) { return widen(dy[i]) * (offset + widen(w[i])) * (widen(v[i]) - mean); });
        if (kCentered) sum_g += sum_of<A>(count, [=](int64_t i) { return widen(dy[i]) * (offset + widen(w[i])); });
      });
      const A rstd = reciprocal_rms(squares, p.cols, p.options.eps);
      const A projection = products * rstd / static_cast<A>(p.cols);  // mean(g * n)
      const A mean_g = sum_g / static_cast<A>(p.cols);

      T* grad_x = static_cast<T*>(p.grad_x) + row * p.cols;
      for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
        const LoopType<T>* v = load(x + begin, count, x_buffer);
        const LoopType<T>* dy = load(grad_y + begin, count, grad_y_buffer);
        const LoopType<T>* w = weight.load(begin, count);
        const LoopType<T>* ds = grad_sum.load(begin, count);
        LoopType<T>* dx = output_buffer(grad_x + begin, out_buffer);
        for (int64_t i = 0; i < count; ++i) {
          const A g = widen(dy[i]) * (offset + widen(w[i])), n = (widen(v[i]) - mean) * rstd;
          dx[i] = narrow<T>(rstd * (g - mean_g - n * projection) + widen(ds[i]));
        }
        store(dx, count, grad_x + begin);
        if (weight_partial != nullptr) {
          A* dw = weight_partial + begin;
          for (int64_t i = 0; i < count; ++i) {
            const A n = (widen(v[i]) - mean) * rstd;
            dw[i] += widen(dy[i]) * (cast_before_weight ? rounded<T>(n) : n);
          }
        }
        if (bias_partial != nullptr) {
          A* db = bias_partial + begin;
          for (int64_t i = 0; i < count; ++i) db[i] += widen(dy[i]);
        }
      });
    }
  }
}

}  // namespace

void rms_norm(const NormParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype,
                  [&](auto tag) { forward_rows<typename decltype(tag)::type, false>(params, row_begin, row_end); });
}

void layer_norm(const NormParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype,
                  [&](auto tag) { forward_rows<typename decltype(tag)::type, true>(params, row_begin, row_end); });
}

void rms_norm_backward(const NormBackwardParams& params, Dtype dtype, int64_t partial_begin, int64_t partial_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    backward_chunks<typename decltype(tag)::type, false>(params, partial_begin, partial_end);
  });
}

void layer_norm_backward(const NormBackwardParams& params, Dtype dtype, int64_t partial_begin, int64_t partial_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    backward_chunks<typename decltype(tag)::type, true>(params, partial_begin, partial_end);
  });
}

void norm_grad_weight_and_bias(const NormBackwardParams& params, Dtype dtype, int64_t col_begin, int64_t col_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto add_up = [&](const Wide<T>* partials, void* target) {
      if (target == nullptr) return;
      add_partials(partials, params.partial_rows, params.cols, col_begin, col_end, static_cast<T*>(target));
    };
    add_up(static_cast<const Wide<T>*>(params.partials), params.grad_weight);
    add_up(bias_partials<Wide<T>>(params), params.grad_bias);
  });
}

}  // namespace llmk::cpu
