// rms_norm, add_rms_norm and their backward.
#include <algorithm>

#include "backend.h"
#include "cpu/norm.h"
#include "step.h"
#if LLMK_CUDA
#include "kernels/norm/rms_norm.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// The weight, contiguous.
std::optional<Tensor> check_weight(const char* op, const std::optional<Tensor>& weight, const Tensor& x) {
  check_vector(op, {"weight", weight}, {"x", x}, x.size(x.dim() - 1), "x.size(-1)");
  return weight ? std::optional(with_unit_last_stride(*weight)) : std::nullopt;
}

void check_x(const char* op, const Tensor& x) {
  LLMK_CHECK(x.dim() >= 1, op, "x must have at least one dimension, got a scalar");
}

// y and, with a residual, x + residual.
std::pair<Tensor, std::optional<Tensor>> forward(const char* op, const Tensor& x, const std::optional<Tensor>& residual,
                                                 const std::optional<Tensor>& given_weight,
                                                 const RmsNormOptions& options,
                                                 [[maybe_unused]] bool may_overlap = true) {
  check_tensors(op, {{"x", x}, {"residual", residual}, {"weight", given_weight}});
  const Dtype dtype = to_dtype(op, {"x", x});
  check_x(op, x);
  check_options(op, options);
  if (residual) check_like(op, {"residual", *residual}, {"x", x});
  const auto weight = check_weight(op, given_weight, x);
  Tensor y = empty_rows(x);
  std::optional<Tensor> sum;
  if (residual) sum = empty_rows(x);
  if (x.numel() == 0) return {y, sum};

  const Rows x_rows = as_rows(x);
  const std::optional<Rows> residual_rows = residual ? std::optional(as_rows(*residual)) : std::nullopt;
  const RmsNormParams params{x_rows.data(),
                             residual ? residual_rows->data() : nullptr,
                             data(weight),
                             y.mutable_data_ptr(),
                             sum ? sum->mutable_data_ptr() : nullptr,
                             x_rows.rows,
                             x_rows.cols,
                             x_rows.stride,
                             residual ? residual_rows->stride : 0,
                             options};
  on_device(op, x, LLMK_CUDA_ONLY([&](auto stream) { return kernels::rms_norm(params, dtype, stream, may_overlap); }),
            [&] {
              parallel_for(params.rows, params.cols,
                           [&](int64_t begin, int64_t end) { cpu::rms_norm(params, dtype, begin, end); });
            });
  return {y, sum};
}

Tensor rms_norm(const Tensor& x, std::optional<Tensor> weight, double eps, double weight_offset,
                bool cast_before_weight) {
  return forward("rms_norm", x, std::nullopt, weight, {eps, weight_offset, cast_before_weight}).first;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                        double eps, double weight_offset, bool cast_before_weight) {
  const auto [y, sum] = forward("add_rms_norm", x, residual, weight, {eps, weight_offset, cast_before_weight});
  return {y, *sum};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_y, const Tensor& x, std::optional<Tensor> given_weight,
                                             std::optional<Tensor> grad_sum, double eps, double weight_offset,
                                             bool cast_before_weight, bool needs_grad_weight) {
  constexpr const char* op = "rms_norm_backward";
  const RmsNormOptions options{eps, weight_offset, cast_before_weight};
  check_tensors(op, {{"grad_y", grad_y}, {"x", x}, {"weight", given_weight}, {"grad_sum", grad_sum}});
  const Dtype dtype = to_dtype(op, {"x", x});
  check_x(op, x);
  check_options(op, options);
  check_like(op, {"grad_y", grad_y}, {"x", x});
  if (grad_sum) check_like(op, {"grad_sum", *grad_sum}, {"x", x});
  const auto weight = check_weight(op, given_weight, x);
  const int64_t grad_weight_size = weight && needs_grad_weight ? x.size(x.dim() - 1) : 0;
  Tensor grad_x = empty_rows(x), grad_weight = empty({&grad_weight_size, 1}, x.scalar_type(), x);
  if (x.numel() == 0) {
    aten::zero_(grad_weight);
    return {grad_x, grad_weight};
  }

  const Rows x_rows = as_rows(x), grad_y_rows = as_rows(grad_y);
  const std::optional<Rows> grad_sum_rows = grad_sum ? std::optional(as_rows(*grad_sum)) : std::nullopt;
  RmsNormBackwardParams params{grad_y_rows.data(),
                               x_rows.data(),
                               data(weight),
                               grad_sum ? grad_sum_rows->data() : nullptr,
                               grad_x.mutable_data_ptr(),
                               grad_weight_size ? grad_weight.mutable_data_ptr() : nullptr,
                               nullptr,
                               0,
                               x_rows.rows,
                               x_rows.cols,
                               grad_y_rows.stride,
                               x_rows.stride,
                               grad_sum ? grad_sum_rows->stride : 0,
                               options};
  std::optional<Tensor> partials;  // kept until the launch; later uses of the memory are ordered after the kernels
  const auto allocate_partials = [&](int64_t count, ScalarType type) {
    partials = empty({&count, 1}, type, x);
    params.partials = partials->mutable_data_ptr();
  };
  on_device(op, x, LLMK_CUDA_ONLY([&](auto stream) {
              kernels::RmsNormBackwardWorkspace workspace{};
              check_cuda(op, kernels::rms_norm_backward_workspace(params, dtype, workspace));
              params.partial_rows = workspace.partial_rows;
              if (params.grad_weight) allocate_partials(workspace.floats, ScalarType::Float);
              return kernels::rms_norm_backward(params, dtype, stream);
            }),
            [&] {
              params.partial_rows = std::min<int64_t>(params.rows, 64);
              if (params.grad_weight) {
                allocate_partials(params.partial_rows * params.cols,
                                  dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float);
              }
              parallel_for(params.partial_rows, x.numel() / params.partial_rows,
                           [&](int64_t begin, int64_t end) { cpu::rms_norm_backward(params, dtype, begin, end); });
              if (params.grad_weight) {
                parallel_for(params.cols, params.partial_rows,
                             [&](int64_t begin, int64_t end) { cpu::rms_norm_grad_weight(params, dtype, begin, end); });
              }
            });
  return {grad_x, grad_weight};
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "rms_norm", TORCH_BOX(&rms_norm));
  implement_differentiable(ops, "add_rms_norm", TORCH_BOX(&add_rms_norm));
  ops.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace

void check_options(const char* op, const RmsNormOptions& options) {
  check_not_negative(op, "eps", options.eps);
  check_finite(op, "weight_offset", options.weight_offset);
}

Tensor rms_norm_between(const Tensor& x, const std::optional<Tensor>& weight, const RmsNormOptions& options) {
  return forward("rms_norm", x, std::nullopt, weight, options, false).first;
}

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
