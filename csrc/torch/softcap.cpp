// scale_softcap: of logits.
#include "cpu/softcap.h"
#include "backend.h"
#if LLMK_CUDA
#include "kernels/activation/softcap.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

Tensor scale_softcap(const Tensor& logits, double scale, double softcap) {
  constexpr const char* op = "scale_softcap";
  check_tensors(op, {{"logits", logits}});
  const Dtype dtype = to_dtype(op, {"logits", logits});
  LLMK_CHECK(logits.dim() >= 1, op, "logits must have at least one dimension, got a scalar");
  check_finite(op, "scale", scale);
  check_not_negative(op, "softcap", softcap);
  Tensor y = empty_rows(logits);
  if (logits.numel() == 0) return y;
  const Rows rows = as_rows(logits);
  const SoftcapParams params{.x = rows.data(),
                             .y = y.mutable_data_ptr(),
                             .rows = rows.rows,
                             .cols = rows.cols,
                             .x_stride = rows.stride,
                             .scale = scale,
                             .softcap = softcap};
  on_device(op, logits, LLMK_CUDA_ONLY([&](auto stream) { return kernels::scale_softcap(params, dtype, stream); }),
            [&] {
              parallel_for(params.rows * params.cols, 1,
                           [&](int64_t begin, int64_t end) { cpu::scale_softcap(params, dtype, begin, end); });
            });
  return y;
}

void register_ops(StableLibrary& ops) { ops.impl("scale_softcap", TORCH_BOX(&scale_softcap)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
