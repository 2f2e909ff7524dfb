// rope, rope_ and rope_backward.
#include "rope_call.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

void check_q_and_k(const RopeCall& call, const Argument& q, const Argument& k) {
  check_tensors(call.op, {q, k, {"cos", call.cos}, {"sin", call.sin}, {"position_ids", call.position_ids}});
  check_heads(call, q, k);
}

void run(const RopeCall& call, const Tensor& q, const Tensor& k, const Tensor& q_out, const Tensor& k_out) {
  const Dtype dtype = to_dtype(call.op, {"q", q});
  const RopeArguments arguments = make_rope_arguments(call, q, k, q_out, k_out);
  const RopeParams& params = arguments.params;
  if (q.numel() == 0 && k.numel() == 0) return;
  on_device(call.op, q, LLMK_CUDA_ONLY([&](auto stream) {
              check_on_gpu(call.op, params);
              return kernels::rope(params, dtype, stream);
            }),
            [&] {
              check_on_cpu(call.op, params);
              parallel_for(params.batch * params.tokens, (params.q.heads + params.k.heads) * params.head_dim,
                           [&](int64_t begin, int64_t end) { cpu::rope(params, dtype, begin, end); });
            });
}

std::tuple<Tensor, Tensor> out_of_place(const RopeCall& call, const Argument& given_q, const Argument& given_k) {
  check_q_and_k(call, given_q, given_k);
  const Tensor &q = *given_q, &k = *given_k;
  Tensor q_out = output_like(q), k_out = output_like(k);
  run(call, with_unit_last_stride(q), with_unit_last_stride(k), q_out, k_out);
  return {q_out, k_out};
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                std::optional<Tensor> position_ids, bool heads_first, bool interleaved,
                                std::optional<int64_t> rotary_dim) {
  return out_of_place({"rope", cos, sin, position_ids, heads_first, interleaved, rotary_dim}, {"q", q}, {"k", k});
}

std::tuple<Tensor, Tensor> rope_backward(const Tensor& grad_q, const Tensor& grad_k, const Tensor& cos,
                                         const Tensor& sin, std::optional<Tensor> position_ids, bool heads_first,
                                         bool interleaved, std::optional<int64_t> rotary_dim) {
  return out_of_place({"rope_backward", cos, sin, position_ids, heads_first, interleaved, rotary_dim, true},
                      {"grad_q", grad_q}, {"grad_k", grad_k});
}

void rope_(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, std::optional<Tensor> position_ids,
           bool heads_first, bool interleaved, std::optional<int64_t> rotary_dim) {
  const RopeCall call{"rope_", cos, sin, position_ids, heads_first, interleaved, rotary_dim};
  check_q_and_k(call, {"q", q, Access::kWrite}, {"k", k, Access::kWrite});
  check_unit_last_stride(call.op, {{"q", q}, {"k", k}});
  run(call, q, k, q, k);
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "rope", TORCH_BOX(&rope));
  ops.impl("rope_", TORCH_BOX(&rope_));
  ops.impl("rope_backward", TORCH_BOX(&rope_backward));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
