// sample.
#include "cpu/sampling.h"
#include "backend.h"
#include "sampling_arithmetic.h"
#if LLMK_CUDA
#include "kernels/sampling/sample.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// A parameter of every row: the tensor, contiguous, if there is one, else the value.
template <typename T>
struct RowParameter {
  std::optional<Tensor> tensor;
  T value;

  PerRow<T> per_row() const { return {static_cast<const T*>(data(tensor)), value}; }
};

template <typename T>
RowParameter<T> check_parameter(const char* name, const std::optional<Tensor>& given, T value, const Tensor& logits) {
  constexpr const char* op = "sample";
  if (!given) return {std::nullopt, value};
  constexpr ScalarType type = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Int;
  LLMK_CHECK(given->scalar_type() == type, op, name, " must be ", llmk::name(type), ", got ",
             llmk::name(given->scalar_type()));
  LLMK_CHECK(given->dim() == 1 && given->size(0) == logits.size(0), op, name, " must have shape [", logits.size(0),
             "] (logits.size(0)), got ", shape(*given));
  return {with_unit_last_stride(*given), value};
}

Tensor sample(const Tensor& logits, std::optional<Tensor> temperature, std::optional<Tensor> top_k,
              std::optional<Tensor> top_p, std::optional<Tensor> min_p, std::optional<Tensor> repetition_penalty,
              std::optional<Tensor> seen, Tensor rng_state, double temperature_value, int64_t top_k_value,
              double top_p_value, double min_p_value, double repetition_penalty_value) {
  constexpr const char* op = "sample";
  check_tensors(op, {{"logits", logits},
                     {"temperature", temperature},
                     {"top_k", top_k},
                     {"top_p", top_p},
                     {"min_p", min_p},
                     {"repetition_penalty", repetition_penalty},
                     {"seen", seen, Access::kWrite},
                     {"rng_state", rng_state, Access::kWrite}});
  const Dtype dtype = to_dtype(op, {"logits", logits});
  LLMK_CHECK(logits.dim() == 2, op, "logits must have shape [rows, vocab], got ", shape(logits));
  const int64_t count = logits.size(0), vocab = logits.size(1);
  LLMK_CHECK(vocab >= 1 && vocab <= sampling::kMaxVocab, op, "logits must have from 1 to ", sampling::kMaxVocab,
             " columns, got ", vocab);
  LLMK_CHECK(count <= sampling::kMaxRows, op, "logits must have at most ", sampling::kMaxRows, " rows, got ", count);
  LLMK_CHECK(temperature_value >= 0, op, "temperature must be at least 0, got ", temperature_value);
  LLMK_CHECK(top_k_value >= 0, op, "top_k must be at least 0, got ", top_k_value);
  LLMK_CHECK(top_p_value > 0 && top_p_value <= 1, op, "top_p must be in (0, 1], got ", top_p_value);
  LLMK_CHECK(min_p_value >= 0 && min_p_value <= 1, op, "min_p must be in [0, 1], got ", min_p_value);
  const auto penalty_value = static_cast<float>(repetition_penalty_value);  // 1e-50 is 0, and 1e50 infinite
  LLMK_CHECK(penalty_value > 0 && std::isfinite(penalty_value), op,
             "repetition_penalty must be positive and finite, got ", repetition_penalty_value);
  LLMK_CHECK(rng_state.scalar_type() == ScalarType::Long && rng_state.dim() == 1 && rng_state.size(0) == 2 &&
                 rng_state.stride(0) == 1,
             op, "rng_state must be a contiguous Long tensor of shape [2], got ", name(rng_state.scalar_type()), " ",
             shape(rng_state));
  if (seen) {
    const ScalarType type = seen->scalar_type();
    LLMK_CHECK(type == ScalarType::Bool || type == ScalarType::Byte, op, "seen must be Bool or Byte, got ", name(type));
    LLMK_CHECK(seen->sizes().equals(logits.sizes()), op, "seen must have the shape of logits, ", shape(logits),
               ", got ", shape(*seen));
    LLMK_CHECK(has_unit_last_stride(*seen), op, "seen must have contiguous rows, got stride ", seen->stride(1));
  }
  const auto temperatures = check_parameter("temperature", temperature, static_cast<float>(temperature_value), logits);
  const auto top_ks =
      check_parameter("top_k", top_k, static_cast<int32_t>(std::min<int64_t>(top_k_value, INT32_MAX)), logits);
  const auto top_ps = check_parameter("top_p", top_p, static_cast<float>(top_p_value), logits);
  const auto min_ps = check_parameter("min_p", min_p, static_cast<float>(min_p_value), logits);
  const auto penalties = check_parameter("repetition_penalty", repetition_penalty, penalty_value, logits);
  Tensor tokens = empty({&count, 1}, ScalarType::Long, logits);
  if (count == 0) return tokens;

  const Rows rows = as_rows(logits);
  const SamplingParams params{.logits = rows.data(),
                              .temperature = temperatures.per_row(),
                              .top_k = top_ks.per_row(),
                              .top_p = top_ps.per_row(),
                              .min_p = min_ps.per_row(),
                              .repetition_penalty = penalties.per_row(),
                              .seen = seen ? static_cast<uint8_t*>(seen->mutable_data_ptr()) : nullptr,
                              .rng_state = static_cast<int64_t*>(rng_state.mutable_data_ptr()),
                              .tokens = static_cast<int64_t*>(tokens.mutable_data_ptr()),
                              .rows = count,
                              .vocab = vocab,
                              .logits_stride = rows.stride,
                              .seen_stride = seen ? seen->stride(0) : 0};
  on_device(op, logits, LLMK_CUDA_ONLY([&](auto stream) { return kernels::sample(params, dtype, stream); }), [&] {
    parallel_for(count, 8 * vocab, [&](int64_t begin, int64_t end) { cpu::sample(params, dtype, begin, end); });
    params.rng_state[1] = (params.rng_state[1] + 1) & sampling::kOffsetMask;
  });
  return tokens;
}

void register_ops(StableLibrary& ops) { ops.impl("sample", TORCH_BOX(&sample)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
