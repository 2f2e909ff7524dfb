// linear, glu_linear, both behind an RMSNorm, and linear_add_: one of the library's kernels, or PyTorch's linear
// (cuBLAS, MKL) and the library's other ops, as kernels/linear/route.h has it.
#include "backend.h"
#if LLMK_CUDA
#include "kernels/linear/linear.h"
#endif
#include "matrix.h"
#include "params/linear.h"
#include "parts.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// The norm hand-off (params/linear.h): for the linear after the next norm linear_add_scale_ writes the new residual
// times the norm's weight, and sums of its squares. This saves the norm's launch.
struct Scaled {
  Tensor x, squares;
  int parts;
};

// x, or on a GPU, where its rows lie at no constant distance, a copy, which kernels and library then share.
Tensor rows_once(const Tensor& x) { return x.is_cuda() ? as_rows(x).tensor : x; }

// PyTorch's linear, on x as a matrix. A dimension of size 1 may have any stride, which cuBLAS would use.
Tensor library_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (x.numel() == 0) return aten::linear(x, weight, bias);
  const Rows rows = as_rows(x);
  const Tensor matrix = view(rows.tensor, {rows.rows, rows.cols}, {rows.rows > 1 ? rows.stride : rows.cols, 1}, 0);
  const Tensor y = aten::linear(matrix, weight, bias);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(sizes.size());
  sizes.back() = weight.size(0);
  for (int64_t i = x.dim() - 1, stride = 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  return view(y, sizes, strides, 0);
}

// The weight in the dtype of x.
Tensor dequantized(const Linear& f, const Tensor& x) {
  if (!f.weight_scale) return f.weight;
  const int64_t rows = f.weight.size(0);
  Tensor scale = *f.weight_scale;
  if (x.scalar_type() == ScalarType::Double) {
    scale = empty({&rows, 1}, ScalarType::Double, x);
    aten::copy_(scale, *f.weight_scale);
  }
  const Tensor weight = empty(f.weight.sizes(), x.scalar_type(), x);
  aten::mul_out(weight, f.weight, view(scale, {rows, 1}, {1, 1}, 0));
  return weight;
}

// The shape of the result.
std::vector<int64_t> result_shape(const Tensor& x, const Linear& f) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = f.glu ? f.weight.size(0) / 2 : f.weight.size(0);
  return sizes;
}

void check(const Tensor& x, const Linear& f) {
  const char* const op = f.op;
  to_dtype(op, {"x", x});
  LLMK_CHECK(x.dim() >= 1, op, "x must have at least one dimension, got a scalar");
  check_dtype(op, {"weight", f.weight}, {"x", x});
  const int64_t k = x.size(x.dim() - 1);
  LLMK_CHECK(f.weight.dim() == 2 && f.weight.size(1) == k, op, "weight must have shape [N, ", k, "] (x.size(-1)), got ",
             shape(f.weight));
  check_vector(op, {"bias", f.bias}, {"x", x}, f.weight.size(0), "weight.size(0)");
  if (f.norm) {
    check_vector(op, {"norm_weight", f.norm->weight}, {"x", x}, k, "x.size(-1)");
    check_options(op, f.norm->options);
  }
  LLMK_CHECK(!f.glu || f.weight.size(0) % 2 == 0, op,
             "weight must have an even number of rows, [gate | up], got shape ", shape(f.weight));
}

// The hand-off that linear_add_scale_ has returned for x; nothing where it made none.
std::optional<Scaled> check_handoff(const Tensor& x, const Linear& f, const std::optional<Tensor>& scaled,
                                    const std::optional<Tensor>& squares) {
  LLMK_CHECK(scaled.has_value() == squares.has_value(), f.op, scaled ? "squares" : "scaled", " must be given with ",
             scaled ? "scaled" : "squares");
  if (!scaled || (scaled->numel() == 0 && squares->numel() == 0)) return std::nullopt;
  check_dtype(f.op, {"scaled", *scaled}, {"x", x});
  const int64_t cols = x.size(x.dim() - 1), rows = cols > 0 ? x.numel() / cols : 0;
  LLMK_CHECK(scaled->dim() == 2 && scaled->size(0) == rows && scaled->size(1) == cols && scaled->is_contiguous(), f.op,
             "scaled must be contiguous, of shape [", rows, ", ", cols, "] (the rows of x), got ", shape(*scaled));
  LLMK_CHECK(squares->scalar_type() == ScalarType::Float, f.op, "squares must be float32, got ",
             name(squares->scalar_type()));
  LLMK_CHECK(
      squares->dim() == 2 && squares->size(0) > 1 && squares->size(1) == kHandoffTokens && squares->is_contiguous(),
      f.op, "squares must be contiguous, of shape [parts + 1, ", kHandoffTokens, "], got ", shape(*squares));
  return Scaled{*scaled, *squares, static_cast<int>(squares->size(0) - 1)};
}

#if LLMK_CUDA
Weight weight_of(const Linear& f) {
  const int64_t rows = f.weight.size(0), cols = f.weight.size(1);
  return {.data = f.weight.const_data_ptr(),
          .type = f.weight_scale ? ElementType::kInt8 : element_type(to_dtype(f.op, {"weight", f.weight})),
          .rows = rows,
          .cols = cols,
          .stride = rows > 1 ? f.weight.stride(0) : cols,
          .scales = static_cast<const float*>(data(f.weight_scale))};
}

// What the kernels take of a linear, except for x and the result.
LinearParams params_of(const Linear& f, int64_t rows) {
  LinearParams params{};
  if (f.norm) {
    params.normalize = true;
    params.norm_weight = data(f.norm->weight);
    params.norm = f.norm->options;
  }
  params.weight = weight_of(f);
  params.m = rows;
  params.x_stride = params.k();
  params.epilogue.bias = data(f.bias);
  params.epilogue.glu = f.glu.has_value();
  if (f.glu) params.epilogue.activation = *f.glu;
  params.in_step = f.in_step;
  return params;
}

LinearParams params_of(const Linear& f, const Rows& x) {
  LinearParams params = params_of(f, x.rows);
  params.x = x.data();
  params.x_stride = x.stride;
  return params;
}

// What the route depends on.
kernels::LinearProblem problem_of(const Linear& f, const LinearParams& params, const Tensor& x) {
  const auto unit = [](const std::optional<Tensor>& t) { return !t || has_unit_last_stride(*t); };
  kernels::LinearProblem problem = kernels::problem_of(params, to_dtype(f.op, {"x", x}));
  problem.in_rows = unit(f.weight) && unit(f.bias);
  problem.norm_weight_aligned = problem.norm_weight_aligned && (!f.norm || unit(f.norm->weight));
  return problem;
}

// Launches what the route says, which is not the library.
cudaError_t run(LinearParams params, const kernels::LinearRoute& route, const Tensor& x, const Linear& f,
                cudaStream_t stream) {
  std::optional<Tensor> workspace;  // later uses of the memory are ordered after the kernels
  if (const auto bytes = static_cast<int64_t>(route.workspace_bytes); bytes > 0) {
    workspace = empty({&bytes, 1}, ScalarType::Byte, x);
    params.workspace = workspace->mutable_data_ptr();
  }
  return kernels::linear(params, route, to_dtype(f.op, {"x", x}), stream);
}

// The result by a kernel; nothing where the library is the route, or x is a sum that the kernel does not compute.
std::optional<Tensor> try_linear(const Tensor& x, const Linear& f, const std::optional<Scaled>& scaled,
                                 const NormParams* sum = nullptr) {
  if (!x.is_cuda() || x.numel() == 0 || f.weight.numel() == 0) return std::nullopt;
  const std::vector<int64_t> sizes = result_shape(x, f);
  const Rows rows = as_rows(x);
  LinearParams params = params_of(f, rows);
  params.epilogue.y_stride = sizes.back();
  if (scaled && kernels::linear_takes_handoff(params.m)) {
    params.x = scaled->x.const_data_ptr();
    params.x_stride = params.k();
    params.squares = static_cast<const float*>(scaled->squares.const_data_ptr());
    params.parts = scaled->parts;
  }
  params.sum = sum;
  std::optional<Tensor> y, normalized;
  on_device(
      f.op, x,
      [&](auto stream) {
        const kernels::LinearRoute route = kernels::route_linear(problem_of(f, params, x));
        if (route.variant == kernels::LinearVariant::kLibrary || route.sum_first) return cudaSuccess;
        if (route.norm_first && route.workspace_bytes == 0) {
          normalized = rms_norm_between(x, f.norm->weight, f.norm->options);
          params.x = normalized->const_data_ptr();
          params.x_stride = params.k();
          params.normalize = false;
          params.parts = 0;
        }
        y = empty(sizes, x.scalar_type(), x);
        params.epilogue.y = y->mutable_data_ptr();
        return run(params, route, x, f, stream);
      },
      [] {});
  return y;
}

// Allocates the tensors of the norm hand-off to `next` (params/linear.h), if `next` takes it.
std::optional<Scaled> prepare_handoff(LinearParams& params, const kernels::LinearRoute& route, const Linear& next,
                                      const Tensor& like) {
  const LinearParams then = params_of(next, params.m);
  const int parts = kernels::linear_parts(route, problem_of(next, then, like));
  if (parts == 0) return std::nullopt;
  Scaled result{empty({params.m, params.n()}, like.scalar_type(), like),
                empty({parts + 1, kHandoffTokens}, ScalarType::Float, like), parts};
  params.epilogue.next_norm_weight = then.norm_weight;
  params.epilogue.next_offset = static_cast<float>(then.norm.weight_offset);
  params.epilogue.scaled = result.x.mutable_data_ptr();
  params.epilogue.squares = static_cast<float*>(result.squares.mutable_data_ptr());
  return result;
}

// Whether a kernel has added to the residual, and its hand-off to `next`.
std::pair<bool, std::optional<Scaled>> try_linear_add(const Rows& residual, const Tensor& x, const Linear& f,
                                                      double alpha, const Linear* next) {
  if (x.numel() == 0) return {false, std::nullopt};
  LinearParams params = params_of(f, as_rows(x));
  params.epilogue.y = residual.tensor.mutable_data_ptr();
  params.epilogue.y_stride = residual.stride;
  params.epilogue.add_residual = true;
  params.epilogue.alpha = static_cast<float>(alpha);
  bool done = false;
  std::optional<Scaled> scaled;
  on_device(
      f.op, x,
      [&](auto stream) {
        const kernels::LinearRoute route = kernels::route_linear(problem_of(f, params, x));
        if (route.variant == kernels::LinearVariant::kLibrary) return cudaSuccess;
        if (next) scaled = prepare_handoff(params, route, *next, x);
        done = true;
        return run(params, route, x, f, stream);
      },
      [] {});
  return {done, scaled};
}
#endif

// `scaled`: from the linear_add_ that made x, if this linear was its `next`.
Tensor linear(const Tensor& given, const Linear& f, [[maybe_unused]] const std::optional<Scaled>& scaled) {
  const Tensor x = rows_once(given);
#if LLMK_CUDA
  if (const std::optional<Tensor> y = try_linear(x, f, scaled)) return *y;
#endif
  if (is_meta(x)) return empty(result_shape(x, f), x.scalar_type(), x);
  const Tensor normalized = f.norm ? rms_norm_between(x, f.norm->weight, f.norm->options) : x;
  const Tensor y = library_linear(normalized, dequantized(f, x), f.bias);
  return f.glu ? glu_packed(f.op, y, *f.glu) : y;
}

// residual += alpha (x weight^T + bias). `next`: the linear after the next norm, for a hand-off.
std::optional<Scaled> linear_add_(Tensor residual, const Tensor& given, const Linear& f, double alpha,
                                  [[maybe_unused]] const Linear* next = nullptr) {
  if (residual.numel() == 0 || is_meta(residual)) return std::nullopt;
  const Tensor x = rows_once(given);
#if LLMK_CUDA
  // A residual that is not rows at a constant distance would be added to in a copy.
  if (const Rows rows = as_rows(residual); x.is_cuda() && rows.tensor.get() == residual.get()) {
    if (const auto [done, scaled] = try_linear_add(rows, x, f, alpha, next); done) return scaled;
    if (!f.bias) {
      const Tensor sums = matrix(residual, rows.rows, rows.cols, rows.stride);
      // Added by the product, before it is rounded.
      aten::addmm_out(sums, sums, matrix(x), transposed(dequantized(f, x)), alpha);
      return std::nullopt;
    }
  }
#endif
  const Tensor y = library_linear(x, dequantized(f, x), f.bias);
  if (alpha != 1) aten::mul_(y, alpha);
  aten::add_(residual, y);
  return std::nullopt;
}

Tensor checked_linear(const Tensor& x, const Linear& f, const std::optional<Tensor>& scaled = std::nullopt,
                      const std::optional<Tensor>& squares = std::nullopt) {
  const std::optional<Tensor> norm_weight = f.norm ? f.norm->weight : std::nullopt;
  check_tensors(f.op, {{"x", x},
                       {"norm_weight", norm_weight},
                       {"weight", f.weight},
                       {"bias", f.bias},
                       {"scaled", scaled},
                       {"squares", squares}});
  check(x, f);
  return linear(x, f, check_handoff(x, f, scaled, squares));
}

Tensor linear_op(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, bool in_step) {
  return checked_linear(x, {"linear", weight, bias, std::nullopt, std::nullopt, in_step});
}

Tensor rms_norm_linear_op(const Tensor& x, std::optional<Tensor> norm_weight, const Tensor& weight,
                          std::optional<Tensor> bias, double eps, double weight_offset, bool cast_before_weight,
                          bool in_step, std::optional<Tensor> scaled, std::optional<Tensor> squares) {
  const Norm norm{norm_weight, {eps, weight_offset, cast_before_weight}};
  return checked_linear(x, {"rms_norm_linear", weight, bias, norm, std::nullopt, in_step}, scaled, squares);
}

Tensor glu_linear_op(const Tensor& x, const Tensor& weight, std::string activation, bool in_step) {
  constexpr const char* op = "glu_linear";
  return checked_linear(x, {op, weight, std::nullopt, std::nullopt, to_activation(op, activation), in_step});
}

Tensor rms_norm_glu_linear_op(const Tensor& x, std::optional<Tensor> norm_weight, const Tensor& weight,
                              std::string activation, double eps, double weight_offset, bool cast_before_weight,
                              bool in_step, std::optional<Tensor> scaled, std::optional<Tensor> squares) {
  constexpr const char* op = "rms_norm_glu_linear";
  const Norm norm{norm_weight, {eps, weight_offset, cast_before_weight}};
  const Linear f{op, weight, std::nullopt, norm, to_activation(op, activation), in_step};
  return checked_linear(x, f, scaled, squares);
}

void check_add(const Tensor& residual, const Tensor& x, const Linear& f, double alpha) {
  check(x, f);
  check_dtype(f.op, {"residual", residual}, {"x", x});
  const std::vector<int64_t> sizes = result_shape(x, f);
  LLMK_CHECK(residual.sizes().equals(sizes), f.op, "residual must have shape ", text(sizes),
             " (that of x weight^T), got ", shape(residual));
  check_finite(f.op, "alpha", alpha);
}

void linear_add_op(Tensor residual, const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, double alpha,
                   bool in_step) {
  const Linear f{"linear_add_", weight, bias, std::nullopt, std::nullopt, in_step};
  check_tensors(f.op, {{"residual", residual, Access::kWrite}, {"x", x}, {"weight", weight}, {"bias", bias}});
  check_add(residual, x, f, alpha);
  linear_add_(residual, x, f, alpha);
}

std::tuple<Tensor, Tensor> linear_add_scale_op(Tensor residual, const Tensor& x, const Tensor& weight,
                                               std::optional<Tensor> bias, const Tensor& next_weight,
                                               std::optional<Tensor> next_norm_weight, double next_weight_offset,
                                               double alpha, bool in_step, bool next_glu) {
  const Linear f{"linear_add_scale_", weight, bias, std::nullopt, std::nullopt, in_step};
  check_tensors(f.op, {{"residual", residual, Access::kWrite},
                       {"x", x},
                       {"weight", weight},
                       {"bias", bias},
                       {"next_weight", next_weight},
                       {"next_norm_weight", next_norm_weight}});
  check_add(residual, x, f, alpha);
  const int64_t n = weight.size(0);
  check_dtype(f.op, {"next_weight", next_weight}, {"x", x});
  LLMK_CHECK(next_weight.dim() == 2 && next_weight.size(1) == n, f.op, "next_weight must have shape [any, ", n,
             "] (weight.size(0)), got ", shape(next_weight));
  check_vector(f.op, {"next_norm_weight", next_norm_weight}, {"x", x}, n, "weight.size(0)");
  LLMK_CHECK(!next_glu || next_weight.size(0) % 2 == 0, f.op,
             "next_weight must have an even number of rows, [gate | up], got shape ", shape(next_weight));
  check_finite(f.op, "next_weight_offset", next_weight_offset);
  Linear next{f.op, next_weight, std::nullopt, Norm{next_norm_weight, {0, next_weight_offset, false}}, {}, in_step};
  if (next_glu) next.glu = Activation::kSilu;  // any: the hand-off does not depend on which it is
  if (const std::optional<Scaled> scaled = linear_add_(residual, x, f, alpha, &next)) {
    return {scaled->x, scaled->squares};
  }
  const int64_t none = 0;
  return {empty({&none, 1}, x.scalar_type(), x), empty({&none, 1}, ScalarType::Float, x)};
}

Tensor rms_norm_add_linear_op(Tensor sum, const Tensor& residual, const Tensor& x, std::optional<Tensor> add_weight,
                              double add_eps, double add_weight_offset, bool add_cast_before_weight, double alpha,
                              const Tensor& weight, std::optional<Tensor> bias, std::string activation, bool normalize,
                              std::optional<Tensor> norm_weight, double eps, double weight_offset,
                              bool cast_before_weight, bool in_step) {
  Linear f{"rms_norm_add_linear", weight, bias, std::nullopt, std::nullopt, in_step};
  if (normalize) f.norm = Norm{norm_weight, {eps, weight_offset, cast_before_weight}};
  if (!activation.empty()) f.glu = to_activation(f.op, activation);
  const Norm added{add_weight, {add_eps, add_weight_offset, add_cast_before_weight}};
  check_tensors(f.op, {{"sum", sum, Access::kWrite},
                       {"residual", residual},
                       {"x", x},
                       {"add_weight", add_weight},
                       {"weight", weight},
                       {"bias", bias},
                       {"norm_weight", norm_weight}});
  check(x, f);
  check_not_negative(f.op, "add_eps", add_eps);
  check_finite(f.op, "add_weight_offset", add_weight_offset);
  check_finite(f.op, "alpha", alpha);
  check_like(f.op, {"residual", residual}, {"x", x});
  check_like(f.op, {"sum", sum}, {"x", x});
  check_rows_in_place(f.op, {"sum", sum});
  check_vector(f.op, {"add_weight", add_weight}, {"x", x}, x.size(x.dim() - 1), "x.size(-1)");
  LLMK_CHECK(!f.glu || !bias, f.op, "bias must not be given with an activation");
  if (x.numel() > 0 && !is_meta(x)) {
    const NormSum of_rows(sum, residual, x, added, alpha);
#if LLMK_CUDA
    if (const std::optional<Tensor> y = try_linear(sum, f, std::nullopt, &of_rows.params)) return *y;
#endif
    of_rows.run(f.op);
  }
  return linear(sum, f);
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "linear", TORCH_BOX(&linear_op));
  implement_differentiable(ops, "rms_norm_linear", TORCH_BOX(&rms_norm_linear_op));
  ops.impl("glu_linear", TORCH_BOX(&glu_linear_op));
  ops.impl("rms_norm_glu_linear", TORCH_BOX(&rms_norm_glu_linear_op));
  ops.impl("rms_norm_add_linear", TORCH_BOX(&rms_norm_add_linear_op));
  ops.impl("linear_add_", TORCH_BOX(&linear_add_op));
  ops.impl("linear_add_scale_", TORCH_BOX(&linear_add_scale_op));
}

}  // namespace

Tensor linear(const Tensor& x, const Linear& f) { return linear(x, f, std::nullopt); }

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
