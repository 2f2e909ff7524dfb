// fp8_quantize, alone and after RMSNorm or SwiGLU.
#include "cpu/fp8.h"

#include "backend.h"
#include "fp8_arithmetic.h"
#include "parts.h"
#if LLMK_CUDA
#include "kernels/quant/fp8.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;
using Quantized = std::tuple<Tensor, Tensor>;

struct Options {
  const char* op;
  std::string granularity, fp8_dtype;
  bool power_of_two;

  bool per_tensor() const { return granularity == "tensor"; }
};

void check(const Options& options, const Argument& x) {
  const char* const op = options.op;
  const std::string& granularity = options.granularity;
  LLMK_CHECK(granularity == "token" || granularity == "block" || granularity == "tensor", op,
             "granularity must be 'token', 'block' or 'tensor', got '", granularity, "'");
  LLMK_CHECK(options.fp8_dtype == "float8_e4m3fn" || options.fp8_dtype == "float8_e5m2", op,
             "fp8_dtype must be float8_e4m3fn or float8_e5m2, got ", options.fp8_dtype);
  to_dtype(op, x);
  LLMK_CHECK(x->dim() >= 1, op, x.name, " must have at least one dimension, got a scalar");
}

// The scales: (), (..., 1), or (..., blocks) where those of a block are next to each other, row by row.
Tensor empty_scale(const Options& options, IntHeaderOnlyArrayRef sizes, const Tensor& like) {
  if (options.per_tensor()) return empty({}, ScalarType::Float, like);
  std::vector<int64_t> shape(sizes.begin(), sizes.end()), strides(sizes.size());
  const bool by_block = options.granularity == "block";
  int64_t& groups = shape.back();
  groups = by_block ? fp8::groups_per_row(groups, fp8::kBlock) : 1;
  int64_t rows = 1;
  for (size_t i = sizes.size() - 1; i-- > 0; rows *= std::max<int64_t>(1, sizes[i])) strides[i] = rows;
  strides.back() = by_block ? rows : 1;
  return aten::empty_strided(shape, strides.data(), dtype_code(ScalarType::Float), like);
}

// q and scale, uninitialised, for an input of these sizes, and where they are.
struct Output {
  Tensor q, scale;
  Fp8Output params;

  Output(const Options& options, IntHeaderOnlyArrayRef sizes, const Tensor& like)
      : q(empty(sizes, options.fp8_dtype == "float8_e5m2" ? ScalarType::Float8_e5m2 : ScalarType::Float8_e4m3fn, like)),
        scale(empty_scale(options, sizes, like)) {
    const int64_t cols = sizes[sizes.size() - 1], rows = q.numel() / std::max<int64_t>(1, cols);
    const bool by_block = options.granularity == "block";
    params = {q.mutable_data_ptr(),
              static_cast<float*>(scale.mutable_data_ptr()),
              rows,
              cols,
              by_block ? fp8::kBlock : std::max<int64_t>(1, cols),
              options.per_tensor() ? 0 : 1,
              by_block ? rows : 0,
              options.fp8_dtype == "float8_e5m2" ? Fp8Format::kE5M2 : Fp8Format::kE4M3,
              options.power_of_two};
  }

  // Of an input without elements: what zeros have.
  Quantized without_elements() {
    const float of_nothing = fp8::scale_of(0.f, params.format, params.power_of_two);
    if (scale.numel() > 0 && !is_meta(scale)) aten::fill_(scale, of_nothing);
    return {q, scale};
  }
};

Quantized quantize_tensor(const Options& options, const Tensor& x, Output& out, const Fp8QuantizeParams& params,
                          Dtype dtype) {
#if LLMK_CUDA
  std::optional<Tensor> partials;
  int64_t count = 0;
  if (x.is_cuda()) {
    on_device(
        options.op, x, [&](auto) { return kernels::fp8_tensor_partials(params, count); }, [] {});
    partials = empty({&count, 1}, ScalarType::Float, x);
  }
#endif
  on_device(options.op, x, LLMK_CUDA_ONLY([&](auto stream) {
              return kernels::fp8_quantize_tensor(params, static_cast<float*>(partials->mutable_data_ptr()), count,
                                                  dtype, stream);
            }),
            [&] {
              const int64_t rows = params.out.rows;
              std::vector<float> amax(rows);
              parallel_for(rows, params.out.cols,
                           [&](int64_t begin, int64_t end) { cpu::fp8_amax(params, dtype, amax.data(), begin, end); });
              float most = 0.f;
              for (const float value : amax) most = value > most || std::isnan(value) ? value : most;
              *params.out.scale = fp8::scale_of(most, params.out.format, params.out.power_of_two);
              parallel_for(rows, params.out.cols,
                           [&](int64_t begin, int64_t end) { cpu::fp8_quantize_tensor(params, dtype, begin, end); });
            });
  return {out.q, out.scale};
}

Quantized quantize(const Options& options, const Tensor& x) {
  Output out(options, x.sizes(), x);
  if (x.numel() == 0) return out.without_elements();
  const Dtype dtype = to_dtype(options.op, {"x", x});
  const Rows rows = as_rows(x);
  const Fp8QuantizeParams params{
      .x = rows.data(), .up = nullptr, .x_stride = rows.stride, .up_stride = 0, .out = out.params};
  if (options.per_tensor()) return quantize_tensor(options, x, out, params, dtype);
  on_device(options.op, x, LLMK_CUDA_ONLY([&](auto stream) { return kernels::fp8_quantize(params, dtype, stream); }),
            [&] {
              parallel_for(params.out.rows, params.out.cols,
                           [&](int64_t begin, int64_t end) { cpu::fp8_quantize(params, dtype, begin, end); });
            });
  return {out.q, out.scale};
}

Quantized fp8_quantize(const Tensor& x, std::string granularity, std::string fp8_dtype, bool power_of_two) {
  const Options options{"fp8_quantize", granularity, fp8_dtype, power_of_two};
  check_tensors(options.op, {{"x", x}});
  check(options, {"x", x});
  return quantize(options, x);
}

Quantized rms_norm_fp8_quantize(const Tensor& x, std::optional<Tensor> weight, double eps, double weight_offset,
                                bool cast_before_weight, std::string granularity, std::string fp8_dtype,
                                bool power_of_two) {
  const Options options{"rms_norm_fp8_quantize", granularity, fp8_dtype, power_of_two};
  const RmsNormOptions norm{eps, weight_offset, cast_before_weight};
  check_tensors(options.op, {{"x", x}, {"weight", weight}});
  check(options, {"x", x});
  check_options(options.op, norm);
  check_vector(options.op, {"weight", weight}, {"x", x}, x.size(x.dim() - 1), "x.size(-1)");
#if LLMK_CUDA
  if (x.is_cuda() && x.numel() > 0 && !options.per_tensor()) {
    const Dtype dtype = to_dtype(options.op, {"x", x});
    const Rows rows = as_rows(x);
    const auto contiguous = weight ? std::optional(with_unit_last_stride(*weight)) : std::nullopt;
    const NormParams params{.x = rows.data(),
                            .weight = data(contiguous),
                            .rows = rows.rows,
                            .cols = rows.cols,
                            .x_stride = rows.stride,
                            .options = norm};
    if (kernels::fp8_quantize_fuses_rms_norm(params, dtype)) {
      Output out(options, x.sizes(), x);
      on_device(
          options.op, x, [&](auto stream) { return kernels::rms_norm_fp8_quantize(params, out.params, dtype, stream); },
          [] {});
      return {out.q, out.scale};
    }
  }
#endif
  if (x.numel() == 0 || is_meta(x)) return quantize(options, x);
  return quantize(options, rms_norm_between(x, weight, norm));
}

#if LLMK_CUDA
// gate and up as they are read: two tensors, or the halves of one.
struct GateUp {
  Rows gate;
  std::optional<Rows> up;

  GateUp(const Tensor& gate, const std::optional<Tensor>& up)
      : gate(as_rows(gate)), up(up ? std::optional(as_rows(*up)) : std::nullopt) {}

  Fp8QuantizeParams params(const Fp8Output& out) const {
    const void* const second = static_cast<const char*>(gate.data()) + out.cols * gate.tensor.element_size();
    return {gate.data(), up ? up->data() : second, gate.stride, up ? up->stride : gate.stride, out};
  }
};
#endif

Quantized swiglu_fp8_quantize(const Tensor& gate, std::optional<Tensor> up, std::string granularity,
                              std::string fp8_dtype, bool power_of_two) {
  const Options options{"swiglu_fp8_quantize", granularity, fp8_dtype, power_of_two};
  check_tensors(options.op, {{"gate", gate}, {"up", up}});
  check(options, {"gate", gate});
  if (up) check_like(options.op, {"up", *up}, {"gate", gate});
  LLMK_CHECK(up || gate.size(gate.dim() - 1) % 2 == 0, options.op,
             "gate must have an even last dimension, [gate | up], without up, got shape ", shape(gate));
  std::vector<int64_t> sizes(gate.sizes().begin(), gate.sizes().end());
  if (!up) sizes.back() /= 2;
  if (gate.numel() == 0 || is_meta(gate)) return Output(options, sizes, gate).without_elements();
#if LLMK_CUDA
  if (gate.is_cuda() && !options.per_tensor()) {
    const Dtype dtype = to_dtype(options.op, {"gate", gate});
    const Output out(options, sizes, gate);
    const GateUp rows(gate, up);
    const Fp8QuantizeParams params = rows.params(out.params);
    if (kernels::fp8_quantize_fuses_swiglu(params, dtype)) {
      on_device(
          options.op, gate, [&](auto stream) { return kernels::fp8_quantize(params, dtype, stream); }, [] {});
      return {out.q, out.scale};
    }
  }
#endif
  constexpr Activation silu = Activation::kSilu;
  return quantize(options, up ? glu(options.op, gate, *up, silu) : glu_packed(options.op, gate, silu));
}

void register_ops(StableLibrary& ops) {
  ops.impl("fp8_quantize", TORCH_BOX(&fp8_quantize));
  ops.impl("rms_norm_fp8_quantize", TORCH_BOX(&rms_norm_fp8_quantize));
  ops.impl("swiglu_fp8_quantize", TORCH_BOX(&swiglu_fp8_quantize));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
