// linear_cross_entropy and its backward: PyTorch's matrix products (cuBLAS, MKL) and the kernels of cross_entropy, by
// chunks of rows, so that only one chunk of the logits exists at a time:
//
//   for each chunk:   logits = x W^T + b                        mm
//                     losses, lse; G = d losses / d logits      cross_entropy, G in place of the logits
//                     grad_x = G W                              mm
//                     grad_W += G^T x, grad_b += 1^T G          mm that adds to a float32 sum
//
// The forward computes the gradients of the sum of the losses, not divided by what a mean divides by: rounded to
// float16 as they are, they neither underflow nor overflow, whatever the number of rows or a GradScaler multiplies by.
// Sums over chunks are float32, so that their error does not grow with the number of chunks, and are rounded once.
// Idea of the gradients in the forward: Liger-Kernel.
#include <algorithm>

#include "cross_entropy.h"
#include "matrix.h"

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

struct Wanted {
  bool x, weight, bias;

  bool any() const { return x || weight || bias; }
};

// The arguments of a call, checked.
struct Problem {
  CrossEntropyCall call;
  Rows x;
  Tensor weight;
  std::optional<Tensor> bias;
  int64_t chunk_rows;

  int64_t rows() const { return call.params.rows; }
  int64_t vocab() const { return call.params.vocab; }
  int64_t k() const { return x.cols; }
};

// As many rows as the budget allows, at least one; evenly spread, and multiples of a matrix product's tile.
int64_t rows_per_chunk(int64_t rows, int64_t row_bytes, int64_t budget) {
  const int64_t most = std::max<int64_t>(budget / std::max<int64_t>(row_bytes, 1), 1);
  if (most >= rows) return rows;
  const int64_t chunks = (rows + most - 1) / most, even = (rows + chunks - 1) / chunks;
  for (const int64_t tile : {256, 128}) {
    const int64_t whole_tiles = (even + tile - 1) / tile * tile;
    if (whole_tiles <= most) return whole_tiles;
  }
  return even;
}

// Unless the caller says so: every chunk reads and writes the float32 sum of W's gradient, so that a large W is worth
// large chunks; and beside that sum they do not count for much.
int64_t budget_of(std::optional<int64_t> max_logits_bytes, const Tensor& weight) {
  return max_logits_bytes.value_or(std::max<int64_t>(int64_t{1} << 29, weight.numel() * weight.element_size()));
}

Problem check(const char* op, const Tensor& x, const Tensor& weight, const Tensor& target,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight,
              const std::string& reduction, const CrossEntropyOptions& options, std::optional<int64_t> max_logits_bytes,
              bool at_once) {
  to_dtype(op, {"x", x});
  LLMK_CHECK(x.dim() >= 1, op, "x must have at least one dimension, got a scalar");
  check_dtype(op, {"linear_weight", weight}, {"x", x});
  const int64_t k = x.size(x.dim() - 1);
  LLMK_CHECK(weight.dim() == 2 && weight.size(1) == k, op, "linear_weight must have shape [V, ", k,
             "] (x.size(-1)), got ", shape(weight));
  const int64_t vocab = weight.size(0);
  check_vector(op, {"linear_bias", bias}, {"x", x}, vocab, "linear_weight.size(0)");
  LLMK_CHECK(!max_logits_bytes || *max_logits_bytes >= 1, op, "max_logits_bytes must be at least 1, got ",
             *max_logits_bytes);
  const LossRows of{{"x", x}, "linear_weight", vocab, "linear_weight.size(0)"};
  CrossEntropyCall call = begin_cross_entropy(op, of, target, class_weight, reduction, options);
  if (is_meta(x)) return {call, {x, 0, 0, 0}, weight, bias, 0};
  const int64_t row_bytes = vocab * x.element_size();
  const int64_t rows = call.params.rows;
  const int64_t chunk = at_once ? rows : rows_per_chunk(rows, row_bytes, budget_of(max_logits_bytes, weight));
  return {call, as_rows(x), with_plain_strides(weight), bias, chunk};
}

// Sums of products over the chunks.
class Gradients {
 public:
  // `type`: of the sums; that of the logits only if there is no second chunk.
  Gradients(const Problem& p, const Tensor& like_x, const Wanted& wanted, ScalarType type) : problem_(p) {
    const int64_t zero = 0;
    const auto none = [&](ScalarType of) { return empty({&zero, 1}, of, like_x); };
    const int64_t vocab = p.weight.size(0);
    x = wanted.x ? empty_rows(like_x) : none(like_x.scalar_type());
    weight = wanted.weight ? empty({vocab, p.weight.size(1)}, type, like_x) : none(type);
    bias = wanted.bias ? empty({&vocab, 1}, type, like_x) : none(type);
    wanted_ = wanted;
    if (is_meta(like_x) || p.rows() > 0) return;
    aten::zero_(weight);
    aten::zero_(bias);
  }

  void add(const Tensor& grad_logits, int64_t row) {
    const Problem& p = problem_;
    const int64_t count = grad_logits.size(0);
    if (wanted_.x) aten::mm_out(matrix(x, count, p.k(), p.k(), row), grad_logits, p.weight);
    if (wanted_.weight) {
      add_product(weight, transposed(grad_logits), matrix(p.x.tensor, count, p.k(), p.x.stride, row), row > 0);
    }
    if (wanted_.bias) {
      const Tensor ones = torch::stable::fill_(empty({1, count}, grad_logits.scalar_type(), grad_logits), 1.0);
      add_product(matrix(bias, 1, p.vocab(), p.vocab()), ones, grad_logits, row > 0);
    }
  }

  Tensor x, weight, bias;

 private:
  // out += a b, or out = a b; float32 for a and b of 16 bits on a GPU. The CPU has no such product: it rounds that of
  // each chunk to 16 bits.
  static void add_product(const Tensor& out, const Tensor& a, const Tensor& b, bool add) {
    if (dtype_code(out) == dtype_code(a)) {
      if (add) {
        aten::addmm_out(out, out, a, b);
      } else {
        aten::mm_out(out, a, b);
      }
    } else if (out.is_cuda() && aten::has_wide_products()) {
      aten::mm_wide_out(out, a, b, dtype_code(out), add);
    } else {
      const Tensor product = empty(out.sizes(), dtype_code(a), out);
      aten::mm_out(product, a, b);
      if (add) {
        aten::add_(out, product);
      } else {
        aten::copy_(out, product);
      }
    }
  }

  const Problem& problem_;
  Wanted wanted_;
};

// Calls body(logits, first row, parameters of these rows) for each chunk, which may overwrite the logits.
template <typename Body>
void for_chunks(const Problem& p, const CrossEntropyParams& params, const Body& body) {
  const int64_t vocab = p.vocab(), wide_size = p.call.dtype == Dtype::kFloat64 ? 8 : 4;
  if (p.rows() == 0) return;
  const Tensor buffer = empty({p.chunk_rows, vocab}, p.x.tensor.scalar_type(), p.x.tensor);
  const Tensor weight = transposed(p.weight);
  const auto at = [&](auto* pointer, int64_t row) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(pointer)>>, const char, char>;
    return pointer ? static_cast<Byte*>(pointer) + row * wide_size : nullptr;
  };
  for (int64_t row = 0; row < p.rows(); row += p.chunk_rows) {
    const int64_t count = std::min(p.chunk_rows, p.rows() - row);
    const Tensor logits = matrix(buffer, count, vocab, vocab);
    const Tensor x = matrix(p.x.tensor, count, p.k(), p.x.stride, row);
    if (p.bias) {
      aten::addmm_out(logits, *p.bias, x, weight);
    } else {
      aten::mm_out(logits, x, weight);
    }
    CrossEntropyParams chunk = params;
    chunk.rows = count;
    chunk.logits = logits.const_data_ptr();
    chunk.logits_stride = chunk.grad_stride = vocab;
    chunk.target += row;
    chunk.losses = at(params.losses, row);
    chunk.lse = at(params.lse, row);
    if (params.grad_loss_stride) chunk.grad_loss = at(params.grad_loss, row);
    body(logits, row, chunk);
  }
}

// The gradients are those of the sum of the losses, the weight's and the bias's in float32 (float64); `at_once`: all
// rows are one chunk, and these have the dtype of x, too.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy(
    const Tensor& x, const Tensor& linear_weight, const Tensor& target, std::optional<Tensor> linear_bias,
    std::optional<Tensor> weight, int64_t ignore_index, std::string reduction, double label_smoothing,
    double lse_square_scale, double softcap, std::optional<int64_t> max_logits_bytes, bool at_once, bool needs_x,
    bool needs_weight, bool needs_bias) {
  constexpr const char* op = "linear_cross_entropy";
  check_tensors(op, {{"x", x},
                     {"linear_weight", linear_weight},
                     {"target", target},
                     {"linear_bias", linear_bias},
                     {"weight", weight}});
  const Problem p = check(op, x, linear_weight, target, linear_bias, weight, reduction,
                          {ignore_index, label_smoothing, lse_square_scale, softcap}, max_logits_bytes, at_once);
  const CrossEntropyCall& call = p.call;
  const Wanted wanted{needs_x, needs_weight, needs_bias && linear_bias};
  LLMK_CHECK(call.reduced || !wanted.any(), op, "reduction must be 'mean' or 'sum' for gradients in the forward");
  const ScalarType type = wide(call.dtype);
  const int64_t zero = 0, two = 2;
  Tensor lse = empty(target.sizes(), type, x), losses = empty(target.sizes(), type, x);
  Tensor loss = call.reduced ? empty(target.sizes().slice(0, 0), type, x) : losses;
  Tensor divisor = empty({call.mean ? &two : &zero, 1}, type, x);
  Gradients grads(p, x, wanted, at_once ? x.scalar_type() : type);
  if (is_meta(x)) return {loss, lse, divisor, grads.x, grads.weight, grads.bias};
  CrossEntropyParams params = call.params;
  params.losses = losses.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr();
  if (call.weight) {
    run_sums(call, false, *call.sums);
  } else {
    params.sums = nullptr;
  }
  for_chunks(p, params, [&](const Tensor& logits, int64_t row, CrossEntropyParams& chunk) {
    if (wanted.any()) chunk.grad = logits.mutable_data_ptr();
    run_rows(call, chunk);
    if (wanted.any()) grads.add(logits, row);
  });
  if (call.mean) run_sums(call, true, divisor);
  params.sums = call.mean ? divisor.const_data_ptr() : nullptr;
  if (call.reduced) run_reduce(call, params, loss);
  return {loss, lse, divisor, grads.x, grads.weight, grads.bias};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor& grad_loss, const Tensor& x, const Tensor& linear_weight, const Tensor& target,
    std::optional<Tensor> linear_bias, std::optional<Tensor> weight, const Tensor& lse, int64_t ignore_index,
    std::string reduction, double label_smoothing, double lse_square_scale, double softcap,
    std::optional<int64_t> max_logits_bytes, bool at_once, bool needs_x, bool needs_weight, bool needs_bias) {
  constexpr const char* op = "linear_cross_entropy_backward";
  check_tensors(op, {{"grad_loss", grad_loss},
                     {"x", x},
                     {"linear_weight", linear_weight},
                     {"target", target},
                     {"linear_bias", linear_bias},
                     {"weight", weight},
                     {"lse", lse}});
  const Problem p = check(op, x, linear_weight, target, linear_bias, weight, reduction,
                          {ignore_index, label_smoothing, lse_square_scale, softcap}, max_logits_bytes, at_once);
  const CrossEntropyCall& call = p.call;
  check_wide(op, {"lse", lse}, call.dtype);
  check_per_row(op, {"lse", lse}, {"x", x});
  const Tensor of_loss = check_grad_loss(op, grad_loss, {"x", x}, call.reduced, call.dtype),
               every_lse = aten::contiguous(lse);
  const Wanted wanted{needs_x, needs_weight, needs_bias && linear_bias};
  const ScalarType type = p.chunk_rows < p.rows() ? wide(call.dtype) : x.scalar_type();
  Gradients grads(p, x, wanted, is_meta(x) ? x.scalar_type() : type);
  if (is_meta(x)) return {grads.x, grads.weight, grads.bias};
  CrossEntropyParams params = call.params;
  params.lse = const_cast<void*>(every_lse.const_data_ptr());
  params.grad_loss = of_loss.const_data_ptr();
  params.grad_loss_stride = call.reduced ? 0 : 1;
  if (call.sums) run_sums(call, call.mean, *call.sums);
  for_chunks(p, params, [&](const Tensor& logits, int64_t row, CrossEntropyParams& chunk) {
    chunk.grad = logits.mutable_data_ptr();
    run_backward(call, chunk);
    grads.add(logits, row);
  });
  const auto rounded = [&](const Tensor& sum) {
    if (dtype_code(sum) == dtype_code(x)) return sum;
    Tensor result = empty(sum.sizes(), dtype_code(x), x);
    aten::copy_(result, sum);
    return result;
  };
  return {grads.x, rounded(grads.weight), rounded(grads.bias)};
}

void register_ops(StableLibrary& ops) {
  implement_differentiable(ops, "linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
  ops.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
