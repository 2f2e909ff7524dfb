// Activations with biases in front on the CPU: y = act(gate + gate_bias), gated times (up + up_bias), with each sum and
// act() rounded to the dtype, as eager PyTorch does. Backward in float32 (float64 for float64), rounded once; the
// gradients of the biases are sums over rows of the rounded gradients of gate and up.
//
// The activation is chosen for each block of elements: around whole rows, what has nothing to do with it would be
// compiled for each activation and instruction set.
#include "cpu/bias_act.h"

#include <algorithm>

#include "cpu/activation.h"
#include "cpu/convert.h"
#include "cpu/rows.h"

namespace llmk::cpu {
namespace {

// out = round(x + bias), wide.
template <typename T>
inline void add_bias(const LoopType<T>* x, const LoopType<T>* bias, int64_t count, Wide<T>* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = rounded<T>(widen(x[i]) + widen(bias[i]));
}

template <typename T, bool kGated>
inline void forward_rows(const BiasActParams& p, Activation activation, int64_t row_begin, int64_t row_end) {
  using A = Wide<T>;
  LoopType<T> buffer[kBlock], out_buffer[kBlock];
  A g[kBlock], u[kBlock], e[kBlock];
  Operand<T> gate_bias(static_cast<const T*>(p.gate_bias), 0), up_bias(static_cast<const T*>(p.up_bias), 0);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride;
    const T* up = static_cast<const T*>(p.up) + row * p.up_stride;
    T* y = static_cast<T*>(p.y) + row * p.cols;
    for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
      add_bias<T>(load(gate + begin, count, buffer), gate_bias.load(begin, count), count, g);
      if (kGated) add_bias<T>(load(up + begin, count, buffer), up_bias.load(begin, count), count, u);
      LoopType<T>* out = output_buffer(y + begin, out_buffer);
      dispatch_activation(activation, [&](auto tag) {
        using Act = typename decltype(tag)::type;
        exponentials<Act>(g, count, e);
        for (int64_t i = 0; i < count; ++i) {
          const A value = Act::value(g[i], e[i]);
          out[i] = narrow<T>(kGated ? rounded<T>(value) * u[i] : value);
        }
      });
      store(out, count, y + begin);
    });
  }
}

// Those of up come after those of gate, if there are any.
template <typename A>
inline A* up_partials(const BiasActBackwardParams& p) {
  return static_cast<A*>(p.partials) + (p.grad_gate_bias != nullptr ? p.partial_rows * p.cols : 0);
}

template <typename T, bool kGated>
inline void backward_chunks(const BiasActBackwardParams& p, Activation activation, int64_t partial_begin,
                            int64_t partial_end) {
  using A = Wide<T>;
  LoopType<T> buffer[kBlock], out_buffer[2 * kBlock];
  A g[kBlock], u[kBlock], e[kBlock], gate_grads[kBlock], up_grads[kBlock];
  Operand<T> gate_bias(static_cast<const T*>(p.gate_bias), 0), up_bias(static_cast<const T*>(p.up_bias), 0);
  for (int64_t chunk = partial_begin; chunk < partial_end; ++chunk) {
    A* const gate_partial = p.grad_gate_bias != nullptr ? static_cast<A*>(p.partials) + chunk * p.cols : nullptr;
    A* const up_partial = p.grad_up_bias != nullptr ? up_partials<A>(p) + chunk * p.cols : nullptr;
    for (A* partial : {gate_partial, up_partial}) {
      if (partial != nullptr) std::fill_n(partial, p.cols, A(0));
    }
    const int64_t row_end = p.rows * (chunk + 1) / p.partial_rows;
    for (int64_t row = p.rows * chunk / p.partial_rows; row < row_end; ++row) {
      const T* grad_y = static_cast<const T*>(p.grad_y) + row * p.grad_y_stride;
      const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride;
      const T* up = static_cast<const T*>(p.up) + row * p.up_stride;
      T* grad_gate = static_cast<T*>(p.grad_gate) + row * p.grad_stride;
      T* grad_up = static_cast<T*>(p.grad_up) + row * p.grad_stride;
      for_blocks<kBlock>(p.cols, [&](int64_t begin, int64_t count) {
        add_bias<T>(load(gate + begin, count, buffer), gate_bias.load(begin, count), count, g);
        if (kGated) add_bias<T>(load(up + begin, count, buffer), up_bias.load(begin, count), count, u);
        const LoopType<T>* dy = load(grad_y + begin, count, buffer);
        dispatch_activation(activation, [&](auto tag) {
          using Act = typename decltype(tag)::type;
          exponentials<Act>(g, count, e);
          for (int64_t i = 0; i < count; ++i) {
            const A upstream = widen(dy[i]);
            gate_grads[i] = rounded<T>((kGated ? upstream * u[i] : upstream) * Act::slope(g[i], e[i]));
            if (kGated) up_grads[i] = rounded<T>(upstream * Act::value(g[i], e[i]));
          }
        });
        const auto write = [&](const A* grads, T* target, LoopType<T>* target_buffer, A* partial) {
          LoopType<T>* out = output_buffer(target + begin, target_buffer);
          for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(grads[i]);
          store(out, count, target + begin);
          if (partial == nullptr) return;
          for (int64_t i = 0; i < count; ++i) partial[begin + i] += grads[i];
        };
        write(gate_grads, grad_gate, out_buffer, gate_partial);
        if (kGated) write(up_grads, grad_up, out_buffer + kBlock, up_partial);
      });
    }
  }
}

}  // namespace

void bias_act(const BiasActParams& params, Activation activation, Dtype dtype, int64_t row_begin, int64_t row_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.up != nullptr) {
      forward_rows<T, true>(params, activation, row_begin, row_end);
    } else {
      forward_rows<T, false>(params, activation, row_begin, row_end);
    }
  });
}

void bias_act_backward(const BiasActBackwardParams& params, Activation activation, Dtype dtype, int64_t partial_begin,
                       int64_t partial_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.up != nullptr) {
      backward_chunks<T, true>(params, activation, partial_begin, partial_end);
    } else {
      backward_chunks<T, false>(params, activation, partial_begin, partial_end);
    }
  });
}

void bias_act_grad_bias(const BiasActBackwardParams& params, Dtype dtype, int64_t col_begin, int64_t col_end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto add_up = [&](const Wide<T>* partials, void* target) {
      if (target == nullptr) return;
      add_partials(partials, params.partial_rows, params.cols, col_begin, col_end, static_cast<T*>(target));
    };
    add_up(static_cast<const Wide<T>*>(params.partials), params.grad_gate_bias);
    add_up(up_partials<Wide<T>>(params), params.grad_up_bias);
  });
}

}  // namespace llmk::cpu
