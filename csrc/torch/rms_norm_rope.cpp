// rms_norm_rope, rms_norm_rope_ and rms_norm_rope_backward.
#include <algorithm>

#include "cpu/rms_norm_rope.h"
#include "parts.h"
#include "rope_call.h"
#if LLMK_CUDA
#include "kernels/rope/rms_norm_rope.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// The norms' arguments.
struct Norms {
  const std::optional<Tensor>&q_weight, &k_weight;
  RmsNormOptions options;
  bool row_wise;
};

struct Prepared {
  RopeArguments rope;
  std::optional<Tensor> q_weight, k_weight;  // contiguous
  RmsNormRopeParams params;
  Dtype dtype;
};

// Checks all that is not q, k or a gradient of them. `in` is what is read, `out` what is written.
Prepared prepare(const RopeCall& call, const Norms& norms, const Tensor& q, const Tensor& k, const Tensor& q_out,
                 const Tensor& k_out) {
  const Dtype dtype = to_dtype(call.op, {"q", q});
  check_options(call.op, norms.options);
  const RopeLayout layout(call.heads_first);
  const auto columns = [&](const Tensor& x) { return norms.row_wise ? x.size(layout.heads) * x.size(3) : x.size(3); };
  const auto check_weight = [&](const char* name, const std::optional<Tensor>& weight, const Tensor& x) {
    check_vector(call.op, {name, weight}, {"q", q}, columns(x), norms.row_wise ? "heads * head_dim" : "head_dim");
    return weight ? std::optional(with_unit_last_stride(*weight)) : std::nullopt;
  };
  Prepared prepared{make_rope_arguments(call, q, k, q_out, k_out),
                    check_weight("q_weight", norms.q_weight, q),
                    check_weight("k_weight", norms.k_weight, k),
                    {},
                    dtype};
  RmsNormRopeParams& params = prepared.params;
  params.rope = prepared.rope.params;
  params.q.weight = data(prepared.q_weight);
  params.k.weight = data(prepared.k_weight);
  params.q.cols = columns(q);
  params.k.cols = columns(k);
  params.norm = norms.options;
  params.row_wise = norms.row_wise;
  params.float_angles = dtype != Dtype::kFloat32 && call.cos.scalar_type() == ScalarType::Float;
  return prepared;
}

int64_t elements_per_token(const RopeParams& rope) { return (rope.q.heads + rope.k.heads) * rope.head_dim; }

void check_q_and_k(const RopeCall& call, const Norms& norms, const Argument& q, const Argument& k) {
  check_tensors(call.op, {q,
                          k,
                          {"q_weight", norms.q_weight},
                          {"k_weight", norms.k_weight},
                          {"cos", call.cos},
                          {"sin", call.sin},
                          {"position_ids", call.position_ids}});
  check_heads(call, q, k);
}

void forward(const RopeCall& call, const Norms& norms, const Tensor& q, const Tensor& k, const Tensor& q_out,
             const Tensor& k_out) {
  const Prepared prepared = prepare(call, norms, q, k, q_out, k_out);
  const RmsNormRopeParams& params = prepared.params;
  if (q.numel() == 0 && k.numel() == 0) return;
  on_device(call.op, q, LLMK_CUDA_ONLY([&](auto stream) {
              check_on_gpu(call.op, params.rope);
              return kernels::rms_norm_rope(params, prepared.dtype, stream);
            }),
            [&] {
              check_on_cpu(call.op, params.rope);
              parallel_for(params.rope.batch * params.rope.tokens, elements_per_token(params.rope),
                           [&](int64_t begin, int64_t end) { cpu::rms_norm_rope(params, prepared.dtype, begin, end); });
            });
}

std::tuple<Tensor, Tensor> rms_norm_rope(const Tensor& q, const Tensor& k, std::optional<Tensor> q_weight,
                                         std::optional<Tensor> k_weight, const Tensor& cos, const Tensor& sin,
                                         std::optional<Tensor> position_ids, double eps, double weight_offset,
                                         bool cast_before_weight, bool row_wise, bool heads_first, bool interleaved,
                                         std::optional<int64_t> rotary_dim) {
  const RopeCall call{"rms_norm_rope", cos, sin, position_ids, heads_first, interleaved, rotary_dim, false, true};
  const Norms norms{q_weight, k_weight, {eps, weight_offset, cast_before_weight}, row_wise};
  check_q_and_k(call, norms, {"q", q}, {"k", k});
  Tensor q_out = output_like(q), k_out = output_like(k);
  forward(call, norms, with_unit_last_stride(q), with_unit_last_stride(k), q_out, k_out);
  return {q_out, k_out};
}

void rms_norm_rope_(const Tensor& q, const Tensor& k, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                    const Tensor& cos, const Tensor& sin, std::optional<Tensor> position_ids, double eps,
                    double weight_offset, bool cast_before_weight, bool row_wise, bool heads_first, bool interleaved,
                    std::optional<int64_t> rotary_dim) {
  const RopeCall call{"rms_norm_rope_", cos, sin, position_ids, heads_first, interleaved, rotary_dim, false, true};
  const Norms norms{q_weight, k_weight, {eps, weight_offset, cast_before_weight}, row_wise};
  check_q_and_k(call, norms, {"q", q, Access::kWrite}, {"k", k, Access::kWrite});
  check_unit_last_stride(call.op, {{"q", q}, {"k", k}});
  forward(call, norms, q, k, q, k);
}

// The gradients of q, k and the weights; those of the latter two are empty if they are not wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_rope_backward(
    const Tensor& grad_q, const Tensor& grad_k, const Tensor& q, const Tensor& k, std::optional<Tensor> q_weight,
    std::optional<Tensor> k_weight, const Tensor& cos, const Tensor& sin, std::optional<Tensor> position_ids,
    double eps, double weight_offset, bool cast_before_weight, bool row_wise, bool heads_first, bool interleaved,
    std::optional<int64_t> rotary_dim, bool needs_grad_q_weight, bool needs_grad_k_weight) {
  const char* const op = "rms_norm_rope_backward";
  const RopeCall call{op, cos, sin, position_ids, heads_first, interleaved, rotary_dim, true, true};
  const Norms norms{q_weight, k_weight, {eps, weight_offset, cast_before_weight}, row_wise};
  check_tensors(op, {{"grad_q", grad_q},
                     {"grad_k", grad_k},
                     {"q", q},
                     {"k", k},
                     {"q_weight", q_weight},
                     {"k_weight", k_weight},
                     {"cos", cos},
                     {"sin", sin},
                     {"position_ids", position_ids}});
  check_heads(call, {"q", q}, {"k", k});
  check_like(op, {"grad_q", grad_q}, {"q", q});
  check_like(op, {"grad_k", grad_k}, {"k", k});
  Tensor q_out = output_like(q), k_out = output_like(k);
  const Tensor q_in = with_unit_last_stride(grad_q), k_in = with_unit_last_stride(grad_k);
  const Tensor q_x = with_unit_last_stride(q), k_x = with_unit_last_stride(k);
  Prepared prepared = prepare(call, norms, q_in, k_in, q_out, k_out);
  RmsNormRopeParams& params = prepared.params;
  const RopeLayout layout(heads_first);
  const auto set = [&](HeadNorm& norm, const Tensor& x, bool is_wanted) {
    norm.x = x.const_data_ptr();
    norm.x_batch = x.stride(0), norm.x_token = x.stride(layout.tokens), norm.x_head = x.stride(layout.heads);
    const int64_t size = is_wanted ? norm.cols : 0;
    Tensor grad_weight = empty({&size, 1}, q.scalar_type(), q);
    norm.grad_weight = size > 0 ? grad_weight.mutable_data_ptr() : nullptr;
    return grad_weight;
  };
  Tensor grad_q_weight = set(params.q, q_x, needs_grad_q_weight && q_weight);
  Tensor grad_k_weight = set(params.k, k_x, needs_grad_k_weight && k_weight);
  if (q.numel() == 0) aten::zero_(grad_q_weight), params.q.grad_weight = nullptr;
  if (k.numel() == 0) aten::zero_(grad_k_weight), params.k.grad_weight = nullptr;
  if (q.numel() == 0 && k.numel() == 0) return {q_out, k_out, grad_q_weight, grad_k_weight};

  std::optional<Tensor> partials;  // kept until the launch; later uses of the memory are ordered after the kernels
  const auto allocate_partials = [&](ScalarType type) {
    const int64_t of_q = params.q.grad_weight ? params.partial_rows * params.q.cols : 0;
    const int64_t of_k = params.k.grad_weight ? params.partial_rows * params.k.cols : 0;
    if (const int64_t count = of_q + of_k; count > 0) {
      partials = empty({&count, 1}, type, q);
      auto* const bytes = static_cast<char*>(partials->mutable_data_ptr());
      params.q.partials = bytes;
      params.k.partials = bytes + of_q * (type == ScalarType::Double ? sizeof(double) : sizeof(float));
    }
  };
  on_device(op, q, LLMK_CUDA_ONLY([&](auto stream) {
              check_on_gpu(op, params.rope);
              check_cuda(op, kernels::rms_norm_rope_backward_partial_rows(params, prepared.dtype, params.partial_rows));
              allocate_partials(ScalarType::Float);
              return kernels::rms_norm_rope_backward(params, prepared.dtype, stream);
            }),
            [&] {
              check_on_cpu(op, params.rope);
              const int64_t tokens = params.rope.batch * params.rope.tokens;
              params.partial_rows = std::min<int64_t>(tokens, 64);
              allocate_partials(prepared.dtype == Dtype::kFloat64 ? ScalarType::Double : ScalarType::Float);
              parallel_for(
                  params.partial_rows, tokens / params.partial_rows * elements_per_token(params.rope),
                  [&](int64_t begin, int64_t end) { cpu::rms_norm_rope_backward(params, prepared.dtype, begin, end); });
              for (const HeadNorm* norm : {&params.q, &params.k}) {
                if (!norm->grad_weight) continue;
                parallel_for(norm->cols, params.partial_rows, [&](int64_t begin, int64_t end) {
                  cpu::rms_norm_rope_grad_weight(*norm, params.partial_rows, prepared.dtype, begin, end);
                });
              }
            });
  return {q_out, k_out, grad_q_weight, grad_k_weight};
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "rms_norm_rope", TORCH_BOX(&rms_norm_rope));
  ops.impl("rms_norm_rope_", TORCH_BOX(&rms_norm_rope_));
  ops.impl("rms_norm_rope_backward", TORCH_BOX(&rms_norm_rope_backward));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
