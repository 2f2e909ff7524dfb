// cross_entropy, its backward and its variant in place; what linear_cross_entropy shares with them.
#include "cross_entropy.h"

#include "cpu/cross_entropy.h"
#if LLMK_CUDA
#include "kernels/loss/cross_entropy.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// Whether `argument` has the shape of x without its last dimension.
bool is_per_row(const Argument& argument, const Tensor& x) {
  return argument->dim() == x.dim() - 1 && argument->sizes().equals(x.sizes().slice(0, x.dim() - 1));
}

void check_targets(const CrossEntropyCall& call) {
  const CrossEntropyParams& p = call.params;
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t target = p.target[row];
    LLMK_CHECK((target >= 0 && target < p.vocab) || target == p.options.ignore_index, call.op,
               "target must be from 0 to ", p.vocab - 1, " or ignore_index, got ", target);
  }
}

}  // namespace

void check_wide(const char* op, const Argument& argument, Dtype dtype) {
  LLMK_CHECK(argument->scalar_type() == wide(dtype), op, argument.name, " must be ", name(wide(dtype)), ", got ",
             name(argument->scalar_type()));
}

void check_per_row(const char* op, const Argument& argument, const Argument& rows) {
  LLMK_CHECK(is_per_row(argument, *rows), op, argument.name, " must have the shape of ", rows.name,
             " but its last dimension, ", shape(*rows), ", got ", shape(*argument));
}

Tensor check_grad_loss(const char* op, const Tensor& grad_loss, const Argument& rows, bool reduced, Dtype dtype) {
  check_wide(op, {"grad_loss", grad_loss}, dtype);
  if (reduced) {
    LLMK_CHECK(grad_loss.dim() == 0, op, "grad_loss must be a scalar, got ", shape(grad_loss));
  } else {
    check_per_row(op, {"grad_loss", grad_loss}, rows);
  }
  return aten::contiguous(grad_loss);
}

CrossEntropyCall begin_cross_entropy(const char* op, const LossRows& of, const Tensor& target,
                                     const std::optional<Tensor>& weight, const std::string& reduction,
                                     const CrossEntropyOptions& options) {
  const Dtype dtype = to_dtype(op, of.rows);
  LLMK_CHECK(target.scalar_type() == ScalarType::Long, op, "target must be Long, got ", name(target.scalar_type()));
  check_per_row(op, {"target", target}, of.rows);
  if (weight) {
    check_wide(op, {"weight", weight}, dtype);
    LLMK_CHECK(weight->dim() == 1 && weight->size(0) == of.vocab, op, "weight must have shape [", of.vocab, "] (",
               of.vocab_text, "), got ", shape(*weight));
  }
  LLMK_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none", op,
             "reduction must be 'mean', 'sum' or 'none', got '", reduction, "'");
  LLMK_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, op,
             "label_smoothing must be from 0 to 1, got ", options.label_smoothing);
  check_not_negative(op, "lse_square_scale", options.lse_square_scale);
  check_not_negative(op, "softcap", options.softcap);
  LLMK_CHECK(of.vocab >= 1 || target.numel() == 0, op, of.classes, " must have at least one class");
  CrossEntropyCall call{op,
                        dtype,
                        reduction != "none",
                        reduction == "mean",
                        aten::contiguous(target),
                        weight ? std::optional(with_unit_last_stride(*weight)) : std::nullopt,
                        std::nullopt,
                        {}};
  call.params.options = options;
  call.params.vocab = of.vocab;
  call.params.rows = target.numel();
  if (is_meta(target)) return call;
  call.params.target = static_cast<const int64_t*>(call.target.const_data_ptr());
  call.params.weight = data(call.weight);
  if (call.mean || call.weight) {
    const int64_t two = 2;
    call.sums = empty({&two, 1}, wide(dtype), target);
    call.params.sums = call.sums->const_data_ptr();
  }
  if (target.is_cpu()) check_targets(call);
  return call;
}

void run_sums(const CrossEntropyCall& call, bool mean, const Tensor& sums) {
  on_device(call.op, call.target, LLMK_CUDA_ONLY([&](auto stream) {
              auto* const into = static_cast<float*>(sums.mutable_data_ptr());
              return kernels::cross_entropy_sums(call.params, mean, into, stream);
            }),
            [&] { cpu::cross_entropy_sums(call.params, mean, call.dtype, sums.mutable_data_ptr()); });
}

void run_rows(const CrossEntropyCall& call, const CrossEntropyParams& params) {
  on_device(call.op, call.target,
            LLMK_CUDA_ONLY([&](auto stream) { return kernels::cross_entropy(params, call.dtype, stream); }), [&] {
              parallel_for(params.rows, 4 * params.vocab,
                           [&](int64_t begin, int64_t end) { cpu::cross_entropy(params, call.dtype, begin, end); });
            });
}

void run_reduce(const CrossEntropyCall& call, const CrossEntropyParams& params, const Tensor& loss) {
  on_device(call.op, call.target, LLMK_CUDA_ONLY([&](auto stream) {
              return kernels::cross_entropy_reduce(params, static_cast<float*>(loss.mutable_data_ptr()), stream);
            }),
            [&] { cpu::cross_entropy_reduce(params, call.dtype, loss.mutable_data_ptr()); });
}

void run_backward(const CrossEntropyCall& call, const CrossEntropyParams& params) {
  on_device(
      call.op, call.target,
      LLMK_CUDA_ONLY([&](auto stream) { return kernels::cross_entropy_backward(params, call.dtype, stream); }), [&] {
        parallel_for(params.rows, 2 * params.vocab,
                     [&](int64_t begin, int64_t end) { cpu::cross_entropy_backward(params, call.dtype, begin, end); });
      });
}

namespace {

CrossEntropyCall begin(const char* op, const Argument& logits, const Tensor& target,
                       const std::optional<Tensor>& weight, const std::string& reduction,
                       const CrossEntropyOptions& options) {
  to_dtype(op, logits);
  LLMK_CHECK(logits->dim() >= 1, op, logits.name, " must have at least one dimension, got a scalar");
  const LossRows of{logits, logits.name.text, logits->size(logits->dim() - 1), "logits.size(-1)"};
  return begin_cross_entropy(op, of, target, weight, reduction, options);
}

// How many sums there are.
int64_t sums_of(const CrossEntropyCall& call) { return call.mean || call.weight ? 2 : 0; }

void set_logits(CrossEntropyParams& params, const Rows& rows) {
  params.logits = rows.data();
  params.logits_stride = rows.stride;
}

// Loss and log-sum-exp. The gradient goes to `grad`, if there is one, whose rows are `grad_stride` elements apart.
std::pair<Tensor, Tensor> forward(CrossEntropyCall& call, const Tensor& logits, const std::optional<Tensor>& grad,
                                  int64_t grad_stride) {
  const Tensor& like = call.target;
  Tensor lse = empty(like.sizes(), wide(call.dtype), logits);
  Tensor losses = empty(like.sizes(), wide(call.dtype), logits);
  Tensor loss = call.reduced ? empty(like.sizes().slice(0, 0), wide(call.dtype), logits) : losses;
  if (is_meta(logits)) return {loss, lse};
  const Rows rows = as_rows(logits);
  set_logits(call.params, rows);
  call.params.losses = losses.mutable_data_ptr();
  call.params.lse = lse.mutable_data_ptr();
  call.params.grad = grad ? grad->mutable_data_ptr() : nullptr;
  call.params.grad_stride = grad_stride;
  if (call.sums) run_sums(call, call.mean, *call.sums);
  run_rows(call, call.params);
  if (call.reduced) run_reduce(call, call.params, loss);
  return {loss, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                         std::optional<Tensor> weight, int64_t ignore_index,
                                                         std::string reduction, double label_smoothing,
                                                         double lse_square_scale, double softcap,
                                                         bool gradient_in_forward) {
  constexpr const char* op = "cross_entropy";
  check_tensors(op, {{"logits", logits}, {"target", target}, {"weight", weight}});
  CrossEntropyCall call = begin(op, {"logits", logits}, target, weight, reduction,
                                {ignore_index, label_smoothing, lse_square_scale, softcap});
  const int64_t zero = 0;
  Tensor grad = gradient_in_forward ? empty_rows(logits) : empty({&zero, 1}, dtype_code(logits), logits);
  const auto [loss, lse] =
      forward(call, logits, gradient_in_forward ? std::optional(grad) : std::nullopt, call.params.vocab);
  const int64_t count = sums_of(call);
  const Tensor sums = call.sums ? *call.sums : empty({&count, 1}, wide(call.dtype), logits);
  return {loss, lse, sums, grad};
}

// The gradient replaces the logits.
Tensor cross_entropy_(Tensor logits, const Tensor& target, std::optional<Tensor> weight, int64_t ignore_index,
                      std::string reduction, double label_smoothing, double lse_square_scale, double softcap) {
  constexpr const char* op = "cross_entropy_";
  check_tensors(op, {{"logits", logits, Access::kWrite}, {"target", target}, {"weight", weight}});
  CrossEntropyCall call = begin(op, {"logits", logits}, target, weight, reduction,
                                {ignore_index, label_smoothing, lse_square_scale, softcap});
  const bool in_place = is_meta(logits) || as_rows(logits).data() == logits.const_data_ptr();
  LLMK_CHECK(in_place, op, "logits must have contiguous rows at one distance, got strides ", text(logits.strides()));
  return forward(call, logits, logits, is_meta(logits) ? 0 : as_rows(logits).stride).first;
}

// Writes the gradient to `grad`, which is contiguous and may be the memory of the logits.
void backward(CrossEntropyCall& call, const Tensor& grad_loss, const Argument& logits, const Tensor& lse,
              const Tensor& sums, const Tensor& grad) {
  const int64_t count = sums_of(call);
  check_wide(call.op, {"lse", lse}, call.dtype);
  check_per_row(call.op, {"lse", lse}, logits);
  check_wide(call.op, {"sums", sums}, call.dtype);
  LLMK_CHECK(sums.dim() == 1 && sums.size(0) == count, call.op, "sums must have shape [", count, "], got ",
             shape(sums));
  const Tensor of_loss = check_grad_loss(call.op, grad_loss, logits, call.reduced, call.dtype),
               every_lse = aten::contiguous(lse), both_sums = aten::contiguous(sums);
  if (is_meta(grad) || grad.numel() == 0) return;
  const Rows rows = as_rows(*logits);
  CrossEntropyParams& params = call.params;
  set_logits(params, rows);
  params.sums = count > 0 ? both_sums.const_data_ptr() : nullptr;
  params.lse = const_cast<void*>(every_lse.const_data_ptr());
  params.grad_loss = of_loss.const_data_ptr();
  params.grad_loss_stride = call.reduced ? 0 : 1;
  params.grad = grad.mutable_data_ptr();
  params.grad_stride = params.vocab;
  run_backward(call, params);
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                              std::optional<Tensor> weight, const Tensor& lse, const Tensor& sums, int64_t ignore_index,
                              std::string reduction, double label_smoothing, double lse_square_scale, double softcap) {
  constexpr const char* op = "cross_entropy_backward";
  check_tensors(op, {{"grad_loss", grad_loss},
                     {"logits", logits},
                     {"target", target},
                     {"weight", weight},
                     {"lse", lse},
                     {"sums", sums}});
  CrossEntropyCall call = begin(op, {"logits", logits}, target, weight, reduction,
                                {ignore_index, label_smoothing, lse_square_scale, softcap});
  Tensor grad = empty_rows(logits);
  backward(call, grad_loss, {"logits", logits}, lse, sums, grad);
  return grad;
}

void check_contiguous_rows(const char* op, const Tensor& grad) {
  LLMK_CHECK(
      grad.numel() == 0 || is_meta(grad) || (as_rows(grad).stride == as_rows(grad).cols || as_rows(grad).rows == 1), op,
      "grad must be contiguous, got strides ", text(grad.strides()));
}

// Writes over the gradient of a loss whose own gradient is 1, unless that is so; without `logits`, over the logits.
void cross_entropy_backward_(Tensor grad, const Tensor& grad_loss, std::optional<Tensor> logits, const Tensor& target,
                             std::optional<Tensor> weight, const Tensor& lse, const Tensor& sums, int64_t ignore_index,
                             std::string reduction, double label_smoothing, double lse_square_scale, double softcap) {
  constexpr const char* op = "cross_entropy_backward_";
  check_tensors(op, {{"grad", grad, Access::kWrite},
                     {"grad_loss", grad_loss},
                     {"logits", logits},
                     {"target", target},
                     {"weight", weight},
                     {"lse", lse},
                     {"sums", sums}});
  const Argument of{logits ? "logits" : "grad", logits ? *logits : grad};
  CrossEntropyCall call =
      begin(op, of, target, weight, reduction, {ignore_index, label_smoothing, lse_square_scale, softcap});
  check_like(op, {"grad", grad}, of);
  check_contiguous_rows(op, grad);
  call.params.grad_is_of_one = logits.has_value();
  backward(call, grad_loss, of, lse, sums, grad);
}

void cross_entropy_scale_(Tensor grad, const Tensor& grad_loss) {
  constexpr const char* op = "cross_entropy_scale_";
  check_tensors(op, {{"grad", grad, Access::kWrite}, {"grad_loss", grad_loss}});
  const Dtype dtype = to_dtype(op, {"grad", grad});
  LLMK_CHECK(grad.dim() >= 1, op, "grad must have at least one dimension, got a scalar");
  const bool is_scalar = grad_loss.dim() == 0;
  const Tensor of_loss = check_grad_loss(op, grad_loss, {"grad", grad}, is_scalar, dtype);
  check_contiguous_rows(op, grad);
  if (is_meta(grad) || grad.numel() == 0) return;
  const int64_t vocab = grad.size(grad.dim() - 1);
  const CrossEntropyScaleParams params{.grad = grad.mutable_data_ptr(),
                                       .grad_loss = of_loss.const_data_ptr(),
                                       .rows = grad.numel() / vocab,
                                       .vocab = vocab,
                                       .grad_loss_stride = is_scalar ? 0 : 1};
  on_device(op, grad, LLMK_CUDA_ONLY([&](auto stream) { return kernels::cross_entropy_scale(params, dtype, stream); }),
            [&] {
              parallel_for(params.rows, vocab,
                           [&](int64_t begin, int64_t end) { cpu::cross_entropy_scale(params, dtype, begin, end); });
            });
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "cross_entropy", TORCH_BOX(&cross_entropy));
  ops.impl("cross_entropy_", TORCH_BOX(&cross_entropy_));
  ops.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  ops.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
  ops.impl("cross_entropy_scale_", TORCH_BOX(&cross_entropy_scale_));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
