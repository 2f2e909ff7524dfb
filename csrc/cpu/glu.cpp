// Gated activations on the CPU: y = act(gate) * up, with act(gate) rounded to the dtype before the product, as eager
// PyTorch does. Backward in float32 (float64 for float64) with one rounding:
//   grad_up = grad_y * act(gate), grad_gate = grad_y * up * act'(gate); y once more, if wanted.
#include "cpu/glu.h"

#include <algorithm>
#include <type_traits>

#include "cpu/activation.h"
#include "cpu/convert.h"

namespace llmk::cpu {
namespace {

constexpr int64_t kBlock = 512;

template <typename T, typename Act>
inline void forward(const T* gate, const T* up, T* y, int64_t size) {
  LoopType<T> gate_buffer[kBlock], up_buffer[kBlock], y_buffer[kBlock];
  Wide<T> e[kBlock];
  for_blocks<kBlock>(size, [&](int64_t begin, int64_t count) {
    const LoopType<T>* g = load(gate + begin, count, gate_buffer);
    const LoopType<T>* u = load(up + begin, count, up_buffer);
    LoopType<T>* out = output_buffer(y + begin, y_buffer);
    exponentials<Act>(g, count, e);
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(rounded<T>(Act::value(widen(g[i]), e[i])) * widen(u[i]));
    store(out, count, y + begin);
  });
}

template <typename T, typename Act, bool kWithY>
inline void backward(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up, T* y, int64_t size) {
  LoopType<T> grad_y_buffer[kBlock], gate_buffer[kBlock], up_buffer[kBlock], out_buffer[3 * kBlock];
  Wide<T> e[kBlock];
  for_blocks<kBlock>(size, [&](int64_t begin, int64_t count) {
    const LoopType<T>* dy = load(grad_y + begin, count, grad_y_buffer);
    const LoopType<T>* g = load(gate + begin, count, gate_buffer);
    const LoopType<T>* u = load(up + begin, count, up_buffer);
    LoopType<T>* dg = output_buffer(grad_gate + begin, out_buffer);
    LoopType<T>* du = output_buffer(grad_up + begin, out_buffer + kBlock);
    LoopType<T>* out = kWithY ? output_buffer(y + begin, out_buffer + 2 * kBlock) : nullptr;
    exponentials<Act>(g, count, e);
    for (int64_t i = 0; i < count; ++i) {
      // Reads come before writes: both may be to the same memory.
      const Wide<T> x = widen(g[i]), upstream = widen(dy[i]), factor = widen(u[i]);
      const Wide<T> value = Act::value(x, e[i]), slope = Act::slope(x, e[i]);
      du[i] = narrow<T>(upstream * value);
      dg[i] = narrow<T>(upstream * factor * slope);
      if (kWithY) out[i] = narrow<T>(rounded<T>(value) * factor);
    }
    store(dg, count, grad_gate + begin);
    store(du, count, grad_up + begin);
    if (kWithY) store(out, count, y + begin);
  });
}

// Calls body(row, col, count) for each piece of a row in the flat range [begin, end).
template <typename Body>
inline void for_row_pieces(int64_t cols, int64_t begin, int64_t end, Body&& body) {
  while (begin < end) {
    const int64_t row = begin / cols, col = begin % cols, count = std::min(cols - col, end - begin);
    body(row, col, count);
    begin += count;
  }
}

}  // namespace

void glu(const GluParams& p, Activation activation, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto dtype_tag) {
    using T = typename decltype(dtype_tag)::type;
    dispatch_activation(activation, [&](auto activation_tag) {
      using Act = typename decltype(activation_tag)::type;
      for_row_pieces(p.cols, begin, end, [&](int64_t row, int64_t col, int64_t count) {
        forward<T, Act>(static_cast<const T*>(p.gate) + row * p.gate_stride + col,
                        static_cast<const T*>(p.up) + row * p.up_stride + col,
                        static_cast<T*>(p.y) + row * p.cols + col, count);
      });
    });
  });
}

void glu_backward(const GluBackwardParams& p, Activation activation, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto dtype_tag) {
    using T = typename decltype(dtype_tag)::type;
    dispatch_activation(activation, [&](auto activation_tag) {
      using Act = typename decltype(activation_tag)::type;
      const auto run = [&](auto with_y) {
        constexpr bool kWithY = decltype(with_y)::value;
        for_row_pieces(p.cols, begin, end, [&](int64_t row, int64_t col, int64_t count) {
          backward<T, Act, kWithY>(static_cast<const T*>(p.grad_y) + row * p.grad_y_stride + col,
                                   static_cast<const T*>(p.gate) + row * p.gate_stride + col,
                                   static_cast<const T*>(p.up) + row * p.up_stride + col,
                                   static_cast<T*>(p.grad_gate) + row * p.grad_stride + col,
                                   static_cast<T*>(p.grad_up) + row * p.grad_stride + col,
                                   kWithY ? static_cast<T*>(p.y) + row * p.y_stride + col : nullptr, count);
        });
      };
      if (p.y != nullptr) {
        run(std::true_type{});
      } else {
        run(std::false_type{});
      }
    });
  });
}

}  // namespace llmk::cpu
