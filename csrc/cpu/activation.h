// The activations on the CPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/convert.h"
#include "cpu/exponential.h"
#include "params/glu.h"

namespace llmk::cpu {

// An activation is a function of x and e = exponential(argument(x)). NaN stays NaN: most are products with x.
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

// It needs no exponential: that of 0 is left unused.
struct Relu {
  template <typename A>
  static A argument(A) {
    return A(0);
  }
  template <typename A>
  static A value(A x, A) {
    return x < A(0) ? A(0) : x;  // NaN stays NaN
  }
  template <typename A>
  static A slope(A x, A) {
    return x <= A(0) ? A(0) : A(1);
  }
};

// The square of that.
struct Relu2 : Relu {
  template <typename A>
  static A value(A x, A e) {
    const A r = Relu::value(x, e);
    return r * r;
  }
  template <typename A>
  static A slope(A x, A e) {
    return A(2) * Relu::value(x, e);
  }
};

struct Sigmoid {
  template <typename A>
  static A argument(A x) {
    return -x;
  }
  template <typename A>
  static A value(A x, A e) {
    return x == x ? A(1) / (A(1) + e) : x;  // NaN stays NaN
  }
  template <typename A>
  static A slope(A x, A e) {
    return value(x, e) / (A(1) + A(1) / e);  // 1 - value would cancel
  }
};

// The exponentials have their own loop. In one loop with the rest, the chains of dependent instructions would be too
// long for the processor to overlap iterations.
template <typename Act, typename S, typename A>
inline void exponentials(const S* x, int64_t count, A* e) {
  for (int64_t i = 0; i < count; ++i) e[i] = exponential(Act::argument(widen(x[i])));
}

// Calls body(TypeTag<Act>{}).
template <typename Body>
inline void dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kSilu: return body(TypeTag<Silu>{});
    case Activation::kGeluTanh: return body(TypeTag<GeluTanh>{});
    case Activation::kGeluErf: return body(TypeTag<GeluErf>{});
    case Activation::kRelu2: return body(TypeTag<Relu2>{});
    case Activation::kSigmoid: return body(TypeTag<Sigmoid>{});
    case Activation::kRelu: return body(TypeTag<Relu>{});
  }
}

}  // namespace llmk::cpu
