// Gated activations on the CPU: y = act(gate) * up, with act(gate) rounded to the dtype before the product, as eager
// PyTorch does. Backward in float32 (float64 for float64) with one rounding:
//   grad_up = grad_y * act(gate), grad_gate = grad_y * up * act'(gate).
#include "cpu/glu.h"

#include <algorithm>
#include <cmath>

#include "cpu/convert.h"
#include "cpu/exponential.h"

namespace llmk::cpu {
namespace {

// An activation is a function of x and e = exponential(argument(x)). It is a product with x, so that NaN stays NaN.
struct Silu {
  template <typename A>
  static A argument(A x) {
    return -x;
  }
  template <typename A>
  static A value(A x, A e) {
    return x / (A(1) + e);
  }
  template <typename A>
  static A slope(A x, A e) {
    const A sigmoid = A(1) / (A(1) + e);
    return sigmoid * (A(1) + x * (A(1) - sigmoid));
  }
};

// 0.5 x (1 + tanh(z / 2)) = x / (1 + e^-z), which has no cancellation for negative x.
struct GeluTanh {
  static constexpr double kScale = 1.5957691216057308, kCubic = 0.044715;  // 2 sqrt(2 / pi)
  template <typename A>
  static A argument(A x) {
    return A(-kScale) * (x + A(kCubic) * (x * x * x));
  }
  template <typename A>
  static A value(A x, A e) {
    return x / (A(1) + e);
  }
  template <typename A>
  static A slope(A x, A e) {
    const A sigmoid = A(1) / (A(1) + e), slope_of_z = A(kScale) + A(3 * kScale * kCubic) * (x * x);
    const A complement = std::min(e, A(1e30)) * sigmoid;  // 1 - sigmoid, without cancellation
    return sigmoid + x * (sigmoid * complement) * slope_of_z;
  }
};

// x times the normal distribution function; e is the density without its constant factor.
struct GeluErf {
  template <typename A>
  static A argument(A x) {
    return A(-0.5) * x * x;
  }
  static double distribution(double x, double) { return 0.5 * std::erfc(-0.7071067811865476 * x); }
  static float distribution(float x, float e) {
    // At -a it is e p(a) / q(a), a minimax approximation; from a = 16 on e is 0.
    const float a = bit_cast<float>(std::min(bit_cast<int32_t>(std::abs(x)), bit_cast<int32_t>(16.f))), a2 = a * a;
    const float p = (0.5f + 0.333630532f * a) + a2 * (0.103956588f + 0.0135161234f * a);
    const float q = (1.f + 1.46514273f * a) + a2 * ((0.876959085f + 0.260014653f * a) + 0.0339010507f * a2);
    const float tail = e * p / q;
    return x > 0.f ? 1.f - tail : tail;
  }
  template <typename A>
  static A value(A x, A e) {
    return x * distribution(x, e);
  }
  template <typename A>
  static A slope(A x, A e) {
    return distribution(x, e) + A(0.3989422804014327) * x * e;
  }
};

constexpr int64_t kBlock = 512;

// The exponentials have their own loop. In one loop with the rest, the chains of dependent instructions would be too
// long for the processor to overlap iterations.
template <typename Act, typename S, typename A>
inline void exponentials(const S* x, int64_t count, A* e) {
  for (int64_t i = 0; i < count; ++i) e[i] = exponential(Act::argument(widen(x[i])));
}

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

template <typename T, typename Act>
inline void backward(const T* grad_y, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t size) {
  LoopType<T> grad_y_buffer[kBlock], gate_buffer[kBlock], up_buffer[kBlock], out_buffer[2 * kBlock];
  Wide<T> e[kBlock];
  for_blocks<kBlock>(size, [&](int64_t begin, int64_t count) {
    const LoopType<T>* dy = load(grad_y + begin, count, grad_y_buffer);
    const LoopType<T>* g = load(gate + begin, count, gate_buffer);
    const LoopType<T>* u = load(up + begin, count, up_buffer);
    LoopType<T>* dg = output_buffer(grad_gate + begin, out_buffer);
    LoopType<T>* du = output_buffer(grad_up + begin, out_buffer + kBlock);
    exponentials<Act>(g, count, e);
    for (int64_t i = 0; i < count; ++i) {
      // Reads come before writes, since the compiler must assume that both may be to the same memory.
      const Wide<T> x = widen(g[i]), upstream = widen(dy[i]), factor = widen(u[i]);
      const Wide<T> value = Act::value(x, e[i]), slope = Act::slope(x, e[i]);
      du[i] = narrow<T>(upstream * value);
      dg[i] = narrow<T>(upstream * factor * slope);
    }
    store(dg, count, grad_gate + begin);
    store(du, count, grad_up + begin);
  });
}

// Calls body(TypeTag<Act>{}).
template <typename Body>
inline void dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kSilu: return body(TypeTag<Silu>{});
    case Activation::kGeluTanh: return body(TypeTag<GeluTanh>{});
    case Activation::kGeluErf: return body(TypeTag<GeluErf>{});
  }
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
      for_row_pieces(p.cols, begin, end, [&](int64_t row, int64_t col, int64_t count) {
        backward<T, Act>(static_cast<const T*>(p.grad_y) + row * p.grad_y_stride + col,
                         static_cast<const T*>(p.gate) + row * p.gate_stride + col,
                         static_cast<const T*>(p.up) + row * p.up_stride + col,
                         static_cast<T*>(p.grad_gate) + row * p.grad_stride + col,
                         static_cast<T*>(p.grad_up) + row * p.grad_stride + col, count);
      });
    });
  });
}

}  // namespace llmk::cpu
