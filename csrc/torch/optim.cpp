// adam_, grad_norm and clip_grads_: ops on lists of tensors.
#include <algorithm>
#include <limits>

#include "backend.h"
#include "cpu/optim.h"
#include "optim_arithmetic.h"
#include "overlap.h"
#if LLMK_CUDA
#include "kernels/optim/adam.h"
#include "kernels/optim/grad_norm.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;
using List = std::vector<Tensor>;

Argument element(const char* name, const List& list, size_t i, Access access = Access::kRead) {
  return {Name(name, static_cast<int64_t>(i)), list[i], access};
}

// Whether the elements fill a range of memory without gaps or overlaps, in whatever order.
bool is_dense(const Tensor& tensor) {
  return static_cast<size_t>(extent_bytes(tensor)) == tensor.numel() * tensor.element_size() &&
         !overlaps_itself(tensor);
}

void check_dense(const char* op, const Argument& argument) {
  LLMK_CHECK(argument->numel() == 0 || is_dense(*argument), op, argument.name,
             " must fill its memory without gaps, got shape ", shape(*argument), " with strides ",
             text(argument->strides()));
}

// The shape and the memory order of `model`.
void check_order(const char* op, const Argument& argument, const Argument& model) {
  LLMK_CHECK(argument->sizes().equals(model->sizes()), op, argument.name, " must have the shape of ", model.name, ", ",
             shape(*model), ", got ", shape(*argument));
  bool same = true;
  for (int64_t i = 0; i < model->dim() && model->numel() > 0; ++i) {
    same = same && (model->size(i) == 1 || argument->stride(i) == model->stride(i));
  }
  LLMK_CHECK(same, op, argument.name, " must have the strides of ", model.name, ", ", text(model->strides()), ", got ",
             text(argument->strides()));
}

// One element, of `type`.
void check_number(const char* op, const Argument& argument, ScalarType type = ScalarType::Float) {
  if (!argument) return;
  LLMK_CHECK(argument->scalar_type() == type && argument->numel() == 1, op, argument.name, " must be one ", name(type),
             ", got ", name(argument->scalar_type()), " ", shape(*argument));
}

// A data pointer of an optional tensor.
template <typename T>
const T* pointer(const std::optional<Tensor>& tensor) {
  return static_cast<const T*>(data(tensor));
}

constexpr int64_t kMaxIndices = int64_t{1} << 20;  // see RandomQuads: 20 bits beside those of an element

struct AdamLists {
  const List &params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &steps;

  bool amsgrad() const { return !max_exp_avg_sqs.empty(); }
};

void check_lists(const char* op, const AdamLists& lists, std::vector<Argument> arguments) {
  const size_t count = lists.params.size();
  LLMK_CHECK(count > 0, op, "params must have at least one tensor, got none");
  const auto add = [&](const char* name, const List& list, Access access, bool may_be_empty = false) {
    LLMK_CHECK(list.size() == count || (may_be_empty && list.empty()), op, name,
               " must have one tensor per parameter (", count, may_be_empty ? ") or none, got " : "), got ",
               list.size());
    for (size_t i = 0; i < list.size(); ++i) arguments.push_back(element(name, list, i, access));
  };
  std::vector<Argument> numbers;
  std::swap(numbers, arguments);  // the lists come first
  add("params", lists.params, Access::kWrite);
  add("grads", lists.grads, Access::kRead);
  add("exp_avgs", lists.exp_avgs, Access::kWrite);
  add("exp_avg_sqs", lists.exp_avg_sqs, Access::kWrite);
  add("max_exp_avg_sqs", lists.max_exp_avg_sqs, Access::kWrite, true);
  add("steps", lists.steps, Access::kWrite);
  arguments.insert(arguments.end(), numbers.begin(), numbers.end());
  check_tensors(op, arguments.data(), arguments.size());
}

// Checks entry i of the lists.
AdamTensor check_entry(const char* op, const AdamLists& lists, size_t i) {
  const Argument param = element("params", lists.params, i), grad = element("grads", lists.grads, i);
  const Argument exp_avg = element("exp_avgs", lists.exp_avgs, i);
  const Argument exp_avg_sq = element("exp_avg_sqs", lists.exp_avg_sqs, i);
  const Argument step = element("steps", lists.steps, i);
  const Dtype dtype = to_dtype(op, param);
  check_dense(op, param);
  check_dtype(op, grad, param);
  check_order(op, grad, param);
  const ScalarType state = exp_avg->scalar_type();
  if (dtype == Dtype::kFloat64) {
    check_dtype(op, exp_avg, param);
  } else {
    LLMK_CHECK(state == ScalarType::Float || state == ScalarType::BFloat16, op, exp_avg.name,
               " must be float32 or bfloat16, got ", name(state));
  }
  check_order(op, exp_avg, param);
  check_dtype(op, exp_avg_sq, exp_avg);
  check_order(op, exp_avg_sq, param);
  if (lists.amsgrad()) {
    const Argument largest = element("max_exp_avg_sqs", lists.max_exp_avg_sqs, i);
    check_dtype(op, largest, exp_avg);
    check_order(op, largest, param);
  }
  check_number(op, step);
  if (is_meta(*param)) return {};
  return {param->mutable_data_ptr(),
          grad->const_data_ptr(),
          exp_avg->mutable_data_ptr(),
          exp_avg_sq->mutable_data_ptr(),
          lists.amsgrad() ? lists.max_exp_avg_sqs[i].mutable_data_ptr() : nullptr,
          static_cast<float*>(step->mutable_data_ptr()),
          param->numel(),
          dtype,
          to_dtype(op, exp_avg),
          0};
}

void check_adam_options(const char* op, const AdamOptions& options) {
  check_not_negative(op, "lr", options.lr);
  const auto check_beta = [&](const char* name, double beta) {
    LLMK_CHECK(beta >= 0 && beta < 1, op, name, " must be in [0, 1), got ", beta);
  };
  check_beta("beta1", options.beta1);
  check_beta("beta2", options.beta2);
  check_not_negative(op, "eps", options.eps);
  check_not_negative(op, "weight_decay", options.weight_decay);
}

void check_max_norm(const char* op, double max_norm) {
  LLMK_CHECK(max_norm == max_norm && max_norm >= 0, op, "max_norm must be at least 0, got ", max_norm);
}

void adam_on_cpu(const AdamParams& params) {
  if (params.found_inf && *params.found_inf != 0) return;
  for (int64_t i = 0; i < params.count; ++i) {
    parallel_for(params.tensors[i].size, 4, [&](int64_t begin, int64_t end) { cpu::adam(params, i, begin, end); });
    *params.tensors[i].step += 1;
  }
}

void adam_(const List& param_list, const List& grads, const List& exp_avgs, const List& exp_avg_sqs,
           const List& max_exp_avg_sqs, const List& steps, std::optional<Tensor> lr, std::optional<Tensor> grad_scale,
           std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm, std::optional<Tensor> counter,
           std::optional<int64_t> rounding_seed, std::vector<int64_t> indices, double lr_value, double beta1,
           double beta2, double eps, double weight_decay, double max_norm, bool decoupled_weight_decay, bool maximize) {
  constexpr const char* op = "adam_";
  const AdamLists lists{param_list, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps};
  const AdamOptions options{lr_value, beta1, beta2, eps, weight_decay, max_norm, decoupled_weight_decay, maximize};
  check_lists(op, lists,
              {{"lr", lr},
               {"grad_scale", grad_scale},
               {"found_inf", found_inf},
               {"grad_norm", grad_norm},
               {"counter", counter, Access::kWrite}});
  check_adam_options(op, options);
  check_max_norm(op, max_norm);
  check_number(op, {"lr", lr});
  check_number(op, {"grad_scale", grad_scale});
  check_number(op, {"found_inf", found_inf});
  check_number(op, {"grad_norm", grad_norm});
  check_number(op, {"counter", counter}, ScalarType::Int);
  LLMK_CHECK(!rounding_seed || indices.size() == param_list.size(), op, "indices must have one number per parameter (",
             param_list.size(), "), got ", indices.size());
  std::vector<AdamTensor> tensors;
  for (size_t i = 0; i < param_list.size(); ++i) {
    tensors.push_back(check_entry(op, lists, i));
    if (!rounding_seed) continue;
    LLMK_CHECK(indices[i] >= 0 && indices[i] < kMaxIndices, op, Name("indices", static_cast<int64_t>(i)),
               " must be from 0 to ", kMaxIndices - 1, ", got ", indices[i]);
    tensors.back().index = static_cast<int>(indices[i]);
  }
  const Tensor& first = param_list[0];
  if (is_meta(first)) return;
  if (first.is_cuda() && !counter) {
    const int64_t one = 1;
    counter = empty({&one, 1}, ScalarType::Int, first);
    aten::zero_(*counter);
  }
  const AdamParams params{.tensors = tensors.data(),
                          .count = static_cast<int64_t>(tensors.size()),
                          .lr = pointer<float>(lr),
                          .grad_scale = pointer<float>(grad_scale),
                          .found_inf = pointer<float>(found_inf),
                          .grad_norm = pointer<float>(grad_norm),
                          .counter = counter ? static_cast<int*>(counter->mutable_data_ptr()) : nullptr,
                          .amsgrad = lists.amsgrad(),
                          .stochastic = rounding_seed.has_value(),
                          .seed = static_cast<uint64_t>(rounding_seed.value_or(0)),
                          .options = options};
  on_device(op, first, LLMK_CUDA_ONLY([&](auto stream) { return kernels::adam(params, stream); }),
            [&] { adam_on_cpu(params); });
}

std::vector<GradTensor> check_grads(const char* op, const List& grads, Access access,
                                    const std::optional<Tensor>& norm = std::nullopt) {
  LLMK_CHECK(!grads.empty(), op, "grads must have at least one tensor, got none");
  std::vector<Argument> arguments;
  for (size_t i = 0; i < grads.size(); ++i) arguments.push_back(element("grads", grads, i, access));
  arguments.push_back({"norm", norm});
  check_tensors(op, arguments.data(), arguments.size());
  std::vector<GradTensor> tensors;
  for (size_t i = 0; i < grads.size(); ++i) {
    const Dtype dtype = to_dtype(op, arguments[i]);
    check_dense(op, arguments[i]);
    if (is_meta(grads[i])) continue;
    void* const data =
        access == Access::kWrite ? grads[i].mutable_data_ptr() : const_cast<void*>(grads[i].const_data_ptr());
    tensors.push_back({data, grads[i].numel(), dtype});
  }
  return tensors;
}

constexpr int64_t kCpuChunk = 65536;  // elements that one thread adds up

float norm_on_cpu(const std::vector<GradTensor>& tensors, bool infinity) {
  double total = 0;
  for (const GradTensor& tensor : tensors) {
    std::vector<double> partials((tensor.size + kCpuChunk - 1) / kCpuChunk);
    parallel_for(static_cast<int64_t>(partials.size()), kCpuChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        partials[i] = cpu::grad_norm(tensor, infinity, i * kCpuChunk, std::min((i + 1) * kCpuChunk, tensor.size));
      }
    });
    for (const double partial : partials) {
      total = !infinity ? total + partial : partial > total || partial != partial ? partial : total;
    }
  }
  return static_cast<float>(infinity ? total : std::sqrt(total));
}

Tensor grad_norm(const List& grads, double norm_type) {
  constexpr const char* op = "grad_norm";
  const bool infinity = norm_type == std::numeric_limits<double>::infinity();
  const std::vector<GradTensor> tensors = check_grads(op, grads, Access::kRead);
  LLMK_CHECK(infinity || norm_type == 2, op, "norm_type must be 2 or inf, got ", norm_type);
  Tensor norm = empty({}, ScalarType::Float, grads[0]);
  if (is_meta(grads[0])) return norm;
  std::optional<Tensor> partials;  // kept until the launch
  on_device(op, grads[0], LLMK_CUDA_ONLY([&](auto stream) {
              const auto count = static_cast<int64_t>(tensors.size());
              const int64_t floats = kernels::grad_norm_partials(tensors.data(), count);
              partials = empty({&floats, 1}, ScalarType::Float, grads[0]);
              return kernels::grad_norm(
                  {tensors.data(), count, infinity, static_cast<float*>(partials->mutable_data_ptr()),
                   static_cast<float*>(norm.mutable_data_ptr())},
                  stream);
            }),
            [&] { *static_cast<float*>(norm.mutable_data_ptr()) = norm_on_cpu(tensors, infinity); });
  return norm;
}

void clip_grads_(const List& grads, const Tensor& norm, double max_norm) {
  constexpr const char* op = "clip_grads_";
  const std::vector<GradTensor> tensors = check_grads(op, grads, Access::kWrite, norm);
  check_number(op, {"norm", norm});
  check_max_norm(op, max_norm);
  if (is_meta(grads[0])) return;
  const auto* const value = static_cast<const float*>(norm.const_data_ptr());
  on_device(
      op, grads[0], LLMK_CUDA_ONLY([&](auto stream) {
        return kernels::clip_grads({tensors.data(), static_cast<int64_t>(tensors.size()), value, max_norm}, stream);
      }),
      [&] {
        const float factor = optim::clip_factor(*value, static_cast<float>(max_norm));
        for (const GradTensor& tensor : tensors) {
          if (factor == 1.f) break;
          parallel_for(tensor.size, 1, [&](int64_t begin, int64_t end) { cpu::scale(tensor, factor, begin, end); });
        }
      });
}

void register_ops(StableLibrary& ops) {
  ops.impl("adam_", TORCH_BOX(&adam_));
  ops.impl("grad_norm", TORCH_BOX(&grad_norm));
  ops.impl("clip_grads_", TORCH_BOX(&clip_grads_));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
