// bias_gelu, bias_swiglu, bias_geglu and relu2, and their backward.
#include "cpu/bias_act.h"
#include "backend.h"
#if LLMK_CUDA
#include "kernels/activation/bias_act.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;
using MaybeTensor = std::optional<Tensor>;

// The tensors of an op; `up` and its bias only if it is gated. `gate` is called x where it is not.
struct Operands {
  const char* gate_name;
  Tensor gate;
  MaybeTensor up, gate_bias, up_bias;
  bool packed = false;  // the four are halves of two tensors, and so are their gradients
};

// Columns [begin, begin + cols).
Tensor columns(const Tensor& tensor, int64_t begin, int64_t cols) {
  std::vector<int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes.back() = cols;
  return view(tensor, sizes, tensor.strides(), begin * tensor.stride(tensor.dim() - 1));
}

// The halves of a packed [gate | up] and of its bias, checked.
Operands unpack(const char* op, const Tensor& gate_up, const MaybeTensor& bias, const MaybeTensor& grad_y = {}) {
  const Argument packed{"gate_up", gate_up};
  if (grad_y) {
    check_tensors(op, {{"grad_y", grad_y}, packed, {"bias", bias}});
  } else {
    check_tensors(op, {packed, {"bias", bias}});
  }
  to_dtype(op, packed);
  LLMK_CHECK(gate_up.dim() >= 1 && gate_up.size(gate_up.dim() - 1) % 2 == 0, op,
             "gate_up must have an even last dimension, [gate | up], got shape ", shape(gate_up));
  check_vector(op, {"bias", bias}, packed, gate_up.size(gate_up.dim() - 1), "gate_up.size(-1)");
  const int64_t cols = gate_up.size(gate_up.dim() - 1) / 2;
  const auto half = [&](const MaybeTensor& tensor, int64_t begin) {
    return tensor ? std::optional(columns(*tensor, begin, cols)) : std::nullopt;
  };
  return {"gate_up", columns(gate_up, 0, cols), columns(gate_up, cols, cols), half(bias, 0), half(bias, cols), true};
}

// Checks them, and makes the biases contiguous.
Dtype check(const char* op, Operands& o, const MaybeTensor& grad_y = std::nullopt) {
  const char* const bias_name = o.up ? "gate_bias" : "bias";
  const Argument gate{o.gate_name, o.gate};
  if (grad_y) {
    check_tensors(op, {{"grad_y", grad_y}, gate, {"up", o.up}, {bias_name, o.gate_bias}, {"up_bias", o.up_bias}});
  } else {
    check_tensors(op, {gate, {"up", o.up}, {bias_name, o.gate_bias}, {"up_bias", o.up_bias}});
  }
  const Dtype dtype = to_dtype(op, gate);
  LLMK_CHECK(o.gate.dim() >= 1, op, o.gate_name, " must have at least one dimension, got a scalar");
  if (o.up) check_like(op, {"up", *o.up}, gate);
  if (grad_y) check_like(op, {"grad_y", *grad_y}, gate);
  const int64_t cols = o.gate.size(o.gate.dim() - 1);
  const std::string size = std::string(o.gate_name) + ".size(-1)";
  check_vector(op, {bias_name, o.gate_bias}, gate, cols, size.c_str());
  check_vector(op, {"up_bias", o.up_bias}, gate, cols, size.c_str());
  for (MaybeTensor* bias : {&o.gate_bias, &o.up_bias}) {
    if (*bias) *bias = with_unit_last_stride(**bias);
  }
  return dtype;
}

Tensor forward(const char* op, Operands o, Activation activation) {
  const Dtype dtype = check(op, o);
  Tensor y = empty_rows(o.gate);
  if (o.gate.numel() == 0) return y;
  const Rows gate = as_rows(o.gate);
  const std::optional<Rows> up = o.up ? std::optional(as_rows(*o.up)) : std::nullopt;
  const BiasActParams params{.gate = gate.data(),
                             .up = up ? up->data() : nullptr,
                             .gate_bias = data(o.gate_bias),
                             .up_bias = data(o.up_bias),
                             .y = y.mutable_data_ptr(),
                             .rows = gate.rows,
                             .cols = gate.cols,
                             .gate_stride = gate.stride,
                             .up_stride = up ? up->stride : 0};
  on_device(op, o.gate,
            LLMK_CUDA_ONLY([&](auto stream) { return kernels::bias_act(params, activation, dtype, stream); }), [&] {
              parallel_for(params.rows, params.cols,
                           [&](int64_t begin, int64_t end) { cpu::bias_act(params, activation, dtype, begin, end); });
            });
  return y;
}

// Of gate, up and their biases, or of gate_up, none and their bias; what is not wanted is empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const char* op, const Tensor& grad_y, Operands o,
                                                    Activation activation, bool needs_gate_bias, bool needs_up_bias) {
  const Dtype dtype = check(op, o, grad_y);
  const int64_t cols = o.gate.size(o.gate.dim() - 1), none = 0;
  needs_gate_bias = needs_gate_bias && o.gate_bias;
  needs_up_bias = needs_up_bias && o.up_bias;
  const ScalarType type = o.gate.scalar_type();
  const int64_t out_cols = o.packed ? 2 * cols : cols;
  std::vector<int64_t> sizes(o.gate.sizes().begin(), o.gate.sizes().end());
  sizes.back() = out_cols;
  Tensor grad_gate = empty(sizes, type, o.gate);
  Tensor grad_up = o.up && !o.packed ? empty_rows(o.gate) : empty({&none, 1}, type, o.gate);
  Tensor gate_bias = empty({needs_gate_bias ? &out_cols : &none, 1}, type, o.gate);
  Tensor up_bias = empty({needs_up_bias && !o.packed ? &cols : &none, 1}, type, o.gate);
  // Where the gradient of up is written, and that of its bias.
  const auto of_up = [&](Tensor& gate, Tensor& up) -> void* {
    return o.packed ? static_cast<char*>(gate.mutable_data_ptr()) + cols * gate.element_size() : up.mutable_data_ptr();
  };
  if (o.gate.numel() == 0) {
    aten::zero_(gate_bias);
    aten::zero_(up_bias);
    return {grad_gate, grad_up, gate_bias, up_bias};
  }
  const Rows grad_rows = as_rows(grad_y), gate = as_rows(o.gate);
  const std::optional<Rows> up = o.up ? std::optional(as_rows(*o.up)) : std::nullopt;
  BiasActBackwardParams params{.grad_y = grad_rows.data(),
                               .gate = gate.data(),
                               .up = up ? up->data() : nullptr,
                               .gate_bias = data(o.gate_bias),
                               .up_bias = data(o.up_bias),
                               .grad_gate = grad_gate.mutable_data_ptr(),
                               .grad_up = up ? of_up(grad_gate, grad_up) : nullptr,
                               .grad_gate_bias = needs_gate_bias ? gate_bias.mutable_data_ptr() : nullptr,
                               .grad_up_bias = needs_up_bias ? of_up(gate_bias, up_bias) : nullptr,
                               .partials = nullptr,
                               .partial_rows = 0,
                               .rows = gate.rows,
                               .cols = gate.cols,
                               .grad_y_stride = grad_rows.stride,
                               .gate_stride = gate.stride,
                               .up_stride = up ? up->stride : 0,
                               .grad_stride = out_cols};
  std::optional<Tensor> partials;  // kept until the launch; later uses of the memory are ordered after the kernels
  const auto allocate_partials = [&](ScalarType partial_type) {
    const int64_t count = (needs_gate_bias + needs_up_bias) * params.partial_rows * params.cols;
    if (count == 0) return;
    partials = empty({&count, 1}, partial_type, o.gate);
    params.partials = partials->mutable_data_ptr();
  };
  on_device(op, o.gate, LLMK_CUDA_ONLY([&](auto stream) {
              check_cuda(op, kernels::bias_act_backward_partial_rows(params, dtype, params.partial_rows));
              allocate_partials(ScalarType::Float);
              return kernels::bias_act_backward(params, activation, dtype, stream);
            }),
            [&] {
              params.partial_rows = std::min<int64_t>(params.rows, 64);
              allocate_partials(dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float);
              parallel_for(params.partial_rows, o.gate.numel() / params.partial_rows, [&](int64_t begin, int64_t end) {
                cpu::bias_act_backward(params, activation, dtype, begin, end);
              });
              if (!params.partials) return;
              parallel_for(params.cols, params.partial_rows,
                           [&](int64_t begin, int64_t end) { cpu::bias_act_grad_bias(params, dtype, begin, end); });
            });
  return {grad_gate, grad_up, gate_bias, up_bias};
}

Activation gelu(const char* op, const std::string& approximate) {
  LLMK_CHECK(approximate == "tanh" || approximate == "none", op, "approximate must be 'tanh' or 'none' (erf), got '",
             approximate, "'");
  return approximate == "tanh" ? Activation::kGeluTanh : Activation::kGeluErf;
}

Tensor bias_gelu(const Tensor& x, MaybeTensor bias, std::string approximate) {
  return forward("bias_gelu", {"x", x, {}, bias, {}}, gelu("bias_gelu", approximate));
}
std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& grad_y, const Tensor& x, MaybeTensor bias,
                                              std::string approximate, bool needs_grad_bias) {
  constexpr const char* op = "bias_gelu_backward";
  const auto [grad_x, _, grad_bias, __] =
      backward(op, grad_y, {"x", x, {}, bias, {}}, gelu(op, approximate), needs_grad_bias, false);
  return {grad_x, grad_bias};
}

Tensor relu2(const Tensor& x, MaybeTensor bias) { return forward("relu2", {"x", x, {}, bias, {}}, Activation::kRelu2); }
std::tuple<Tensor, Tensor> relu2_backward(const Tensor& grad_y, const Tensor& x, MaybeTensor bias,
                                          bool needs_grad_bias) {
  const auto [grad_x, _, grad_bias, __] =
      backward("relu2_backward", grad_y, {"x", x, {}, bias, {}}, Activation::kRelu2, needs_grad_bias, false);
  return {grad_x, grad_bias};
}

Tensor bias_swiglu(const Tensor& gate, const Tensor& up, MaybeTensor gate_bias, MaybeTensor up_bias) {
  return forward("bias_swiglu", {"gate", gate, up, gate_bias, up_bias}, Activation::kSilu);
}
std::tuple<Tensor, Tensor, Tensor, Tensor> bias_swiglu_backward(const Tensor& grad_y, const Tensor& gate,
                                                                const Tensor& up, MaybeTensor gate_bias,
                                                                MaybeTensor up_bias, bool needs_grad_gate_bias,
                                                                bool needs_grad_up_bias) {
  return backward("bias_swiglu_backward", grad_y, {"gate", gate, up, gate_bias, up_bias}, Activation::kSilu,
                  needs_grad_gate_bias, needs_grad_up_bias);
}

Tensor bias_geglu(const Tensor& gate, const Tensor& up, MaybeTensor gate_bias, MaybeTensor up_bias,
                  std::string approximate) {
  return forward("bias_geglu", {"gate", gate, up, gate_bias, up_bias}, gelu("bias_geglu", approximate));
}
std::tuple<Tensor, Tensor, Tensor, Tensor> bias_geglu_backward(const Tensor& grad_y, const Tensor& gate,
                                                               const Tensor& up, MaybeTensor gate_bias,
                                                               MaybeTensor up_bias, std::string approximate,
                                                               bool needs_grad_gate_bias, bool needs_grad_up_bias) {
  constexpr const char* op = "bias_geglu_backward";
  return backward(op, grad_y, {"gate", gate, up, gate_bias, up_bias}, gelu(op, approximate), needs_grad_gate_bias,
                  needs_grad_up_bias);
}

Tensor bias_swiglu_packed(const Tensor& gate_up, MaybeTensor bias) {
  constexpr const char* op = "bias_swiglu_packed";
  return forward(op, unpack(op, gate_up, bias), Activation::kSilu);
}

std::tuple<Tensor, Tensor> packed_backward(const char* op, const Tensor& grad_y, const Tensor& gate_up,
                                           const MaybeTensor& bias, Activation activation, bool needs_grad_bias) {
  const Operands halves = unpack(op, gate_up, bias, grad_y);
  check_dtype(op, {"grad_y", grad_y}, {"gate_up", gate_up});
  LLMK_CHECK(grad_y.sizes().equals(halves.gate.sizes()), op, "grad_y must have shape ", shape(halves.gate), ", got ",
             shape(grad_y));
  const auto [grad, _, grad_bias, __] = backward(op, grad_y, halves, activation, needs_grad_bias, needs_grad_bias);
  return {grad, grad_bias};
}
std::tuple<Tensor, Tensor> bias_swiglu_packed_backward(const Tensor& grad_y, const Tensor& gate_up, MaybeTensor bias,
                                                       bool needs_grad_bias) {
  return packed_backward("bias_swiglu_packed_backward", grad_y, gate_up, bias, Activation::kSilu, needs_grad_bias);
}

Tensor bias_geglu_packed(const Tensor& gate_up, MaybeTensor bias, std::string approximate) {
  constexpr const char* op = "bias_geglu_packed";
  return forward(op, unpack(op, gate_up, bias), gelu(op, approximate));
}
std::tuple<Tensor, Tensor> bias_geglu_packed_backward(const Tensor& grad_y, const Tensor& gate_up, MaybeTensor bias,
                                                      std::string approximate, bool needs_grad_bias) {
  constexpr const char* op = "bias_geglu_packed_backward";
  return packed_backward(op, grad_y, gate_up, bias, gelu(op, approximate), needs_grad_bias);
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "bias_gelu", TORCH_BOX(&bias_gelu));
  ops.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
  implement_differentiable(ops, "relu2", TORCH_BOX(&relu2));
  ops.impl("relu2_backward", TORCH_BOX(&relu2_backward));
  implement_differentiable(ops, "bias_swiglu", TORCH_BOX(&bias_swiglu));
  ops.impl("bias_swiglu_backward", TORCH_BOX(&bias_swiglu_backward));
  implement_differentiable(ops, "bias_geglu", TORCH_BOX(&bias_geglu));
  ops.impl("bias_geglu_backward", TORCH_BOX(&bias_geglu_backward));
  implement_differentiable(ops, "bias_swiglu_packed", TORCH_BOX(&bias_swiglu_packed));
  ops.impl("bias_swiglu_packed_backward", TORCH_BOX(&bias_swiglu_packed_backward));
  implement_differentiable(ops, "bias_geglu_packed", TORCH_BOX(&bias_geglu_packed));
  ops.impl("bias_geglu_packed_backward", TORCH_BOX(&bias_geglu_packed_backward));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
