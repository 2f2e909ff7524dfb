// softmax, log_softmax and their backward.
#include "cpu/softmax.h"

#include "backend.h"
#if LLMK_CUDA
#include "kernels/softmax/softmax.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

void check_x(const char* op, const Tensor& x) {
  LLMK_CHECK(x.dim() >= 1, op, "x must have at least one dimension, got a scalar");
}

// The mask's strides along the dimensions of x, 0 where it is repeated.
std::vector<int64_t> expanded_strides(const char* op, const Tensor& mask, const Tensor& x) {
  const int64_t extra = x.dim() - mask.dim();
  bool fits = extra >= 0;
  std::vector<int64_t> strides(x.dim(), 0);
  for (int64_t i = 0; fits && i < mask.dim(); ++i) {
    fits = mask.size(i) == x.size(extra + i) || mask.size(i) == 1;
    if (mask.size(i) > 1) strides[extra + i] = mask.stride(i);
  }
  LLMK_CHECK(fits, op, "mask must have a shape that broadcasts to that of x, ", shape(x), ", got ", shape(mask));
  return strides;
}

// Describes the mask by its strides; false if that takes more dimensions than there are.
bool describe(const std::vector<int64_t>& strides, const Tensor& x, SoftmaxMask& mask) {
  const int64_t last = x.dim() - 1;
  mask.col_stride = strides[last];
  int64_t sizes[3] = {1, 1, 1};
  std::fill_n(mask.strides, 3, 0);
  int at = 2;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (sizes[at] > 1 && strides[i] != mask.strides[at] * sizes[at] && --at < 0) return false;
    if (sizes[at] == 1) mask.strides[at] = strides[i];
    sizes[at] *= x.size(i);
  }
  mask.sizes[0] = sizes[1], mask.sizes[1] = sizes[2];
  return mask.col_stride <= 1;
}

// The mask in `found`; a copy where its layout needs one, to be kept until the launch.
std::optional<Tensor> read_mask(const char* op, const Tensor& given, const Tensor& x, SoftmaxMask& found) {
  found.is_bool = given.scalar_type() == ScalarType::Bool;
  LLMK_CHECK(found.is_bool || dtype_code(given) == dtype_code(x), op, "mask must be Bool or have the dtype of x, ",
             name(x.scalar_type()), ", got ", name(given.scalar_type()));
  std::vector<int64_t> strides = expanded_strides(op, given, x);
  if (is_meta(x) || x.numel() == 0) return std::nullopt;
  Tensor mask = given;
  if (!describe(strides, x, found)) {
    mask = aten::contiguous(view(given, x.sizes(), {strides.data(), strides.size()}, 0));
    std::copy_n(mask.strides().data(), strides.size(), strides.begin());
    describe(strides, x, found);
  }
  found.data = mask.const_data_ptr();
  return mask;
}

Tensor forward(const char* op, const Tensor& x, const std::optional<Tensor>& given_mask, double scale, bool causal,
               bool log) {
  check_tensors(op, {{"x", x}, {"mask", given_mask}});
  const Dtype dtype = to_dtype(op, {"x", x});
  check_x(op, x);
  check_finite(op, "scale", scale);
  LLMK_CHECK(!causal || x.dim() >= 2, op, "x must have at least two dimensions for a causal mask, got ", shape(x));
  SoftmaxMask mask{nullptr, false, {1, 1}, {0, 0, 0}, 0};
  const std::optional<Tensor> kept = given_mask ? read_mask(op, *given_mask, x, mask) : std::nullopt;
  Tensor y = empty_rows(x);
  if (x.numel() == 0) return y;

  const Rows rows = as_rows(x);
  const SoftmaxParams params{.x = rows.data(),
                             .y = y.mutable_data_ptr(),
                             .rows = rows.rows,
                             .cols = rows.cols,
                             .x_stride = rows.stride,
                             .scale = scale,
                             .log = log,
                             .causal_rows = causal ? x.size(x.dim() - 2) : 0,
                             .mask = mask};
  on_device(op, x, LLMK_CUDA_ONLY([&](auto stream) { return kernels::softmax(params, dtype, stream); }), [&] {
    parallel_for(params.rows, 4 * params.cols,
                 [&](int64_t begin, int64_t end) { cpu::softmax(params, dtype, begin, end); });
  });
  return y;
}

Tensor backward(const char* op, const Tensor& grad_y, const Tensor& y, double scale, bool log) {
  check_tensors(op, {{"grad_y", grad_y}, {"y", y}});
  const Dtype dtype = to_dtype(op, {"y", y});
  LLMK_CHECK(y.dim() >= 1, op, "y must have at least one dimension, got a scalar");
  check_like(op, {"grad_y", grad_y}, {"y", y});
  check_finite(op, "scale", scale);
  Tensor grad_x = empty_rows(y);
  if (y.numel() == 0) return grad_x;

  const Rows grad_y_rows = as_rows(grad_y), y_rows = as_rows(y);
  const SoftmaxBackwardParams params{.grad_y = grad_y_rows.data(),
                                     .y = y_rows.data(),
                                     .grad_x = grad_x.mutable_data_ptr(),
                                     .rows = y_rows.rows,
                                     .cols = y_rows.cols,
                                     .grad_y_stride = grad_y_rows.stride,
                                     .y_stride = y_rows.stride,
                                     .scale = scale,
                                     .log = log};
  on_device(op, y, LLMK_CUDA_ONLY([&](auto stream) { return kernels::softmax_backward(params, dtype, stream); }), [&] {
    parallel_for(params.rows, 2 * params.cols,
                 [&](int64_t begin, int64_t end) { cpu::softmax_backward(params, dtype, begin, end); });
  });
  return grad_x;
}

Tensor softmax(const Tensor& x, std::optional<Tensor> mask, double scale, bool causal) {
  return forward("softmax", x, mask, scale, causal, false);
}

Tensor log_softmax(const Tensor& x, double scale) {
  return forward("log_softmax", x, std::nullopt, scale, false, true);
}

Tensor softmax_backward(const Tensor& grad_y, const Tensor& y, double scale) {
  return backward("softmax_backward", grad_y, y, scale, false);
}

Tensor log_softmax_backward(const Tensor& grad_y, const Tensor& y, double scale) {
  return backward("log_softmax_backward", grad_y, y, scale, true);
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "softmax", TORCH_BOX(&softmax));
  implement_differentiable(ops, "log_softmax", TORCH_BOX(&log_softmax));
  ops.impl("softmax_backward", TORCH_BOX(&softmax_backward));
  ops.impl("log_softmax_backward", TORCH_BOX(&log_softmax_backward));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
