// lora_linear, add_lora and their backward: PyTorch's matrix products (cuBLAS, MKL), with r the rank of the adapter
//
//   h = s x A^T      y += h B^T      g = s grad_y B      grad_A = g^T x      grad_B = grad_y^T h      grad_x += g A
//
// Where float32 factors are split into two of bfloat16, csrc/kernels/lora splits them and adds the halves of products:
//
//   forward    split A and B; y = x W^T + b; x [A1 A2]^T; split h; y += [h1 h1 h2] [B1 B2 B1]^T
//   backward   grad_x = grad_y W; grad_y^T [h1 h2]; grad_y [B1 B2]; split g; [g1 g2]^T x;
//              grad_x += [g1 g1 g2] [A1; A2; A1]; add the halves of grad_A and grad_B
//
// that is 5 and 8 launches, if cuBLAS takes one per product. Where they are not split, h is not scaled, but its product
// with B is.
//
// add_adapters_: all adapters of a product, in place, by kernels of ours alone, which a graph can record.
#include "cpu/lora.h"

#include <algorithm>

#include "backend.h"
#include "matrix.h"
#if LLMK_CUDA
#include "kernels/lora/lora.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;
using MaybeTensor = std::optional<Tensor>;
using List = std::vector<Tensor>;

constexpr const char* kAddAdapters = "add_adapters_";

struct Adapter {
  const char* op;
  Tensor a, b;  // [r, K], [N, r]
  double scaling;
  bool split;

  int64_t rank() const { return a.size(0); }
  int64_t k() const { return a.size(1); }
  int64_t n() const { return b.size(0); }
};

// `x`, or in the backward the gradient of y: as far as it has to fit. `source` says where N is from.
void check(const Adapter& f, const Argument& model, int64_t k, const char* k_source, int64_t n, const char* n_source) {
  const char* const op = f.op;
  const Argument a{"lora_a", f.a}, b{"lora_b", f.b};
  to_dtype(op, a);
  LLMK_CHECK(a->dim() == 2 && a->size(1) == k, op, "lora_a must have shape [r, ", k, "] (", k_source, "), got ",
             shape(*a));
  LLMK_CHECK(b->dim() == 2 && b->size(0) == n && b->size(1) == f.rank(), op, "lora_b must have shape [", n, ", ",
             f.rank(), "] (", n_source, ", lora_a.size(0)), got ", shape(*b));
  check_dtype(op, b, a);
  check_finite(op, "scaling", f.scaling);
  LLMK_CHECK(!f.split || (a->scalar_type() == ScalarType::Float && model->scalar_type() == ScalarType::BFloat16), op,
             "split must be False, unless lora_a is float32 and ", model.name, " bfloat16, got ",
             name(a->scalar_type()), " and ", name(model->scalar_type()));
}

void check_rows(const char* op, const Argument& argument) {
  to_dtype(op, argument);
  LLMK_CHECK(argument->dim() >= 1, op, argument.name, " must have at least one dimension, got a scalar");
}

int64_t last_size(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }

// The shape of `like`, but for the last dimension.
std::vector<int64_t> with_last(const Tensor& like, int64_t size) {
  std::vector<int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes.back() = size;
  return sizes;
}

int64_t rows_of(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) rows *= tensor.size(i);
  return rows;
}

Tensor none(const Tensor& like) {
  const int64_t zero = 0;
  return empty({&zero, 1}, dtype_code(like), like);
}

// The tensor in another dtype.
Tensor converted(const Tensor& tensor, int32_t dtype) {
  if (dtype_code(tensor) == dtype) return tensor;
  Tensor result = empty(tensor.sizes(), dtype, tensor);
  aten::copy_(result, tensor);
  return result;
}

// a b of 16-bit matrices, in float32.
Tensor wide_product(const Tensor& a, const Tensor& b) {
  Tensor out = empty({a.size(0), b.size(1)}, ScalarType::Float, a);
  if (a.numel() == 0 || b.numel() == 0) {
    aten::zero_(out);
  } else if (out.is_cuda() && aten::has_wide_products()) {
    aten::mm_wide_out(out, a, b, dtype_code(out), false);
  } else {
    aten::mm_out(out, converted(a, dtype_code(out)), converted(b, dtype_code(out)));
  }
  return out;
}

void run(const char* op, const LoraSplits& splits, const Tensor& like) {
  on_device(op, like, LLMK_CUDA_ONLY([&](auto stream) { return kernels::lora_split(splits, stream); }), [&] {
    for (const LoraSplit& split : {splits.first, splits.second}) {
      parallel_for(split.rows, split.cols, [&](int64_t begin, int64_t end) { cpu::lora_split(split, begin, end); });
    }
  });
}

void run(const char* op, const LoraSums& sums, const Tensor& like) {
  on_device(op, like, LLMK_CUDA_ONLY([&](auto stream) { return kernels::lora_sum(sums, stream); }), [&] {
    for (const LoraSum& sum : {sums.first, sums.second}) {
      parallel_for(sum.rows, sum.cols, [&](int64_t begin, int64_t end) { cpu::lora_sum(sum, begin, end); });
    }
  });
}

const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

// The parts of A below each other, [A1; A2; A1], and of B side by side, [B1 B2 B1].
std::pair<Tensor, Tensor> split_factors(const Adapter& f) {
  const int64_t rank = f.rank(), k = f.k(), n = f.n();
  const Rows a = as_rows(f.a), b = as_rows(f.b);
  Tensor a_parts = empty({3 * rank, k}, ScalarType::BFloat16, f.a);
  Tensor b_parts = empty({n, 3 * rank}, ScalarType::BFloat16, f.a);
  const LoraSplit of_a{floats(a.tensor), a_parts.mutable_data_ptr(), rank, k, a.stride, 0, 1.f, k, rank * k, 1};
  const LoraSplit of_b{floats(b.tensor), b_parts.mutable_data_ptr(), n, rank, b.stride, 0, 1.f, 3 * rank, rank, 1};
  run(f.op, LoraSplits{of_a, of_b}, f.a);
  return {a_parts, b_parts};
}

// [x1 x1 x2], the parts of x = scaling (left half of t + right half).
Tensor split_sum(const Adapter& f, const Tensor& t) {
  const int64_t rank = f.rank(), rows = t.size(0);
  Tensor parts = empty({rows, 3 * rank}, ScalarType::BFloat16, t);
  const auto factor = static_cast<float>(f.scaling);
  const LoraSplit split{floats(t), parts.mutable_data_ptr(), rows, rank, 2 * rank, rank, factor, 3 * rank, rank, 2};
  run(f.op, LoraSplits{split, {}}, t);
  return parts;
}

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What has no memory, for the checks of a fake.
Results without_memory(const Tensor& result, const Adapter& f) { return {result, none(f.a), none(f.a), none(f.a)}; }

// Writes base + s (x A^T) B^T to the result; `base` is a matrix, and may be the memory of the result.
Results add_adapter(Tensor result, const MaybeTensor& base, const Tensor& x, const Adapter& f) {
  const Tensor out = matrix(result), sums = base ? *base : out;
  if (f.split) {
    const auto [a_parts, b_parts] = split_factors(f);
    const Tensor two = matrix(a_parts, 2 * f.rank(), f.k(), f.k());
    const Tensor h = split_sum(f, wide_product(x, transposed(two)));
    aten::addmm_out(out, sums, h, transposed(b_parts));
    return {result, h, a_parts, b_parts};
  }
  const int32_t dtype = dtype_code(f.a);
  const Tensor b = transposed(with_plain_strides(f.b));
  Tensor h = empty({x.size(0), f.rank()}, dtype, f.a);
  aten::mm_out(h, converted(x, dtype), transposed(with_plain_strides(f.a)));
  if (dtype_code(out) == dtype) {
    aten::addmm_out(out, sums, h, b, f.scaling);
  } else {
    const Tensor product = empty({x.size(0), f.n()}, dtype, f.a);
    aten::mm_out(product, h, b);
    if (base) aten::copy_(out, sums);
    aten::add_(out, product, f.scaling);
  }
  return {result, h, none(f.a), none(f.a)};
}

Results lora_linear(const Tensor& x, const Tensor& weight, const Tensor& lora_a, const Tensor& lora_b, MaybeTensor bias,
                    double scaling, bool split) {
  constexpr const char* op = "lora_linear";
  const Argument model{"x", x};
  check_tensors(op, {model, {"weight", weight}, {"lora_a", lora_a}, {"lora_b", lora_b}, {"bias", bias}});
  check_rows(op, model);
  check_dtype(op, {"weight", weight}, model);
  const int64_t k = last_size(x);
  LLMK_CHECK(weight.dim() == 2 && weight.size(1) == k, op, "weight must have shape [N, ", k, "] (x.size(-1)), got ",
             shape(weight));
  const int64_t n = weight.size(0);
  check_vector(op, {"bias", bias}, model, n, "weight.size(0)");
  const Adapter adapter{op, lora_a, lora_b, scaling, split};
  check(adapter, model, k, "x.size(-1)", n, "weight.size(0)");
  const Tensor y = empty(with_last(x, n), dtype_code(x), x);
  if (is_meta(x)) return without_memory(y, adapter);
  const Tensor rows = matrix(x), out = matrix(y), w = transposed(with_plain_strides(weight));
  if (bias) {
    aten::addmm_out(out, *bias, rows, w);
  } else {
    aten::mm_out(out, rows, w);
  }
  return add_adapter(y, std::nullopt, rows, adapter);
}

Results add_lora(const Tensor& y, const Tensor& x, const Tensor& lora_a, const Tensor& lora_b, double scaling,
                 bool split) {
  constexpr const char* op = "add_lora";
  const Argument model{"x", x}, base{"y", y};
  check_tensors(op, {base, model, {"lora_a", lora_a}, {"lora_b", lora_b}});
  check_rows(op, base);
  check_rows(op, model);
  const Adapter adapter{op, lora_a, lora_b, scaling, split};
  check(adapter, model, last_size(x), "x.size(-1)", last_size(y), "y.size(-1)");
  const std::vector<int64_t> sizes = with_last(x, adapter.n());
  LLMK_CHECK(y.sizes().equals(sizes), op, "y must have shape ", text(sizes), ", got ", shape(y));
  if (split) check_dtype(op, base, model);
  const Tensor sum = empty_rows(y);
  if (is_meta(y)) return without_memory(sum, adapter);
  return add_adapter(sum, matrix(y), matrix(x), adapter);
}

struct Needs {
  bool x, a, b;
};
struct Gradients {
  Tensor x, a, b;
};

// `x` of the gradients holds grad_y W, if there is a W.
void split_gradients(Gradients grads, const Tensor& grad_y, const Tensor& x, const Adapter& f, bool has_weight,
                     const Tensor& h, const Tensor& a_parts, const Tensor& b_parts, const Needs& needs) {
  const int64_t rank = f.rank(), n = f.n(), k = f.k();
  LoraSums sums{};
  MaybeTensor of_a, of_b;
  if (needs.b) {
    of_b = wide_product(transposed(grad_y), columns(h, rank, 3 * rank));
    sums.first = {floats(*of_b), static_cast<float*>(grads.b.mutable_data_ptr()), n, rank, 2 * rank, rank};
  }
  if (needs.x || needs.a) {
    const Tensor g = split_sum(f, wide_product(grad_y, columns(b_parts, 0, 2 * rank)));
    if (needs.a) {
      of_a = wide_product(transposed(columns(g, rank, 3 * rank)), x);
      sums.second = {floats(*of_a), static_cast<float*>(grads.a.mutable_data_ptr()), rank, k, k, rank * k};
    }
    if (needs.x && has_weight) {
      const Tensor out = matrix(grads.x);
      aten::addmm_out(out, out, g, a_parts);
    } else if (needs.x) {
      aten::mm_out(matrix(grads.x), g, a_parts);
    }
  }
  if (needs.a || needs.b) run(f.op, sums, f.a);
}

void plain_gradients(Gradients grads, const Tensor& grad_y, const Tensor& x, const Adapter& f, bool has_weight,
                     const Tensor& h, const Needs& needs) {
  const int32_t dtype = dtype_code(f.a);
  const Tensor wide = converted(grad_y, dtype);
  if (needs.b) aten::mm_out(grads.b, transposed(wide), h, f.scaling);
  if (!needs.x && !needs.a) return;
  Tensor g = empty({grad_y.size(0), f.rank()}, dtype, f.a);
  aten::mm_out(g, wide, with_plain_strides(f.b), f.scaling);
  if (needs.a) aten::mm_out(grads.a, transposed(g), converted(x, dtype));
  if (!needs.x) return;
  const Tensor out = matrix(grads.x), a = with_plain_strides(f.a);
  if (!has_weight) {
    aten::mm_out(out, g, a);
  } else if (dtype_code(out) == dtype) {
    aten::addmm_out(out, out, g, a);
  } else {
    const Tensor part = empty({g.size(0), f.k()}, dtype, f.a);
    aten::mm_out(part, g, a);
    aten::add_(out, part);
  }
}

// Without a weight, the gradient of x has the dtype of grad_y if factors are split, else that of A.
std::tuple<Tensor, Tensor, Tensor> lora_linear_backward(const Tensor& grad_y, MaybeTensor x, MaybeTensor weight,
                                                        const Tensor& lora_a, const Tensor& lora_b, const Tensor& h,
                                                        const Tensor& a_parts, const Tensor& b_parts, double scaling,
                                                        bool split, bool needs_x, bool needs_a, bool needs_b) {
  constexpr const char* op = "lora_linear_backward";
  const Argument model{"grad_y", grad_y}, a{"lora_a", lora_a};
  check_tensors(op, {model,
                     {"x", x},
                     {"weight", weight},
                     a,
                     {"lora_b", lora_b},
                     {"h", h},
                     {"a_parts", a_parts},
                     {"b_parts", b_parts}});
  check_rows(op, model);
  LLMK_CHECK(lora_a.dim() == 2, op, "lora_a must have shape [r, K], got ", shape(lora_a));
  const Adapter f{op, lora_a, lora_b, scaling, split};
  const int64_t rank = f.rank(), k = f.k(), n = last_size(grad_y), rows = rows_of(grad_y);
  LLMK_CHECK(x || !needs_a, op, "x must be a tensor for the gradient of lora_a, got None");
  const std::vector<int64_t> x_sizes = with_last(grad_y, k);
  if (x) {
    check_rows(op, {"x", x});
    LLMK_CHECK(x->sizes().equals(x_sizes), op, "x must have shape ", text(x_sizes), ", got ", shape(*x));
    if (split) check_dtype(op, {"x", x}, model);
  }
  if (weight) {
    check_dtype(op, {"weight", weight}, model);
    LLMK_CHECK(weight->dim() == 2 && weight->size(0) == n && weight->size(1) == k, op, "weight must have shape [", n,
               ", ", k, "] (grad_y.size(-1), lora_a.size(1)), got ", shape(*weight));
  }
  check(f, model, k, "x.size(-1)", n, "grad_y.size(-1)");
  const auto check_saved = [&](const Argument& argument, std::vector<int64_t> sizes) {
    const ScalarType type = split ? ScalarType::BFloat16 : lora_a.scalar_type();
    LLMK_CHECK(argument->scalar_type() == type, op, argument.name, " must be ", name(type), ", got ",
               name(argument->scalar_type()));
    LLMK_CHECK(argument->sizes().equals(sizes), op, argument.name, " must have shape ", text(sizes), ", got ",
               shape(*argument));
  };
  check_saved({"h", h}, {rows, split ? 3 * rank : rank});
  check_saved({"a_parts", a_parts}, split ? std::vector<int64_t>{3 * rank, k} : std::vector<int64_t>{0});
  check_saved({"b_parts", b_parts}, split ? std::vector<int64_t>{n, 3 * rank} : std::vector<int64_t>{0});
  const Tensor& of_x = weight || split ? grad_y : lora_a;
  const Gradients grads{needs_x ? empty(x_sizes, dtype_code(of_x), grad_y) : none(of_x),
                        needs_a ? empty_rows(lora_a) : none(lora_a), needs_b ? empty_rows(lora_b) : none(lora_b)};
  if (is_meta(grad_y)) return {grads.x, grads.a, grads.b};
  Tensor dy = matrix(grad_y);
  if (rows > 1 && dy.stride(0) < n) dy = aten::contiguous(dy);  // rows that are one, once and not for each product
  const Tensor all_x = x ? matrix(*x) : none(grad_y);
  if (needs_x && weight) aten::mm_out(matrix(grads.x), dy, with_plain_strides(*weight));
  const Needs needs{needs_x, needs_a, needs_b};
  if (split) {
    split_gradients(grads, dy, all_x, f, weight.has_value(), h, a_parts, b_parts, needs);
  } else {
    plain_gradients(grads, dy, all_x, f, weight.has_value(), h, needs);
  }
  return {grads.x, grads.a, grads.b};
}

// Whether an adapter can be one of `adapters` in a launch: there is room, and no other one has one of its columns.
bool fits(const LoraAdapters& adapters, const LoraAdapter& adapter) {
  const auto* const end = adapters.adapters + adapters.count;
  return adapters.count < LoraAdapters::kMax && std::none_of(adapters.adapters, end, [&](const LoraAdapter& other) {
           return adapter.begin < other.begin + other.n && other.begin < adapter.begin + adapter.n;
         });
}

void add_adapters(const LoraAdapters& params, Dtype dtype, const Tensor& like) {
  int64_t work = 0, ranks = 0;
  for (int i = 0; i < params.count; ++i) {
    work += params.adapters[i].rank * (params.k + params.adapters[i].n);
    ranks += params.adapters[i].rank;
  }
  LoraAdapters adapters = params;
  std::optional<Tensor> sums;
  if (like.is_cuda()) {
    sums = empty({params.rows, ranks}, ScalarType::Float, like);
    adapters.sums = static_cast<float*>(sums->mutable_data_ptr());
  }
  on_device(kAddAdapters, like,
            LLMK_CUDA_ONLY([&](auto stream) { return kernels::lora_adapters(adapters, dtype, stream); }), [&] {
              parallel_for(adapters.rows, work,
                           [&](int64_t begin, int64_t end) { cpu::lora_adapters(adapters, dtype, begin, end); });
            });
}

void add_adapters_(const Tensor& y, const Tensor& x, const List& lora_a, const List& lora_b,
                   const std::vector<int64_t>& begins, const std::vector<double>& scalings) {
  constexpr const char* op = kAddAdapters;
  const Argument out{"y", y, Access::kWrite}, model{"x", x};
  std::vector<Argument> arguments{out, model};
  const size_t count = lora_a.size();
  LLMK_CHECK(lora_b.size() == count, op, "lora_b must have one tensor per tensor of lora_a (", count, "), got ",
             lora_b.size());
  LLMK_CHECK(begins.size() == count, op, "begins must have one number per tensor of lora_a (", count, "), got ",
             begins.size());
  LLMK_CHECK(scalings.size() == count, op, "scalings must have one number per tensor of lora_a (", count, "), got ",
             scalings.size());
  for (size_t i = 0; i < count; ++i) {
    const auto index = static_cast<int64_t>(i);
    arguments.push_back({Name("lora_a", index), lora_a[i]});
    arguments.push_back({Name("lora_b", index), lora_b[i]});
  }
  check_tensors(op, arguments.data(), arguments.size());
  check_rows(op, out);
  check_rows(op, model);
  check_dtype(op, model, out);
  const Dtype dtype = to_dtype(op, out);
  const int64_t k = last_size(x), n = last_size(y);
  const std::vector<int64_t> sizes = with_last(x, n);
  LLMK_CHECK(y.sizes().equals(sizes), op, "y must have shape ", text(sizes), ", got ", shape(y));
  LLMK_CHECK(y.is_contiguous(), op, "y must be contiguous, got shape ", shape(y), " with strides ", text(y.strides()));
  for (size_t i = 0; i < count; ++i) {
    const Argument &a = arguments[2 + 2 * i], &b = arguments[3 + 2 * i];
    LLMK_CHECK(a->dim() == 2 && a->size(1) == k, op, a.name, " must have shape [r, ", k, "] (x.size(-1)), got ",
               shape(*a));
    LLMK_CHECK(b->dim() == 2 && b->size(1) == a->size(0), op, b.name, " must have shape [N, ", a->size(0), "] (",
               a.name, ".size(0)), got ", shape(*b));
    LLMK_CHECK(a->scalar_type() == x.scalar_type() || a->scalar_type() == ScalarType::Float, op, a.name, " must be ",
               name(x.scalar_type()), " as x, or Float, got ", name(a->scalar_type()));
    check_dtype(op, a, arguments[2]);
    check_dtype(op, b, a);
    for (const Argument& factor : {a, b}) {
      LLMK_CHECK(factor->is_contiguous(), op, factor.name, " must be contiguous, got shape ", shape(*factor),
                 " with strides ", text(factor->strides()));
    }
    LLMK_CHECK(begins[i] >= 0 && begins[i] + b->size(0) <= n, op, "begins[", i, "] must be from 0 to ", n - b->size(0),
               " (y.size(-1) - ", b.name, ".size(0)), got ", begins[i]);
    check_finite(op, "scalings", scalings[i]);
  }
  if (is_meta(y) || y.numel() == 0) return;
  const Rows rows = as_rows(x);
  LoraAdapters adapters{.x = rows.data(),
                        .y = y.mutable_data_ptr(),
                        .sums = nullptr,
                        .rows = rows.rows,
                        .k = k,
                        .x_stride = rows.stride,
                        .y_stride = n,
                        .factors = count ? to_dtype(op, arguments[2]) : dtype,
                        .count = 0,
                        .adapters = {}};
  for (size_t i = 0; i < count; ++i) {
    const Tensor &a = lora_a[i], &b = lora_b[i];
    if (a.size(0) == 0 || b.size(0) == 0) continue;
    const LoraAdapter adapter{a.const_data_ptr(), b.const_data_ptr(), begins[i], b.size(0), a.size(0), scalings[i]};
    if (!fits(adapters, adapter)) {
      add_adapters(adapters, dtype, y);
      adapters.count = 0;
    }
    adapters.adapters[adapters.count++] = adapter;
  }
  if (adapters.count) add_adapters(adapters, dtype, y);
}

void register_ops(StableLibrary& ops) {
  ops.impl(kAddAdapters, TORCH_BOX(&add_adapters_));
  implement_differentiable(ops, "lora_linear", TORCH_BOX(&lora_linear));
  implement_differentiable(ops, "add_lora", TORCH_BOX(&add_lora));
  ops.impl("lora_linear_backward", TORCH_BOX(&lora_linear_backward));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
