// gated_mlp: the linear with gate and up rows, the activation, and the linear down, each by its fastest route
// (linear.cpp). For few tokens the activation is in the epilogue of the first kernel, unless gate and up are wanted
// or biased.
#include "backend.h"
#include "parts.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;
using MaybeTensor = std::optional<Tensor>;

void check(const char* op, const Tensor& x, const Tensor& gate_up_weight, const Tensor& down_weight,
           const MaybeTensor& gate_up_bias, const MaybeTensor& down_bias) {
  const Argument model{"x", x};
  check_tensors(op, {model,
                     {"gate_up_weight", gate_up_weight},
                     {"down_weight", down_weight},
                     {"gate_up_bias", gate_up_bias},
                     {"down_bias", down_bias}});
  to_dtype(op, model);
  LLMK_CHECK(x.dim() >= 1, op, "x must have at least one dimension, got a scalar");
  check_dtype(op, {"gate_up_weight", gate_up_weight}, model);
  check_dtype(op, {"down_weight", down_weight}, model);
  const int64_t k = x.size(x.dim() - 1);
  LLMK_CHECK(gate_up_weight.dim() == 2 && gate_up_weight.size(1) == k && gate_up_weight.size(0) % 2 == 0, op,
             "gate_up_weight must have shape [2 F, ", k, "] (x.size(-1)), got ", shape(gate_up_weight));
  const int64_t f = gate_up_weight.size(0) / 2;
  LLMK_CHECK(down_weight.dim() == 2 && down_weight.size(1) == f, op, "down_weight must have shape [N, ", f,
             "] (gate_up_weight.size(0) / 2), got ", shape(down_weight));
  check_vector(op, {"gate_up_bias", gate_up_bias}, model, 2 * f, "gate_up_weight.size(0)");
  check_vector(op, {"down_bias", down_bias}, model, down_weight.size(0), "down_weight.size(0)");
}

std::tuple<Tensor, Tensor> gated_mlp(const Tensor& x, const Tensor& gate_up_weight, const Tensor& down_weight,
                                     MaybeTensor gate_up_bias, MaybeTensor down_bias, std::string activation,
                                     bool save_gate_up) {
  constexpr const char* op = "gated_mlp";
  check(op, x, gate_up_weight, down_weight, gate_up_bias, down_bias);
  const Activation act = to_activation(op, activation);
  const bool in_epilogue = !gate_up_bias && !save_gate_up;
  const std::optional<Activation> glu = in_epilogue ? std::optional(act) : std::nullopt;
  const Linear gate_up_proj{op, gate_up_weight, gate_up_bias, std::nullopt, glu, false};
  const Linear down_proj{op, down_weight, down_bias, std::nullopt, std::nullopt, false};
  Tensor gate_up = linear(x, gate_up_proj);
  const Tensor product = in_epilogue ? gate_up : glu_packed(op, gate_up, act);
  if (!save_gate_up) {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = 0;
    gate_up = empty(sizes, x.scalar_type(), x);
  }
  return {linear(product, down_proj), gate_up};
}

void register_ops(StableLibrary& ops) { implement_differentiable(ops, "gated_mlp", TORCH_BOX(&gated_mlp)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
