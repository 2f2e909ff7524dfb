// swiglu, geglu and relu2_glu, separate and packed, and their backward.
#include "cpu/glu.h"
#include "backend.h"
#include "parts.h"
#if LLMK_CUDA
#include "kernels/activation/glu.h"
#endif

namespace llmk {

Activation to_activation(const char* op, const std::string& name) {
  LLMK_CHECK(name == "silu" || name == "gelu" || name == "gelu_pytorch_tanh", op,
             "activation must be 'silu', 'gelu' (erf) or 'gelu_pytorch_tanh', got '", name, "'");
  return name == "silu" ? Activation::kSilu : name == "gelu" ? Activation::kGeluErf : Activation::kGeluTanh;
}

namespace {

using torch::stable::detail::StableLibrary;

void run(const char* op, const GluParams& params, Activation activation, Dtype dtype, const Tensor& like) {
  on_device(op, like, LLMK_CUDA_ONLY([&](auto stream) { return kernels::glu(params, activation, dtype, stream); }),
            [&] {
              parallel_for(params.rows * params.cols, 1,
                           [&](int64_t begin, int64_t end) { cpu::glu(params, activation, dtype, begin, end); });
            });
}

void run(const char* op, const GluBackwardParams& params, Activation activation, Dtype dtype, const Tensor& like) {
  on_device(op, like,
            LLMK_CUDA_ONLY([&](auto stream) { return kernels::glu_backward(params, activation, dtype, stream); }), [&] {
              parallel_for(params.rows * params.cols, 1, [&](int64_t begin, int64_t end) {
                cpu::glu_backward(params, activation, dtype, begin, end);
              });
            });
}

Tensor forward(const char* op, const Tensor& gate, const Tensor& up, Activation activation) {
  check_tensors(op, {{"gate", gate}, {"up", up}});
  const Dtype dtype = to_dtype(op, {"gate", gate});
  LLMK_CHECK(gate.dim() >= 1, op, "gate must have at least one dimension, got a scalar");
  check_like(op, {"up", up}, {"gate", gate});
  Tensor y = empty_rows(gate);
  if (gate.numel() == 0) return y;
  const Rows gate_rows = as_rows(gate), up_rows = as_rows(up);
  run(op,
      GluParams{.gate = gate_rows.data(),
                .up = up_rows.data(),
                .y = y.mutable_data_ptr(),
                .rows = gate_rows.rows,
                .cols = gate_rows.cols,
                .gate_stride = gate_rows.stride,
                .up_stride = up_rows.stride},
      activation, dtype, gate);
  return y;
}

std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& grad_y, const Tensor& gate, const Tensor& up,
                                    Activation activation) {
  check_tensors(op, {{"grad_y", grad_y}, {"gate", gate}, {"up", up}});
  const Dtype dtype = to_dtype(op, {"gate", gate});
  LLMK_CHECK(gate.dim() >= 1, op, "gate must have at least one dimension, got a scalar");
  check_like(op, {"up", up}, {"gate", gate});
  check_like(op, {"grad_y", grad_y}, {"gate", gate});
  Tensor grad_gate = empty_rows(gate), grad_up = empty_rows(gate);
  if (gate.numel() == 0) return {grad_gate, grad_up};
  const Rows grad_rows = as_rows(grad_y), gate_rows = as_rows(gate), up_rows = as_rows(up);
  run(op,
      GluBackwardParams{.grad_y = grad_rows.data(),
                        .gate = gate_rows.data(),
                        .up = up_rows.data(),
                        .grad_gate = grad_gate.mutable_data_ptr(),
                        .grad_up = grad_up.mutable_data_ptr(),
                        .rows = gate_rows.rows,
                        .cols = gate_rows.cols,
                        .grad_y_stride = grad_rows.stride,
                        .gate_stride = gate_rows.stride,
                        .up_stride = up_rows.stride,
                        .grad_stride = gate_rows.cols},
      activation, dtype, gate);
  return {grad_gate, grad_up};
}

// The second half of a packed row.
const void* up_half(const void* gate, int64_t cols, const Tensor& tensor) {
  return static_cast<const char*>(gate) + cols * tensor.element_size();
}

// The shape of y, from a packed input.
std::vector<int64_t> unpacked_shape(const char* op, const Tensor& gate_up) {
  LLMK_CHECK(gate_up.dim() >= 1 && gate_up.size(gate_up.dim() - 1) % 2 == 0, op,
             "gate_up must have an even last dimension, [gate | up], got shape ", shape(gate_up));
  std::vector<int64_t> sizes(gate_up.sizes().begin(), gate_up.sizes().end());
  sizes.back() /= 2;
  return sizes;
}

}  // namespace

Tensor swiglu(const Tensor& gate, const Tensor& up) { return forward("swiglu", gate, up, Activation::kSilu); }

Tensor glu_packed(const char* op, const Tensor& gate_up, Activation activation) {
  check_tensors(op, {{"gate_up", gate_up}});
  const Dtype dtype = to_dtype(op, {"gate_up", gate_up});
  Tensor y = empty(unpacked_shape(op, gate_up), gate_up.scalar_type(), gate_up);
  if (gate_up.numel() == 0) return y;
  const Rows packed = as_rows(gate_up);
  const int64_t cols = packed.cols / 2;
  run(op,
      GluParams{.gate = packed.data(),
                .up = up_half(packed.data(), cols, gate_up),
                .y = y.mutable_data_ptr(),
                .rows = packed.rows,
                .cols = cols,
                .gate_stride = packed.stride,
                .up_stride = packed.stride},
      activation, dtype, gate_up);
  return y;
}

namespace {

// Writes the gradient of gate_up, and y once more if it is given.
void write_packed_backward(const char* op, const Tensor& grad_y, const Tensor& gate_up, Activation activation,
                           Tensor grad, std::optional<Tensor> y = std::nullopt) {
  if (gate_up.numel() == 0) return;
  const Rows packed = as_rows(gate_up), grad_rows = as_rows(grad_y), out = as_rows(grad);
  const int64_t cols = packed.cols / 2;
  void* const grad_gate = grad.mutable_data_ptr();
  run(op,
      GluBackwardParams{.grad_y = grad_rows.data(),
                        .gate = packed.data(),
                        .up = up_half(packed.data(), cols, gate_up),
                        .grad_gate = grad_gate,
                        .grad_up = const_cast<void*>(up_half(grad_gate, cols, gate_up)),
                        .rows = packed.rows,
                        .cols = cols,
                        .grad_y_stride = grad_rows.stride,
                        .gate_stride = packed.stride,
                        .up_stride = packed.stride,
                        .grad_stride = out.stride,
                        .y = y ? y->mutable_data_ptr() : nullptr,
                        .y_stride = y ? as_rows(*y).stride : 0},
      activation, to_dtype(op, {"gate_up", gate_up}), gate_up);
}

void check_packed_backward(const char* op, const Tensor& grad_y, const Tensor& gate_up, Access access) {
  check_tensors(op, {{"grad_y", grad_y, access}, {"gate_up", gate_up, access}});
  to_dtype(op, {"gate_up", gate_up});
  const auto sizes = unpacked_shape(op, gate_up);
  check_dtype(op, {"grad_y", grad_y}, {"gate_up", gate_up});
  LLMK_CHECK(grad_y.sizes().equals(sizes), op, "grad_y must have shape ", text(sizes), ", got ", shape(grad_y));
}

Tensor packed_backward(const char* op, const Tensor& grad_y, const Tensor& gate_up, Activation activation) {
  check_packed_backward(op, grad_y, gate_up, Access::kRead);
  Tensor grad = empty_rows(gate_up);
  write_packed_backward(op, grad_y, gate_up, activation, grad);
  return grad;
}

// For a product behind the activation, whose weight's gradient needs y.
std::tuple<Tensor, Tensor> glu_packed_backward(const Tensor& grad_y, const Tensor& gate_up, std::string activation) {
  constexpr const char* op = "glu_packed_backward";
  check_packed_backward(op, grad_y, gate_up, Access::kRead);
  const Activation act = to_activation(op, activation);
  Tensor y = empty_rows(grad_y), grad = empty_rows(gate_up);
  write_packed_backward(op, grad_y, gate_up, act, grad, y);
  return {y, grad};
}

void glu_packed_backward_(Tensor grad_y, Tensor gate_up, std::string activation) {
  constexpr const char* op = "glu_packed_backward_";
  check_packed_backward(op, grad_y, gate_up, Access::kWrite);
  const Activation act = to_activation(op, activation);
  check_rows_in_place(op, {"grad_y", grad_y});
  check_rows_in_place(op, {"gate_up", gate_up});
  write_packed_backward(op, grad_y, gate_up, act, gate_up, grad_y);
}

Activation gelu(const char* op, const std::string& approximate) {
  LLMK_CHECK(approximate == "tanh" || approximate == "none", op, "approximate must be 'tanh' or 'none' (erf), got '",
             approximate, "'");
  return approximate == "tanh" ? Activation::kGeluTanh : Activation::kGeluErf;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  return backward("swiglu_backward", grad_y, gate, up, Activation::kSilu);
}

Tensor swiglu_packed(const Tensor& gate_up) { return glu_packed("swiglu_packed", gate_up, Activation::kSilu); }
Tensor swiglu_packed_backward(const Tensor& grad_y, const Tensor& gate_up) {
  return packed_backward("swiglu_packed_backward", grad_y, gate_up, Activation::kSilu);
}

Tensor geglu(const Tensor& gate, const Tensor& up, std::string approximate) {
  return forward("geglu", gate, up, gelu("geglu", approximate));
}
std::tuple<Tensor, Tensor> geglu_backward(const Tensor& grad_y, const Tensor& gate, const Tensor& up,
                                          std::string approximate) {
  return backward("geglu_backward", grad_y, gate, up, gelu("geglu_backward", approximate));
}
Tensor geglu_packed(const Tensor& gate_up, std::string approximate) {
  return glu_packed("geglu_packed", gate_up, gelu("geglu_packed", approximate));
}
Tensor geglu_packed_backward(const Tensor& grad_y, const Tensor& gate_up, std::string approximate) {
  return packed_backward("geglu_packed_backward", grad_y, gate_up, gelu("geglu_packed_backward", approximate));
}

Tensor relu2_glu(const Tensor& gate, const Tensor& up) { return forward("relu2_glu", gate, up, Activation::kRelu2); }
std::tuple<Tensor, Tensor> relu2_glu_backward(const Tensor& grad_y, const Tensor& gate, const Tensor& up) {
  return backward("relu2_glu_backward", grad_y, gate, up, Activation::kRelu2);
}
Tensor relu2_glu_packed(const Tensor& gate_up) { return glu_packed("relu2_glu_packed", gate_up, Activation::kRelu2); }
Tensor relu2_glu_packed_backward(const Tensor& grad_y, const Tensor& gate_up) {
  return packed_backward("relu2_glu_packed_backward", grad_y, gate_up, Activation::kRelu2);
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "relu2_glu", TORCH_BOX(&relu2_glu));
  ops.impl("relu2_glu_backward", TORCH_BOX(&relu2_glu_backward));
  implement_differentiable(ops, "relu2_glu_packed", TORCH_BOX(&relu2_glu_packed));
  ops.impl("relu2_glu_packed_backward", TORCH_BOX(&relu2_glu_packed_backward));
  implement_differentiable(ops, "swiglu", TORCH_BOX(&swiglu));
  ops.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
  implement_differentiable(ops, "swiglu_packed", TORCH_BOX(&swiglu_packed));
  ops.impl("swiglu_packed_backward", TORCH_BOX(&swiglu_packed_backward));
  implement_differentiable(ops, "geglu", TORCH_BOX(&geglu));
  ops.impl("geglu_backward", TORCH_BOX(&geglu_backward));
  implement_differentiable(ops, "geglu_packed", TORCH_BOX(&geglu_packed));
  ops.impl("geglu_packed_backward", TORCH_BOX(&geglu_packed_backward));
  ops.impl("glu_packed_backward", TORCH_BOX(&glu_packed_backward));
  ops.impl("glu_packed_backward_", TORCH_BOX(&glu_packed_backward_));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
