// rms_norm, layer_norm, both also after a residual add, their backward, and rms_norm before a residual add.
#include <algorithm>

#include "backend.h"
#include "cpu/norm.h"
#include "parts.h"
#if LLMK_CUDA
#include "kernels/norm/layer_norm.h"
#include "kernels/norm/rms_norm.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

enum class NormKind { kRms, kLayer };

// The weight or bias, contiguous.
std::optional<Tensor> check_of_columns(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                       const Tensor& x) {
  check_vector(op, {name, tensor}, {"x", x}, x.size(x.dim() - 1), "x.size(-1)");
  return tensor ? std::optional(with_unit_last_stride(*tensor)) : std::nullopt;
}

void check_x(const char* op, const Tensor& x) {
  LLMK_CHECK(x.dim() >= 1, op, "x must have at least one dimension, got a scalar");
}

void run(const char* op, NormKind kind, const NormParams& params, Dtype dtype, const Tensor& x,
         [[maybe_unused]] bool may_overlap = true) {
  on_device(op, x, LLMK_CUDA_ONLY([&](auto stream) {
              return (kind == NormKind::kRms ? kernels::rms_norm : kernels::layer_norm)(params, dtype, stream,
                                                                                        may_overlap);
            }),
            [&] {
              parallel_for(params.rows, params.cols, [&](int64_t begin, int64_t end) {
                (kind == NormKind::kRms ? cpu::rms_norm : cpu::layer_norm)(params, dtype, begin, end);
              });
            });
}

// y and, with a residual, x + residual.
std::pair<Tensor, std::optional<Tensor>> forward(const char* op, NormKind kind, const Tensor& x,
                                                 const std::optional<Tensor>& residual,
                                                 const std::optional<Tensor>& given_weight,
                                                 const std::optional<Tensor>& given_bias, const RmsNormOptions& options,
                                                 bool may_overlap = true) {
  check_tensors(op, {{"x", x}, {"residual", residual}, {"weight", given_weight}, {"bias", given_bias}});
  const Dtype dtype = to_dtype(op, {"x", x});
  check_x(op, x);
  check_options(op, options);
  if (residual) check_like(op, {"residual", *residual}, {"x", x});
  const auto weight = check_of_columns(op, "weight", given_weight, x);
  const auto bias = check_of_columns(op, "bias", given_bias, x);
  Tensor y = empty_rows(x);
  std::optional<Tensor> sum;
  if (residual) sum = empty_rows(x);
  if (x.numel() == 0) return {y, sum};

  const Rows x_rows = as_rows(x);
  const std::optional<Rows> residual_rows = residual ? std::optional(as_rows(*residual)) : std::nullopt;
  const NormParams params{.x = x_rows.data(),
                          .residual = residual ? residual_rows->data() : nullptr,
                          .weight = data(weight),
                          .bias = data(bias),
                          .y = y.mutable_data_ptr(),
                          .sum = sum ? sum->mutable_data_ptr() : nullptr,
                          .rows = x_rows.rows,
                          .cols = x_rows.cols,
                          .x_stride = x_rows.stride,
                          .residual_stride = residual ? residual_rows->stride : 0,
                          .options = options};
  run(op, kind, params, dtype, x, may_overlap);
  return {y, sum};
}

Tensor rms_norm(const Tensor& x, std::optional<Tensor> weight, double eps, double weight_offset,
                bool cast_before_weight) {
  const RmsNormOptions options{eps, weight_offset, cast_before_weight};
  return forward("rms_norm", NormKind::kRms, x, std::nullopt, weight, std::nullopt, options).first;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                        double eps, double weight_offset, bool cast_before_weight) {
  const RmsNormOptions options{eps, weight_offset, cast_before_weight};
  const auto [y, sum] = forward("add_rms_norm", NormKind::kRms, x, residual, weight, std::nullopt, options);
  return {y, *sum};
}

void rms_norm_add_(Tensor residual, const Tensor& x, std::optional<Tensor> weight, double eps, double weight_offset,
                   bool cast_before_weight, double alpha) {
  constexpr const char* op = "rms_norm_add_";
  const RmsNormOptions options{eps, weight_offset, cast_before_weight};
  check_tensors(op, {{"residual", residual, Access::kWrite}, {"x", x}, {"weight", weight}});
  to_dtype(op, {"x", x});
  check_x(op, x);
  check_options(op, options);
  check_finite(op, "alpha", alpha);
  check_like(op, {"residual", residual}, {"x", x});
  check_rows_in_place(op, {"residual", residual});
  check_vector(op, {"weight", weight}, {"x", x}, x.size(x.dim() - 1), "x.size(-1)");
  if (x.numel() > 0) NormSum(residual, residual, x, {weight, options}, alpha).run(op);
}

Tensor layer_norm(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps,
                  double weight_offset) {
  const RmsNormOptions options{eps, weight_offset, false};
  return forward("layer_norm", NormKind::kLayer, x, std::nullopt, weight, bias, options).first;
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                          std::optional<Tensor> bias, double eps, double weight_offset) {
  const RmsNormOptions options{eps, weight_offset, false};
  const auto [y, sum] = forward("add_layer_norm", NormKind::kLayer, x, residual, weight, bias, options);
  return {y, *sum};
}

// The gradients of x, weight and bias; those of the latter two are empty if they are not wanted.
std::tuple<Tensor, Tensor, Tensor> backward(const char* op, NormKind kind, const Tensor& grad_y, const Tensor& x,
                                            const std::optional<Tensor>& given_weight,
                                            const std::optional<Tensor>& grad_sum, const RmsNormOptions& options,
                                            bool needs_grad_weight, bool needs_grad_bias) {
  check_tensors(op, {{"grad_y", grad_y}, {"x", x}, {"weight", given_weight}, {"grad_sum", grad_sum}});
  const Dtype dtype = to_dtype(op, {"x", x});
  check_x(op, x);
  check_options(op, options);
  check_like(op, {"grad_y", grad_y}, {"x", x});
  if (grad_sum) check_like(op, {"grad_sum", *grad_sum}, {"x", x});
  const auto weight = check_of_columns(op, "weight", given_weight, x);
  const int64_t cols = x.size(x.dim() - 1), none = 0;
  needs_grad_weight = needs_grad_weight && weight;
  Tensor grad_x = empty_rows(x);
  Tensor grad_weight = empty({needs_grad_weight ? &cols : &none, 1}, x.scalar_type(), x);
  Tensor grad_bias = empty({needs_grad_bias ? &cols : &none, 1}, x.scalar_type(), x);
  if (x.numel() == 0) {
    aten::zero_(grad_weight);
    aten::zero_(grad_bias);
    return {grad_x, grad_weight, grad_bias};
  }

  const Rows x_rows = as_rows(x), grad_y_rows = as_rows(grad_y);
  const std::optional<Rows> grad_sum_rows = grad_sum ? std::optional(as_rows(*grad_sum)) : std::nullopt;
  NormBackwardParams params{.grad_y = grad_y_rows.data(),
                            .x = x_rows.data(),
                            .weight = data(weight),
                            .grad_sum = grad_sum ? grad_sum_rows->data() : nullptr,
                            .grad_x = grad_x.mutable_data_ptr(),
                            .grad_weight = needs_grad_weight ? grad_weight.mutable_data_ptr() : nullptr,
                            .grad_bias = needs_grad_bias ? grad_bias.mutable_data_ptr() : nullptr,
                            .partials = nullptr,
                            .partial_rows = 0,
                            .rows = x_rows.rows,
                            .cols = x_rows.cols,
                            .grad_y_stride = grad_y_rows.stride,
                            .x_stride = x_rows.stride,
                            .grad_sum_stride = grad_sum ? grad_sum_rows->stride : 0,
                            .options = options};
  std::optional<Tensor> partials;  // kept until the launch; later uses of the memory are ordered after the kernels
  const auto allocate_partials = [&](int64_t count, ScalarType type) {
    partials = empty({&count, 1}, type, x);
    params.partials = partials->mutable_data_ptr();
  };
  on_device(op, x, LLMK_CUDA_ONLY([&](auto stream) {
              const bool rms = kind == NormKind::kRms;
              kernels::NormBackwardWorkspace workspace{};
              check_cuda(op, (rms ? kernels::rms_norm_backward_workspace : kernels::layer_norm_backward_workspace)(
                                 params, dtype, workspace));
              params.partial_rows = workspace.partial_rows;
              if (workspace.floats > 0) allocate_partials(workspace.floats, ScalarType::Float);
              return (rms ? kernels::rms_norm_backward : kernels::layer_norm_backward)(params, dtype, stream);
            }),
            [&] {
              params.partial_rows = std::min<int64_t>(params.rows, 64);
              if (const int sums = needs_grad_weight + needs_grad_bias; sums > 0) {
                allocate_partials(sums * params.partial_rows * params.cols,
                                  dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float);
              }
              parallel_for(params.partial_rows, x.numel() / params.partial_rows, [&](int64_t begin, int64_t end) {
                (kind == NormKind::kRms ? cpu::rms_norm_backward : cpu::layer_norm_backward)(params, dtype, begin, end);
              });
              if (params.partials) {
                parallel_for(params.cols, params.partial_rows, [&](int64_t begin, int64_t end) {
                  cpu::norm_grad_weight_and_bias(params, dtype, begin, end);
                });
              }
            });
  return {grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_y, const Tensor& x, std::optional<Tensor> weight,
                                             std::optional<Tensor> grad_sum, double eps, double weight_offset,
                                             bool cast_before_weight, bool needs_grad_weight) {
  const RmsNormOptions options{eps, weight_offset, cast_before_weight};
  const auto [grad_x, grad_weight, _] =
      backward("rms_norm_backward", NormKind::kRms, grad_y, x, weight, grad_sum, options, needs_grad_weight, false);
  return {grad_x, grad_weight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_y, const Tensor& x,
                                                       std::optional<Tensor> weight, std::optional<Tensor> grad_sum,
                                                       double eps, double weight_offset, bool needs_grad_weight,
                                                       bool needs_grad_bias) {
  const RmsNormOptions options{eps, weight_offset, false};
  return backward("layer_norm_backward", NormKind::kLayer, grad_y, x, weight, grad_sum, options, needs_grad_weight,
                  needs_grad_bias);
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "rms_norm", TORCH_BOX(&rms_norm));
  implement_differentiable(ops, "add_rms_norm", TORCH_BOX(&add_rms_norm));
  ops.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  ops.impl("rms_norm_add_", TORCH_BOX(&rms_norm_add_));
  implement_differentiable(ops, "layer_norm", TORCH_BOX(&layer_norm));
  implement_differentiable(ops, "add_layer_norm", TORCH_BOX(&add_layer_norm));
  ops.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace

NormSum::NormSum(const Tensor& target, const Tensor& addend, const Tensor& x, const Norm& norm, double alpha)
    : x_(as_rows(x)), addend_(as_rows(addend)), weight_(norm.weight) {
  if (weight_) weight_ = with_unit_last_stride(*weight_);
  params = {.x = x_.data(),
            .weight = data(weight_),
            .rows = x_.rows,
            .cols = x_.cols,
            .x_stride = x_.stride,
            .options = norm.options,
            .addend = addend_.data(),
            .target = target.mutable_data_ptr(),
            .addend_stride = addend_.stride,
            .target_stride = as_rows(target).stride,
            .alpha = alpha};
}

void NormSum::run(const char* op) const {
  const Tensor& x = x_.tensor;
  llmk::run(op, NormKind::kRms, params, to_dtype(op, {"x", x}), x);
}

Tensor rms_norm_between(const Tensor& x, const std::optional<Tensor>& weight, const RmsNormOptions& options) {
  return forward("rms_norm", NormKind::kRms, x, std::nullopt, weight, std::nullopt, options, false).first;
}

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
