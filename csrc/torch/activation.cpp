// bias_act, glu and glu_packed, and their backward. A gated activation without biases takes the kernels of glu.h, any
// other those of bias_act.h.
#include "backend.h"
#include "cpu/bias_act.h"
#include "cpu/glu.h"
#include "parts.h"
#if LLMK_CUDA
#include "kernels/activation/bias_act.h"
#include "kernels/activation/glu.h"
#endif

namespace llmk {

Activation to_activation(const char* op, const std::string& name) {
  std::string known;
  for (int i = 0; i < kActivations; ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
    known += std::string(i == 0 ? "'" : i < kActivations - 1 ? ", '" : " or '") + kActivationNames[i] + "'";
  }
  fail(op, "activation must be ", known, ", got '", name, "'");
}

namespace {

using torch::stable::detail::StableLibrary;
using MaybeTensor = std::optional<Tensor>;

// The tensors of an op: x and its bias; gate, up and a bias of each; or [gate | up] as one, and its bias.
enum class Form { kPlain, kGated, kPacked };

struct Operands {
  const char* op;
  Form form;
  Tensor x;          // or gate, or gate_up
  MaybeTensor bias;  // of x
  MaybeTensor up, up_bias;

  const char* x_name() const { return form == Form::kPlain ? "x" : form == Form::kGated ? "gate" : "gate_up"; }
  bool is_biased() const { return bias || up_bias; }
  // Of the rows of y.
  int64_t cols() const { return x.size(x.dim() - 1) / (form == Form::kPacked ? 2 : 1); }
  std::vector<int64_t> result_sizes() const {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = cols();
    return sizes;
  }
};

// Checks them, and makes the biases contiguous.
Dtype check(Operands& o, const MaybeTensor& grad_y = std::nullopt, Access access = Access::kRead) {
  const char* const op = o.op;
  const char* const bias_name = o.form == Form::kGated ? "gate_bias" : "bias";
  const Argument x{o.x_name(), o.x, access};
  if (grad_y) {
    check_tensors(op, {{"grad_y", grad_y, access}, x, {"up", o.up}, {bias_name, o.bias}, {"up_bias", o.up_bias}});
  } else {
    check_tensors(op, {x, {"up", o.up}, {bias_name, o.bias}, {"up_bias", o.up_bias}});
  }
  const Dtype dtype = to_dtype(op, x);
  if (o.form == Form::kPacked) {
    LLMK_CHECK(o.x.dim() >= 1 && o.x.size(o.x.dim() - 1) % 2 == 0, op,
               "gate_up must have an even last dimension, [gate | up], got shape ", shape(o.x));
  } else {
    LLMK_CHECK(o.x.dim() >= 1, op, o.x_name(), " must have at least one dimension, got a scalar");
  }
  if (o.up) check_like(op, {"up", *o.up}, x);
  if (grad_y && o.form == Form::kPacked) {
    check_dtype(op, {"grad_y", *grad_y}, x);
    LLMK_CHECK(grad_y->sizes().equals(o.result_sizes()), op, "grad_y must have shape ", text(o.result_sizes()),
               ", got ", shape(*grad_y));
  } else if (grad_y) {
    check_like(op, {"grad_y", *grad_y}, x);
  }
  const char* const size = o.form == Form::kPlain   ? "x.size(-1)"
                           : o.form == Form::kGated ? "gate.size(-1)"
                                                    : "gate_up.size(-1)";
  check_vector(op, {bias_name, o.bias}, x, o.x.size(o.x.dim() - 1), size);
  check_vector(op, {"up_bias", o.up_bias}, x, o.cols(), size);
  for (MaybeTensor* bias : {&o.bias, &o.up_bias}) {
    if (*bias) *bias = with_unit_last_stride(**bias);
  }
  return dtype;
}

// Where the second half of a packed row begins.
template <typename Pointer>
Pointer second_half(Pointer row, const Operands& o) {
  using Bytes = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char*, char*>;
  return row ? static_cast<Bytes>(row) + o.cols() * o.x.element_size() : nullptr;
}

// The operands as the kernels read them. It keeps copies that had to be made.
struct Reads {
  Rows x;
  std::optional<Rows> up_rows;
  const void *up, *gate_bias, *up_bias;
  int64_t up_stride;

  explicit Reads(const Operands& o)
      : x(as_rows(o.x)), up_rows(o.up ? std::optional(as_rows(*o.up)) : std::nullopt), gate_bias(data(o.bias)) {
    const bool packed = o.form == Form::kPacked;
    up = packed ? second_half(x.data(), o) : up_rows ? up_rows->data() : nullptr;
    up_bias = packed ? second_half(gate_bias, o) : data(o.up_bias);
    up_stride = packed ? x.stride : up_rows ? up_rows->stride : 0;
  }
};

Tensor forward(Operands o, Activation activation) {
  const Dtype dtype = check(o);
  Tensor y = empty(o.result_sizes(), o.x.scalar_type(), o.x);
  if (o.x.numel() == 0) return y;
  const Reads reads(o);
  if (o.form != Form::kPlain && !o.is_biased()) {
    const GluParams params{.gate = reads.x.data(),
                           .up = reads.up,
                           .y = y.mutable_data_ptr(),
                           .rows = reads.x.rows,
                           .cols = o.cols(),
                           .gate_stride = reads.x.stride,
                           .up_stride = reads.up_stride};
    on_device(o.op, o.x, LLMK_CUDA_ONLY([&](auto stream) { return kernels::glu(params, activation, dtype, stream); }),
              [&] {
                parallel_for(params.rows * params.cols, 1,
                             [&](int64_t begin, int64_t end) { cpu::glu(params, activation, dtype, begin, end); });
              });
    return y;
  }
  const BiasActParams params{.gate = reads.x.data(),
                             .up = reads.up,
                             .gate_bias = reads.gate_bias,
                             .up_bias = reads.up_bias,
                             .y = y.mutable_data_ptr(),
                             .rows = reads.x.rows,
                             .cols = o.cols(),
                             .gate_stride = reads.x.stride,
                             .up_stride = reads.up_stride};
  on_device(o.op, o.x,
            LLMK_CUDA_ONLY([&](auto stream) { return kernels::bias_act(params, activation, dtype, stream); }), [&] {
              parallel_for(params.rows, params.cols,
                           [&](int64_t begin, int64_t end) { cpu::bias_act(params, activation, dtype, begin, end); });
            });
  return y;
}

// Where the gradients go: two of x and up, or one of gate_up, and vectors for the biases.
struct Writes {
  void *gate, *up, *gate_bias, *up_bias;
  int64_t stride;  // between rows
};

// The backward of a gated activation without biases. With y it gives that once more; then y may be grad_y, and the
// gradients may be written over gate and up.
void backward_unbiased(const Operands& o, Dtype dtype, const Tensor& grad_y, Activation activation,
                       const Writes& writes, const MaybeTensor& y = std::nullopt) {
  const Reads reads(o);
  const Rows grad_rows = as_rows(grad_y);
  const GluBackwardParams params{.grad_y = grad_rows.data(),
                                 .gate = reads.x.data(),
                                 .up = reads.up,
                                 .grad_gate = writes.gate,
                                 .grad_up = writes.up,
                                 .rows = reads.x.rows,
                                 .cols = o.cols(),
                                 .grad_y_stride = grad_rows.stride,
                                 .gate_stride = reads.x.stride,
                                 .up_stride = reads.up_stride,
                                 .grad_stride = writes.stride,
                                 .y = y ? y->mutable_data_ptr() : nullptr,
                                 .y_stride = y ? as_rows(*y).stride : 0};
  on_device(o.op, o.x,
            LLMK_CUDA_ONLY([&](auto stream) { return kernels::glu_backward(params, activation, dtype, stream); }), [&] {
              parallel_for(params.rows * params.cols, 1, [&](int64_t begin, int64_t end) {
                cpu::glu_backward(params, activation, dtype, begin, end);
              });
            });
}

void backward_biased(const Operands& o, Dtype dtype, const Tensor& grad_y, Activation activation,
                     const Writes& writes) {
  const Reads reads(o);
  const Rows grad_rows = as_rows(grad_y);
  BiasActBackwardParams params{.grad_y = grad_rows.data(),
                               .gate = reads.x.data(),
                               .up = reads.up,
                               .gate_bias = reads.gate_bias,
                               .up_bias = reads.up_bias,
                               .grad_gate = writes.gate,
                               .grad_up = writes.up,
                               .grad_gate_bias = writes.gate_bias,
                               .grad_up_bias = writes.up_bias,
                               .partials = nullptr,
                               .partial_rows = 0,
                               .rows = reads.x.rows,
                               .cols = o.cols(),
                               .grad_y_stride = grad_rows.stride,
                               .gate_stride = reads.x.stride,
                               .up_stride = reads.up_stride,
                               .grad_stride = writes.stride};
  std::optional<Tensor> partials;  // kept until the launch; later uses of the memory are ordered after the kernels
  const auto allocate_partials = [&](ScalarType type) {
    const int64_t wanted = (params.grad_gate_bias != nullptr) + (params.grad_up_bias != nullptr);
    const int64_t count = wanted * params.partial_rows * params.cols;
    if (count == 0) return;
    partials = empty({&count, 1}, type, o.x);
    params.partials = partials->mutable_data_ptr();
  };
  on_device(o.op, o.x, LLMK_CUDA_ONLY([&](auto stream) {
              check_cuda(o.op, kernels::bias_act_backward_partial_rows(params, dtype, params.partial_rows));
              allocate_partials(ScalarType::Float);
              return kernels::bias_act_backward(params, activation, dtype, stream);
            }),
            [&] {
              params.partial_rows = std::min<int64_t>(params.rows, 64);
              allocate_partials(dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float);
              parallel_for(
                  params.partial_rows, params.rows * params.cols / params.partial_rows,
                  [&](int64_t begin, int64_t end) { cpu::bias_act_backward(params, activation, dtype, begin, end); });
              if (!params.partials) return;
              parallel_for(params.cols, params.partial_rows,
                           [&](int64_t begin, int64_t end) { cpu::bias_act_grad_bias(params, dtype, begin, end); });
            });
}

// Of x (gate, gate_up) and its bias, of up and its bias; what is not wanted, or not there, is empty.
struct Gradients {
  Tensor x, bias, up, up_bias;
};

Gradients backward(Operands o, const Tensor& grad_y, Activation activation, bool needs_bias,
                   bool needs_up_bias = false) {
  const Dtype dtype = check(o, grad_y);
  const auto vector = [&](int64_t size) { return empty({&size, 1}, o.x.scalar_type(), o.x); };
  const auto of_bias = [&](const MaybeTensor& bias, bool needed) { return vector(bias && needed ? bias->numel() : 0); };
  Gradients grads{.x = empty_rows(o.x),
                  .bias = of_bias(o.bias, needs_bias),
                  .up = o.up ? empty_rows(o.x) : vector(0),
                  .up_bias = of_bias(o.up_bias, needs_up_bias)};
  if (o.x.numel() == 0) {
    aten::zero_(grads.bias);
    aten::zero_(grads.up_bias);
    return grads;
  }
  const auto pointer = [](const Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : nullptr; };
  const bool packed = o.form == Form::kPacked;
  const Writes writes{.gate = pointer(grads.x),
                      .up = packed ? second_half(pointer(grads.x), o) : pointer(grads.up),
                      .gate_bias = pointer(grads.bias),
                      .up_bias = packed ? second_half(pointer(grads.bias), o) : pointer(grads.up_bias),
                      .stride = o.x.size(o.x.dim() - 1)};
  if (o.form != Form::kPlain && !o.is_biased()) {
    backward_unbiased(o, dtype, grad_y, activation, writes);
  } else {
    backward_biased(o, dtype, grad_y, activation, writes);
  }
  return grads;
}

Operands plain(const char* op, const Tensor& x, const MaybeTensor& bias) { return {op, Form::kPlain, x, bias, {}, {}}; }
Operands packed(const char* op, const Tensor& gate_up, const MaybeTensor& bias) {
  return {op, Form::kPacked, gate_up, bias, {}, {}};
}

}  // namespace

Tensor glu(const char* op, const Tensor& gate, const Tensor& up, Activation activation) {
  return forward({op, Form::kGated, gate, {}, up, {}}, activation);
}

Tensor glu_packed(const char* op, const Tensor& gate_up, Activation activation) {
  return forward(packed(op, gate_up, {}), activation);
}

namespace {

Tensor bias_act_op(const Tensor& x, MaybeTensor bias, std::string activation) {
  constexpr const char* op = "bias_act";
  return forward(plain(op, x, bias), to_activation(op, activation));
}
std::tuple<Tensor, Tensor> bias_act_backward_op(const Tensor& grad_y, const Tensor& x, MaybeTensor bias,
                                                std::string activation, bool needs_grad_bias) {
  constexpr const char* op = "bias_act_backward";
  const Gradients grads = backward(plain(op, x, bias), grad_y, to_activation(op, activation), needs_grad_bias);
  return {grads.x, grads.bias};
}

Tensor glu_op(const Tensor& gate, const Tensor& up, MaybeTensor gate_bias, MaybeTensor up_bias,
              std::string activation) {
  constexpr const char* op = "glu";
  return forward({op, Form::kGated, gate, gate_bias, up, up_bias}, to_activation(op, activation));
}
std::tuple<Tensor, Tensor, Tensor, Tensor> glu_backward_op(const Tensor& grad_y, const Tensor& gate, const Tensor& up,
                                                           MaybeTensor gate_bias, MaybeTensor up_bias,
                                                           std::string activation, bool needs_grad_gate_bias,
                                                           bool needs_grad_up_bias) {
  constexpr const char* op = "glu_backward";
  const Operands operands{op, Form::kGated, gate, gate_bias, up, up_bias};
  const Gradients grads =
      backward(operands, grad_y, to_activation(op, activation), needs_grad_gate_bias, needs_grad_up_bias);
  return {grads.x, grads.up, grads.bias, grads.up_bias};
}

Tensor glu_packed_op(const Tensor& gate_up, MaybeTensor bias, std::string activation) {
  constexpr const char* op = "glu_packed";
  return forward(packed(op, gate_up, bias), to_activation(op, activation));
}
std::tuple<Tensor, Tensor> glu_packed_backward_op(const Tensor& grad_y, const Tensor& gate_up, MaybeTensor bias,
                                                  std::string activation, bool needs_grad_bias) {
  constexpr const char* op = "glu_packed_backward";
  const Gradients grads = backward(packed(op, gate_up, bias), grad_y, to_activation(op, activation), needs_grad_bias);
  return {grads.x, grads.bias};
}

// y once more, and the gradient of gate_up: the tensors that are given, or new ones.
std::tuple<Tensor, Tensor> forward_backward(const char* op, const Tensor& grad_y, const Tensor& gate_up,
                                            const std::string& activation, Access access) {
  Operands o = packed(op, gate_up, {});
  const Dtype dtype = check(o, grad_y, access);
  const Activation act = to_activation(op, activation);
  const bool in_place = access == Access::kWrite;
  if (in_place) {
    check_rows_in_place(op, {"grad_y", grad_y});
    check_rows_in_place(op, {"gate_up", gate_up});
  }
  const Tensor y = in_place ? grad_y : empty_rows(grad_y), grad = in_place ? gate_up : empty_rows(gate_up);
  if (gate_up.numel() == 0) return {y, grad};
  void* const grad_gate = grad.mutable_data_ptr();
  backward_unbiased(o, dtype, grad_y, act,
                    {.gate = grad_gate,
                     .up = second_half(grad_gate, o),
                     .gate_bias = nullptr,
                     .up_bias = nullptr,
                     .stride = as_rows(grad).stride},
                    y);
  return {y, grad};
}

std::tuple<Tensor, Tensor> glu_packed_forward_backward_op(const Tensor& grad_y, const Tensor& gate_up,
                                                          std::string activation) {
  return forward_backward("glu_packed_forward_backward", grad_y, gate_up, activation, Access::kRead);
}

void glu_packed_forward_backward_in_place_op(Tensor grad_y, Tensor gate_up, std::string activation) {
  forward_backward("glu_packed_forward_backward_", grad_y, gate_up, activation, Access::kWrite);
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "bias_act", TORCH_BOX(&bias_act_op));
  ops.impl("bias_act_backward", TORCH_BOX(&bias_act_backward_op));
  implement_differentiable(ops, "glu", TORCH_BOX(&glu_op));
  ops.impl("glu_backward", TORCH_BOX(&glu_backward_op));
  implement_differentiable(ops, "glu_packed", TORCH_BOX(&glu_packed_op));
  ops.impl("glu_packed_backward", TORCH_BOX(&glu_packed_backward_op));
  ops.impl("glu_packed_forward_backward", TORCH_BOX(&glu_packed_forward_backward_op));
  ops.impl("glu_packed_forward_backward_", TORCH_BOX(&glu_packed_forward_backward_in_place_op));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
