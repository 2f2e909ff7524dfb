// Softmax on the CPU, computed in float32 (float64 for float64):
//   z = scale x + mask, m = max(z), y = e^(z - m) / sum(e^(z - m)) or z - m - log(sum(e^(z - m))), with zeros for a row
//   without columns; backward: grad_x = scale y (grad_y - sum(grad_y y)) or scale (grad_y - e^y sum(grad_y)).
// Rows are read in blocks: once for the maximum, once for the sum, once for the result, the later times from cache.
#include "cpu/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/convert.h"
#include "cpu/exponential.h"
#include "cpu/row_sums.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kBlock = 1024;

// e^x, NaN for NaN.
template <typename A>
inline A exponential_or_nan(A x) {
  const A e = exponential(x);
  return x == x ? e : x;
}

// The numbers z of a row, a block at a time.
template <typename T>
class Scores {
 public:
  using A = Wide<T>;

  Scores(const SoftmaxParams& p, int64_t row)
      : x_(static_cast<const T*>(p.x) + row * p.x_stride), scale_(static_cast<A>(p.scale)), visible_(p.cols) {
    if (p.causal_rows > 0) {
      visible_ = std::max<int64_t>(0, p.cols - (p.causal_rows - 1 - row % p.causal_rows));
    }
    const SoftmaxMask& mask = p.mask;
    const int64_t middle = row / mask.sizes[1];
    const int64_t offset = middle / mask.sizes[0] * mask.strides[0] + middle % mask.sizes[0] * mask.strides[1] +
                           row % mask.sizes[1] * mask.strides[2];
    if (mask.data != nullptr && mask.is_bool) keep_ = static_cast<const uint8_t*>(mask.data) + offset;
    if (mask.data != nullptr && !mask.is_bool) bias_ = static_cast<const T*>(mask.data) + offset;
    col_stride_ = mask.col_stride;
  }

  void load(int64_t begin, int64_t count, A* z) {
    constexpr A kNone = -std::numeric_limits<A>::infinity();
    const A scale = scale_;
    const LoopType<T>* x = cpu::load(x_ + begin, count, buffer_);
    for (int64_t i = 0; i < count; ++i) z[i] = widen(x[i]) * scale;
    if (bias_ != nullptr && col_stride_ == 1) {
      const LoopType<T>* bias = cpu::load(bias_ + begin, count, buffer_);
      for (int64_t i = 0; i < count; ++i) z[i] += widen(bias[i]);
    } else if (bias_ != nullptr) {
      const A bias = widen(*cpu::load(bias_, 1, buffer_));
      for (int64_t i = 0; i < count; ++i) z[i] += bias;
    } else if (keep_ != nullptr) {
      const uint8_t* keep = keep_ + begin * col_stride_;
      const int64_t stride = col_stride_;
      for (int64_t i = 0; i < count; ++i) z[i] = keep[i * stride] != 0 ? z[i] : kNone;
    }
    for (int64_t i = std::max<int64_t>(0, visible_ - begin); i < count; ++i) z[i] = kNone;
  }

 private:
  const T* x_;
  const T* bias_ = nullptr;
  const uint8_t* keep_ = nullptr;
  A scale_;
  int64_t visible_, col_stride_;
  LoopType<T> buffer_[kBlock];
};

template <typename T>
inline void forward_rows(const SoftmaxParams& p, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  A z[kBlock], e[kBlock];
  LoopType<T> out_buffer[kBlock];
  for (int64_t row = row_begin; row < row_end; ++row) {
    Scores<T> scores(p, row);
    A max = -std::numeric_limits<A>::infinity(), sum = 0;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      scores.load(begin, count, z);
      max = std::max(max, max_of(count, z));
    });
    const A shift = std::isinf(max) && max < A(0) ? A(0) : max;  // -inf - -inf is NaN
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      scores.load(begin, count, z);
      for (int64_t i = 0; i < count; ++i) e[i] = exponential_or_nan(z[i] - shift);
      sum += sum_of<A>(count, [&](int64_t i) { return e[i]; });
    });
    const A factor = sum == A(0) ? A(0) : A(1) / sum, log_sum = p.log ? std::log(sum) : A(0);
    T* y = static_cast<T*>(p.y) + row * p.cols;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      scores.load(begin, count, z);
      LoopType<T>* out = output_buffer(y + begin, out_buffer);
      if (p.log) {
        for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>((z[i] - shift) - log_sum);
      } else {
        for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(exponential_or_nan(z[i] - shift) * factor);
      }
      store(out, count, y + begin);
    });
  }
}

template <typename T>
inline void backward_rows(const SoftmaxBackwardParams& p, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  LoopType<T> grad_buffer[kBlock], y_buffer[kBlock], out_buffer[kBlock];
  const A scale = static_cast<A>(p.scale);
  const bool log = p.log;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* grad_y = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride;
    const T* y = static_cast<const T*>(p.y) + row * p.y_stride;
    A sum = 0;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      const LoopType<T>* dy = load(grad_y + begin, count, grad_buffer);
      const LoopType<T>* v = load(y + begin, count, y_buffer);
      sum += sum_of<A>(count, [=](int64_t i) { return log ? widen(dy[i]) : widen(dy[i]) * widen(v[i]); });
    });
    T* grad_x = static_cast<T*>(p.grad_x) + row * p.cols;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      const LoopType<T>* dy = load(grad_y + begin, count, grad_buffer);
      const LoopType<T>* v = load(y + begin, count, y_buffer);
      LoopType<T>* dx = output_buffer(grad_x + begin, out_buffer);
      if (log) {
        for (int64_t i = 0; i < count; ++i) {
          dx[i] = narrow<T>(scale * (widen(dy[i]) - exponential_or_nan(widen(v[i])) * sum));
        }
      } else {
        for (int64_t i = 0; i < count; ++i) dx[i] = narrow<T>(scale * (widen(v[i]) * (widen(dy[i]) - sum)));
      }
      store(dx, count, grad_x + begin);
    });
  }
}

}  // namespace

void softmax(const SoftmaxParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) { forward_rows<typename decltype(tag)::type>(params, row_begin, row_end); });
}

void softmax_backward(const SoftmaxBackwardParams& params, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) { backward_rows<typename decltype(tag)::type>(params, row_begin, row_end); });
}

}  // namespace llmk::cpu
