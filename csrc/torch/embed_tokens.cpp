// embed_tokens_: the beginning of a forward.
#include "cpu/embed_tokens.h"
#include "backend.h"
#if LLMK_CUDA
#include "kernels/embedding/embed_tokens.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

constexpr const char* kOp = "embed_tokens_";

// (rows, sequences) int32, contiguous.
void check_counts(const Argument& argument) {
  LLMK_CHECK(argument->scalar_type() == ScalarType::Int, kOp, argument.name, " must be int32, got ",
             name(argument->scalar_type()));
  LLMK_CHECK(argument->dim() == 2 && argument->is_contiguous(), kOp, argument.name,
             " must be a contiguous matrix, got shape ", shape(*argument), " with strides ", text(argument->strides()));
}

void embed_tokens_(const Tensor& hidden, const Tensor& embedding, const Tensor& ids, double scale,
                   std::optional<Tensor> given_counters, int64_t advance, std::optional<Tensor> given_positions,
                   int64_t max_position, bool accumulate) {
  const Argument counters("counters", given_counters, Access::kWrite),
      positions("positions", given_positions, Access::kWrite);
  check_tensors(kOp, {{"hidden", hidden, Access::kWrite}, {"embedding", embedding}, {"ids", ids}, counters, positions});
  const Dtype dtype = to_dtype(kOp, {"hidden", hidden});
  check_dtype(kOp, {"embedding", embedding}, {"hidden", hidden});
  LLMK_CHECK(embedding.dim() == 2, kOp, "embedding must have shape (tokens, columns), got ", shape(embedding));
  const int64_t cols = embedding.size(1), count = ids.numel();
  LLMK_CHECK(hidden.dim() == 2 && hidden.size(0) == count && hidden.size(1) == cols, kOp, "hidden must have shape [",
             count, ", ", cols, "] (a row for each of ids, columns of embedding), got ", shape(hidden));
  check_rows_in_place(kOp, {"hidden", hidden, Access::kWrite});
  const ScalarType type = ids.scalar_type();
  LLMK_CHECK(type == ScalarType::Int || type == ScalarType::Long, kOp, "ids must be int32 or int64, got ", name(type));
  check_finite(kOp, "scale", scale);
  int64_t batch = 0;
  if (counters) {
    check_counts(counters);
    batch = counters->size(1);
    LLMK_CHECK(counters->size(0) > 0, kOp, "counters must have a row, got shape ", shape(*counters));
    LLMK_CHECK(advance >= 0 && advance <= INT32_MAX, kOp, "advance must be from 0 to 2^31 - 1, got ", advance);
  }
  LLMK_CHECK(max_position >= 0 && max_position <= INT32_MAX, kOp, "max_position must be from 0 to 2^31 - 1, got ",
             max_position);
  if (positions) {
    check_counts(positions);
    LLMK_CHECK(static_cast<bool>(counters), kOp, "positions must come with counters");
    LLMK_CHECK(positions->size(0) == batch && positions->numel() == count, kOp, "positions must have shape [", batch,
               ", tokens], as many as ids, ", count, ", got ", shape(*positions));
  }
  const Rows from = as_rows(embedding), to = as_rows(hidden);
  const Tensor flat = ids.is_contiguous() ? ids : aten::contiguous(ids);
  const EmbedTokensParams params{
      .embedding = from.data(),
      .ids = flat.const_data_ptr(),
      .hidden = hidden.mutable_data_ptr(),
      .rows = count,
      .cols = cols,
      .vocab = embedding.size(0),
      .embedding_stride = from.stride,
      .hidden_stride = to.stride,
      .scale = scale,
      .ids_int64 = type == ScalarType::Long,
      .accumulate = accumulate,
      .counters = counters ? static_cast<int32_t*>(counters->mutable_data_ptr()) : nullptr,
      .counts = counters ? counters->size(0) : 0,
      .batch = batch,
      .advance = static_cast<int32_t>(advance),
      .positions = positions ? static_cast<int32_t*>(positions->mutable_data_ptr()) : nullptr,
      .tokens = positions ? positions->size(1) : 0,
      .max_position = static_cast<int32_t>(max_position)};
  on_device(kOp, hidden, LLMK_CUDA_ONLY([&](auto stream) { return kernels::embed_tokens(params, dtype, stream); }),
            [&] {
              parallel_for(params.rows, params.cols,
                           [&](int64_t begin, int64_t end) { cpu::embed_rows(params, dtype, begin, end); });
              if (params.counters) cpu::count_tokens(params);
            });
}

void register_ops(StableLibrary& ops) { ops.impl("embed_tokens_", TORCH_BOX(&embed_tokens_)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
