// int8_linear: y = x (scale weight)^T + bias, where weight is int8 with a scale for each row. By the kernels of
// linear.cpp that read int8, or else of the weight dequantized to the dtype of x.
#include "backend.h"
#include "parts.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

constexpr const char* kOp = "int8_linear";

Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& scale, std::optional<Tensor> bias) {
  check_tensors(kOp, {{"x", x}, {"weight", weight}, {"weight_scale", scale}, {"bias", bias}});
  to_dtype(kOp, {"x", x});
  LLMK_CHECK(x.dim() >= 1, kOp, "x must have at least one dimension, got a scalar");
  const int64_t k = x.size(x.dim() - 1);
  LLMK_CHECK(weight.scalar_type() == ScalarType::Char, kOp, "weight must be int8, got ", name(weight.scalar_type()));
  LLMK_CHECK(weight.dim() == 2 && weight.size(1) == k, kOp, "weight must have shape [N, ", k, "] (x.size(-1)), got ",
             shape(weight));
  const int64_t n = weight.size(0);
  LLMK_CHECK(scale.scalar_type() == ScalarType::Float, kOp, "weight_scale must be float32, got ",
             name(scale.scalar_type()));
  LLMK_CHECK(scale.dim() == 1 && scale.size(0) == n, kOp, "weight_scale must have shape [", n,
             "] (weight.size(0)), got ", shape(scale));
  check_vector(kOp, {"bias", bias}, {"x", x}, n, "weight.size(0)");
  const Tensor of_rows = is_meta(x) ? scale : aten::contiguous(scale);
  return linear(x, {kOp, weight, bias, std::nullopt, std::nullopt, false, of_rows});
}

void register_ops(StableLibrary& ops) { implement_differentiable(ops, kOp, TORCH_BOX(&int8_linear)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
