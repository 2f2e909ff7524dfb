// linear, rms_norm_linear, linear_add_ and rms_norm_swiglu_linear. Few tokens on a recent GPU have a kernel; everything
// else is composed of the library's own ops and PyTorch's linear (cuBLAS, MKL).
#include "backend.h"
#if LLMK_CUDA
#include "kernels/linear/linear.h"
#endif
#include "params/linear.h"
#include "step.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// An RMSNorm in front of the linear.
struct Norm {
  std::optional<Tensor> weight;
  RmsNormOptions options;
};

// PyTorch's linear, on x as a matrix: a dimension of one may have any stride, which cuBLAS would take literally.
Tensor library_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (x.numel() == 0) return call<Tensor>("aten::linear", "", x, weight, bias);
  const Rows rows = as_rows(x);
  const Tensor matrix = view(rows.tensor, {rows.rows, rows.cols}, {rows.rows > 1 ? rows.stride : rows.cols, 1}, 0);
  const Tensor y = call<Tensor>("aten::linear", "", matrix, weight, bias);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(sizes.size());
  sizes.back() = weight.size(0);
  for (int64_t i = x.dim() - 1, stride = 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  return view(y, sizes, strides, 0);
}

// Checks the arguments and returns the shape of the result.
std::vector<int64_t> check(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                           const Norm* norm) {
  to_dtype(op, {"x", x});
  LLMK_CHECK(x.dim() >= 1, op, "x must have at least one dimension, got a scalar");
  check_same_dtype_and_device(op, {"weight", weight}, {"x", x});
  const int64_t k = x.size(x.dim() - 1);
  LLMK_CHECK(weight.dim() == 2 && weight.size(1) == k, op, "weight must have shape [N, ", k, "] (x.size(-1)), got ",
             shape(weight));
  if (bias) {
    check_same_dtype_and_device(op, {"bias", *bias}, {"x", x});
    LLMK_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, "bias must have shape [", weight.size(0),
               "] (weight.size(0)), got ", shape(*bias));
  }
  if (norm && norm->weight) {
    check_same_dtype_and_device(op, {"norm_weight", *norm->weight}, {"x", x});
    LLMK_CHECK(norm->weight->dim() == 1 && norm->weight->size(0) == k, op, "norm_weight must have shape [", k,
               "] (x.size(-1)), got ", shape(*norm->weight));
  }
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weight.size(0);
  return sizes;
}

#if LLMK_CUDA
// Runs the kernel if there is one for this. The result goes to `y`, or is added to it.
bool run_kernel(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                const Norm* norm, LinearEpilogue epilogue, const Rows& y, bool add, bool settled) {
  const auto unit = [](const std::optional<Tensor>& t) { return !t || has_unit_last_stride(*t); };
  const int64_t k = weight.size(1);
  if (!x.is_cuda() || k == 0 || x.numel() / k > kernels::kLinearMaxTokens || !unit(weight) || !unit(bias) ||
      (norm && !unit(norm->weight))) {
    return false;
  }
  const Dtype dtype = to_dtype(op, {"x", x});
  const Rows x_rows = as_rows(x);
  LinearParams params{x_rows.data(),
                      norm ? data(norm->weight) : nullptr,
                      weight.const_data_ptr(),
                      data(bias),
                      add ? y.tensor.mutable_data_ptr() : nullptr,
                      add ? nullptr : y.tensor.mutable_data_ptr(),
                      x_rows.rows,
                      weight.size(0),
                      k,
                      x_rows.stride,
                      weight.size(0) > 1 ? weight.stride(0) : k,
                      y.stride,
                      epilogue,
                      norm != nullptr,
                      norm ? norm->options : RmsNormOptions{},
                      nullptr,
                      settled};
  bool done = false;
  on_device(
      op, x,
      [&](auto stream) {
        if (!kernels::linear_supported(params, dtype) || !kernels::linear_pays(params)) return cudaSuccess;
        done = true;
        std::optional<Tensor> workspace;  // the allocator orders its reuse behind the kernels
        if (const int64_t bytes = kernels::linear_workspace_bytes(params, dtype); bytes > 0) {
          workspace = empty({&bytes, 1}, ScalarType::Byte, x);
          params.workspace = workspace->mutable_data_ptr();
        }
        return kernels::linear(params, dtype, stream);
      },
      [] {});
  return done;
}
#endif

Tensor forward(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
               const Norm* norm, LinearEpilogue epilogue, [[maybe_unused]] bool settled) {
  std::vector<int64_t> sizes = check(op, x, weight, bias, norm);
  if (epilogue == LinearEpilogue::kSwiglu) {
    LLMK_CHECK(sizes.back() % 2 == 0, op, "weight must have an even number of rows, [gate | up], got shape ",
               shape(weight));
    sizes.back() /= 2;
  }
#if LLMK_CUDA
  if (x.is_cuda() && x.numel() > 0 && weight.numel() > 0) {
    const Tensor y = empty(sizes, x.scalar_type(), x);
    if (run_kernel(op, x, weight, bias, norm, epilogue, as_rows(y), false, settled)) return y;
  }
#endif
  const Tensor y = library_linear(norm ? rms_norm_between(x, norm->weight, norm->options) : x, weight, bias);
  return epilogue == LinearEpilogue::kSwiglu ? call<Tensor>("llmkernels::swiglu_packed", "no_grad", y) : y;
}

Tensor linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, bool settled) {
  return forward("linear", x, weight, bias, nullptr, LinearEpilogue::kNone, settled);
}

}  // namespace

Tensor rms_norm_linear(const Tensor& x, std::optional<Tensor> norm_weight, const Tensor& weight,
                       std::optional<Tensor> bias, double eps, double weight_offset, bool cast_before_weight,
                       bool settled) {
  const Norm norm{norm_weight, {eps, weight_offset, cast_before_weight}};
  return forward("rms_norm_linear", x, weight, bias, &norm, LinearEpilogue::kNone, settled);
}

Tensor rms_norm_swiglu_linear(const Tensor& x, std::optional<Tensor> norm_weight, const Tensor& weight, double eps,
                              double weight_offset, bool cast_before_weight, bool settled) {
  const Norm norm{norm_weight, {eps, weight_offset, cast_before_weight}};
  return forward("rms_norm_swiglu_linear", x, weight, std::nullopt, &norm, LinearEpilogue::kSwiglu, settled);
}

void linear_add_(Tensor residual, const Tensor& x, const Tensor& weight, std::optional<Tensor> bias,
                 [[maybe_unused]] bool settled) {
  constexpr const char* op = "linear_add_";
  const std::vector<int64_t> sizes = check(op, x, weight, bias, nullptr);
  check_same_dtype_and_device(op, {"residual", residual}, {"x", x});
  LLMK_CHECK(residual.sizes().equals(sizes), op, "residual must have shape ", text(sizes),
             " (that of x weight^T), got ", shape(residual));
  if (residual.numel() == 0) return;
#if LLMK_CUDA
  if (const Rows rows = as_rows(residual);
      rows.tensor.get() == residual.get() && x.numel() > 0 &&
      run_kernel(op, x, weight, bias, nullptr, LinearEpilogue::kNone, rows, true, settled)) {
    return;
  }
#endif
  // residual - (-1) y, which the stable ABI has, rounds as residual + y.
  torch::stable::copy_(residual, torch::stable::subtract(residual, library_linear(x, weight, bias), -1.0));
}

namespace {

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "linear", TORCH_BOX(&linear));
  implement_differentiable(ops, "rms_norm_linear", TORCH_BOX(&rms_norm_linear));
  ops.impl("linear_add_", TORCH_BOX(&linear_add_));
  ops.impl("rms_norm_swiglu_linear", TORCH_BOX(&rms_norm_swiglu_linear));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
