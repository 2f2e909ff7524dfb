// RMSNorm on the CPU, computed in float32 (float64 for float64):
//   rstd = 1 / sqrt(mean(x^2) + eps), n = x * rstd, y = n * (offset + weight), after x has been increased by the
//   residual; backward, with g = grad_y * (offset + weight): grad_x = rstd * (g - n * mean(g * n)) + grad_sum,
//   grad_weight = sum over rows of grad_y * m, where m is what the weight was multiplied by: round(n) with
//   cast_before_weight, else n.
// Rows are read twice, the second time from cache, in blocks.
#include "cpu/norm.h"

#include <algorithm>
#include <cmath>

#include "cpu/convert.h"
#include "cpu/row_sums.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kBlock = 1024;

// Blocks of a row operand that may be absent, and then is the same value everywhere.
template <typename T>
class Operand {
 public:
  Operand(const T* row, Wide<T> value_if_absent) : row_(row) {
    if (row == nullptr) std::fill_n(buffer_, kBlock, narrow<T>(value_if_absent));
  }
  void set_row(const T* row) { row_ = row; }
  const LoopType<T>* load(int64_t begin, int64_t count) {
    return row_ != nullptr ? cpu::load(row_ + begin, count, buffer_) : buffer_;
  }

 private:
  const T* row_;
  LoopType<T> buffer_[kBlock];
};

// In double, since it is one per row, and its error is that of the whole row.
template <typename A>
inline A reciprocal_rms(A sum_of_squares, int64_t cols, double eps) {
  return static_cast<A>(1.0 / std::sqrt(static_cast<double>(sum_of_squares) / static_cast<double>(cols) + eps));
}

template <typename T>
inline void forward_rows(const RmsNormParams& p, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  LoopType<T> x_buffer[kBlock], residual_buffer[kBlock], out_buffer[kBlock];
  Operand<T> weight(static_cast<const T*>(p.weight), 1);
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

    A squares = 0;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      const LoopType<T>* v = load(x + begin, count, x_buffer);
      squares += sum_of<A>(count, [=](int64_t i) { return widen(v[i]) * widen(v[i]); });
    });
    const A rstd = reciprocal_rms(squares, p.cols, p.options.eps);

    T* y = static_cast<T*>(p.y) + row * p.cols;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      const LoopType<T>* v = load(x + begin, count, x_buffer);
      const LoopType<T>* w = weight.load(begin, count);
      LoopType<T>* out = output_buffer(y + begin, out_buffer);
      for (int64_t i = 0; i < count; ++i) {
        const A n = widen(v[i]) * rstd;
        out[i] = narrow<T>((cast_before_weight ? rounded<T>(n) : n) * (offset + widen(w[i])));
      }
      store(out, count, y + begin);
    });
  }
}

template <typename T>
inline void backward_chunks(const RmsNormBackwardParams& p, int64_t partial_begin, int64_t partial_end) {
  using A = Wide<T>;
  LoopType<T> x_buffer[kBlock], grad_y_buffer[kBlock], out_buffer[kBlock];
  Operand<T> weight(static_cast<const T*>(p.weight), 1);
  Operand<T> grad_sum(static_cast<const T*>(p.grad_sum), 0);
  const A offset = p.weight != nullptr ? static_cast<A>(p.options.weight_offset) : A(0);
  const bool cast_before_weight = p.options.cast_before_weight;

  for (int64_t chunk = partial_begin; chunk < partial_end; ++chunk) {
    A* partial = p.grad_weight != nullptr ? static_cast<A*>(p.partials) + chunk * p.cols : nullptr;
    if (partial != nullptr) std::fill_n(partial, p.cols, A(0));
    const int64_t row_end = p.rows * (chunk + 1) / p.partial_rows;
    for (int64_t row = p.rows * chunk / p.partial_rows; row < row_end; ++row) {
      const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
      const T* grad_y = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride;
      if (p.grad_sum != nullptr) grad_sum.set_row(static_cast<const T*>(p.grad_sum) + row * p.grad_sum_stride);

      A squares = 0, products = 0;  // of x with itself and with g
      for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
        const LoopType<T>* v = load(x + begin, count, x_buffer);
        const LoopType<T>* dy = load(grad_y + begin, count, grad_y_buffer);
        const LoopType<T>* w = weight.load(begin, count);
        squares += sum_of<A>(count, [=](int64_t i) { return widen(v[i]) * widen(v[i]); });
        products += sum_of<A>(count, [=](int64_t i) { return widen(dy[i]) * (offset + widen(w[i])) * widen(v[i]); });
      });
      const A rstd = reciprocal_rms(squares, p.cols, p.options.eps);
      const A projection = products * rstd / static_cast<A>(p.cols);  // mean(g * n)

      T* grad_x = static_cast<T*>(p.grad_x) + row * p.cols;
      for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
        const LoopType<T>* v = load(x + begin, count, x_buffer);
        const LoopType<T>* dy = load(grad_y + begin, count, grad_y_buffer);
        const LoopType<T>* w = weight.load(begin, count);
        const LoopType<T>* ds = grad_sum.load(begin, count);
        LoopType<T>* dx = output_buffer(grad_x + begin, out_buffer);
        for (int64_t i = 0; i < count; ++i) {
          const A g = widen(dy[i]) * (offset + widen(w[i])), n = widen(v[i]) * rstd;
          dx[i] = narrow<T>(rstd * (g - n * projection) + widen(ds[i]));
        }
        store(dx, count, grad_x + begin);
        if (partial != nullptr) {
          A* dw = partial + begin;
          for (int64_t i = 0; i < count; ++i) {
            const A n = widen(v[i]) * rstd;
            dw[i] += widen(dy[i]) * (cast_before_weight ? rounded<T>(n) : n);
          }
        }
      });
    }
  }
}

template <typename T>
inline void add_partials(const RmsNormBackwardParams& p, int64_t col_begin, int64_t col_end) {
  using A = Wide<T>;
  A sum[kBlock];
  LoopType<T> buffer[kBlock];
  for_blocks<kBlock>(col_end - col_begin, [&](int64_t begin, int64_t count) {
    const int64_t col = col_begin + begin;
    std::fill_n(sum, count, A(0));
    for (int64_t row = 0; row < p.partial_rows; ++row) {
      const A* partial = static_cast<const A*>(p.partials) + row * p.cols + col;
      for (int64_t i = 0; i < count; ++i) sum[i] += partial[i];
    }
    T* target = static_cast<T*>(p.grad_weight) + col;
    LoopType<T>* dw = output_buffer(target, buffer);
    for (int64_t i = 0; i < count; ++i) dw[i] = narrow<T>(sum[i]);
    store(dw, count, target);
  });
}

}  // namespace

void rms_norm(const RmsNormParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) { forward_rows<typename decltype(tag)::type>(params, row_begin, row_end); });
}

void rms_norm_backward(const RmsNormBackwardParams& params, Dtype dtype, int64_t partial_begin, int64_t partial_end) {
  dispatch_kernel(dtype,
                  [&](auto tag) { backward_chunks<typename decltype(tag)::type>(params, partial_begin, partial_end); });
}

void rms_norm_grad_weight(const RmsNormBackwardParams& params, Dtype dtype, int64_t col_begin, int64_t col_end) {
  dispatch_kernel(dtype, [&](auto tag) { add_partials<typename decltype(tag)::type>(params, col_begin, col_end); });
}

}  // namespace llmk::cpu
