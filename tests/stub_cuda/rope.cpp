// Rotary embedding, alone and behind an RMSNorm of queries and keys, forward and backward, on the CPU: heads of any
// size, rotated in part or in whole, pairs of either kind, beside pages that no one may touch. Fails where a result is
// not that of the formula.
#include <deque>

#include "kernels/rope/rms_norm_rope.cu"
#include "kernels/rope/rms_norm_rope_backward.cu"
#include "kernels/rope/rope.cu"
#include "matrix.h"

using namespace llmk;
using namespace llmk::kernels;

namespace llmk::kernels {
namespace {
thread_local float group_sums[64 * 1024];
}
}  // namespace llmk::kernels

namespace {

int launches = 0;

struct Case {
  int64_t batch, tokens, q_heads, k_heads, head_dim, rotary_dim;
  int64_t gap;  // elements behind a head
  bool interleaved, half_width, by_position, at_end;
  bool row_wise = false, weighted = true;

  int64_t heads(bool is_q) const { return is_q ? q_heads : k_heads; }
  int64_t all_tokens() const { return batch * tokens; }
  // Where a token of all lies: behind each sequence is one that nothing touches.
  int64_t place(int64_t token) const { return token + token / tokens; }
};

// [batch, tokens, heads, head_dim], a row for each head.
struct Heads : Matrix {
  Heads(const Case& c, bool is_q)
      : Matrix(max((c.all_tokens() + c.batch) * c.heads(is_q), int64_t{1}), c.head_dim, c.head_dim + c.gap, c.at_end) {}
};

RopeTensor tensor(const Case& c, bool is_q, const Matrix& in, const Matrix& out) {
  const int64_t heads = c.heads(is_q), of_in = heads * in.stride, of_out = heads * out.stride;
  return {in.data(), out.data(), heads, (c.tokens + 1) * of_in, of_in, in.stride, (c.tokens + 1) * of_out,
          of_out,    out.stride};
}

// That what lies behind heads and behind sequences is as it was.
void check_gaps(const Case& c, bool is_q, Matrix& out, const char* what) {
  check_gaps(out, what);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads(is_q); ++h) {
      for (int64_t d = 0; d < c.head_dim; ++d) {
        check(out(((b + 1) * (c.tokens + 1) - 1) * c.heads(is_q) + h, d).bits, 0xffff, 1, what, b, d);
      }
    }
  }
}

// cos and sin, for each token or for each position, and what they do to a head.
struct Angles {
  static constexpr int64_t kPositions = 9;
  const Case& c;
  Matrix cos, sin;
  std::vector<int64_t> positions;

  explicit Angles(const Case& c)
      : c(c),
        cos(c.by_position ? kPositions : c.all_tokens(), width(c), width(c), c.at_end),
        sin(cos.rows, width(c), width(c), c.at_end) {
    cos.fill(), sin.fill();
    for (int64_t t = 0; t < c.all_tokens(); ++t) positions.push_back(t * 5 % kPositions);
  }
  static int64_t width(const Case& c) { return c.half_width ? c.rotary_dim / 2 : c.rotary_dim; }

  void give_to(RopeParams& p) {
    p.cos = cos.data(), p.sin = sin.data();
    p.position_ids = c.by_position ? positions.data() : nullptr, p.position_ids_int64 = true;
    p.positions_batch = c.tokens, p.positions_token = 1, p.table_rows = kPositions;
    p.cos_token = p.sin_token = p.cos_row = p.sin_row = width(c);
    p.cos_batch = p.sin_batch = c.tokens * width(c);
    p.batch = c.batch, p.tokens = c.tokens, p.head_dim = c.head_dim, p.rotary_dim = c.rotary_dim;
    p.half_width = c.half_width, p.interleaved = c.interleaved;
  }
  // `size`: of the terms of each element.
  void rotate(std::vector<double>& x, std::vector<double>& size, int64_t token, bool transposed) {
    const std::vector<double> old = x, old_size = size;
    const int64_t half = c.rotary_dim / 2, row = c.by_position ? positions[token] : token;
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = c.interleaved ? 2 * i : i, b = c.interleaved ? 2 * i + 1 : i + half;
      const int64_t at_a = c.half_width ? i : a, at_b = c.half_width ? i : b;
      const double sin_a = transposed ? -sin.value(row, at_b) : sin.value(row, at_a),
                   sin_b = transposed ? -sin.value(row, at_a) : sin.value(row, at_b);
      x[a] = old[a] * cos.value(row, at_a) - old[b] * sin_a;
      x[b] = old[b] * cos.value(row, at_b) + old[a] * sin_b;
      size[a] = old_size[a] * std::fabs(cos.value(row, at_a)) + old_size[b] * std::fabs(sin_a);
      size[b] = old_size[b] * std::fabs(cos.value(row, at_b)) + old_size[a] * std::fabs(sin_b);
    }
  }
};

using Row = std::vector<double>;

Row row_of(Matrix& m, int64_t r) {
  Row row;
  for (int64_t d = 0; d < m.cols; ++d) row.push_back(m.value(r, d));
  return row;
}
Row sizes(const Row& row) {
  Row result;
  for (const double x : row) result.push_back(std::fabs(x));
  return result;
}

void rotate_alone(const Case& c, bool transposed) {
  ++launches;
  Angles angles(c);
  Heads q(c, true), k(c, false), q_out(c, true), k_out(c, false);
  q.fill(), k.fill();
  RopeParams params{};
  params.q = tensor(c, true, q, q_out), params.k = tensor(c, false, k, k_out), params.transposed = transposed;
  angles.give_to(params);
  rope(params, Dtype::kBFloat16, nullptr);
  for (const bool is_q : {true, false}) {
    Matrix &in = is_q ? q : k, &out = is_q ? q_out : k_out;
    for (int64_t i = 0; i < c.all_tokens() * c.heads(is_q); ++i) {
      const int64_t token = i / c.heads(is_q), r = c.place(token) * c.heads(is_q) + i % c.heads(is_q);
      Row expected = row_of(in, r), size = sizes(expected);
      angles.rotate(expected, size, token, transposed);
      for (int64_t d = 0; d < c.head_dim; ++d)
        check(out.value(r, d), expected[d], size[d] + 1e-9, "rotated", r, c.head_dim);
    }
    check_gaps(c, is_q, out, "behind a rotated head");
  }
}

void normalize_and_rotate(const Case& c) {
  ++launches;
  const double eps = 1e-6, weight_offset = c.gap ? 1 : 0;
  const bool cast_before_weight = c.gap == 0;
  Angles angles(c);
  RmsNormRopeParams params{};
  angles.give_to(params.rope);
  params.norm = {eps, weight_offset, cast_before_weight}, params.row_wise = c.row_wise;
  std::deque<Heads> x, out, grad, grad_x;
  std::deque<Matrix> weight, grad_weight;
  for (const bool is_q : {true, false}) {
    const int64_t cols = (c.row_wise ? c.heads(is_q) : 1) * c.head_dim;
    for (auto* many : {&x, &out, &grad, &grad_x}) many->emplace_back(c, is_q);
    for (auto* many : {&weight, &grad_weight}) many->emplace_back(1, cols, cols, c.at_end);
    x.back().fill(), grad.back().fill(), weight.back().fill();
    (is_q ? params.q : params.k) = {c.weighted ? weight.back().data() : nullptr, cols};
  }
  params.rope.q = tensor(c, true, x[0], out[0]), params.rope.k = tensor(c, false, x[1], out[1]);
  rms_norm_rope(params, Dtype::kBFloat16, nullptr);

  params.rope.transposed = true;
  params.rope.q = tensor(c, true, grad[0], grad_x[0]), params.rope.k = tensor(c, false, grad[1], grad_x[1]);
  for (const int which : {0, 1}) {
    HeadNorm& norm = which == 0 ? params.q : params.k;
    const RopeTensor as_input = tensor(c, which == 0, x[which], x[which]);
    norm.x = x[which].data(), norm.x_batch = as_input.in_batch, norm.x_token = as_input.in_token;
    norm.x_head = as_input.in_head, norm.grad_weight = c.weighted ? grad_weight[which].data() : nullptr;
  }
  rms_norm_rope_backward_partial_rows(params, Dtype::kBFloat16, params.partial_rows);
  const int64_t of_q = params.partial_rows * params.q.cols, of_k = params.partial_rows * params.k.cols;
  gpu::Guarded partials((of_q + of_k) * sizeof(float), c.at_end, sizeof(float));
  params.q.partials = partials.data(), params.k.partials = static_cast<float*>(partials.data()) + of_q;
  rms_norm_rope_backward(params, Dtype::kBFloat16, nullptr);

  for (const int which : {0, 1}) {
    const bool is_q = which == 0;
    const int64_t heads = c.heads(is_q), of_row = c.row_wise ? heads : 1, cols = of_row * c.head_dim;
    Row of_weight(cols), size_of_weight(cols);
    const auto scale = [&](int64_t column) { return c.weighted ? weight_offset + weight[which].value(0, column) : 1; };
    for (int64_t i = 0; i < c.all_tokens() * heads; i += of_row) {
      const int64_t token = i / heads, first = c.place(token) * heads + i % heads;
      double squares = 0, product = 0, size_of_product = 0;
      std::vector<Row> g, size;
      for (int64_t h = 0; h < of_row; ++h) {
        const Row row = row_of(x[which], first + h);
        g.push_back(row_of(grad[which], first + h)), size.push_back(sizes(g[h]));
        angles.rotate(g[h], size[h], token, true);
        for (int64_t d = 0; d < c.head_dim; ++d) {
          squares += row[d] * row[d];
          product += g[h][d] * scale(h * c.head_dim + d) * row[d];
          size_of_product += size[h][d] * std::fabs(scale(h * c.head_dim + d) * row[d]);
        }
      }
      const double rstd = 1 / std::sqrt(squares / cols + eps);
      for (int64_t h = 0; h < of_row; ++h) {
        const Row row = row_of(x[which], first + h);
        Row y, size_of_y;
        for (int64_t d = 0; d < c.head_dim; ++d) y.push_back(row[d] * rstd * scale(h * c.head_dim + d));
        size_of_y = sizes(y);
        angles.rotate(y, size_of_y, token, false);
        for (int64_t d = 0; d < c.head_dim; ++d) {
          const int64_t column = h * c.head_dim + d;
          check(out[which].value(first + h, d), y[d], 2 * size_of_y[d] + 1e-9, "normalized", first, c.head_dim);
          const double n = row[d] * rstd, mean = product * rstd / cols, size_of_mean = size_of_product * rstd / cols;
          const double expected = rstd * (g[h][d] * scale(column) - n * mean);
          const double allowed = rstd * (size[h][d] * std::fabs(scale(column)) + std::fabs(n) * size_of_mean);
          check(grad_x[which].value(first + h, d), expected, 2 * allowed + 1e-9, "the gradient of x", first, c.head_dim);
          of_weight[column] += g[h][d] * n, size_of_weight[column] += size[h][d] * std::fabs(n);
        }
      }
    }
    check_gaps(c, is_q, out[which], "behind a normalized head");
    check_gaps(c, is_q, grad_x[which], "behind a head of the gradient");
    if (!c.weighted || heads == 0) continue;
    for (int64_t column = 0; column < cols; ++column) {
      check(grad_weight[which].value(0, column), of_weight[column], 2 * size_of_weight[column] + 1e-9,
            "the gradient of the weight", is_q, column);
    }
  }
}

}  // namespace

int main() {
  for (const bool interleaved : {false, true}) {
    for (const bool half_width : {false, true}) {
      for (const bool at_end : {false, true}) {
        const auto both = [&](Case c) {
          c.interleaved = interleaved, c.half_width = half_width, c.by_position = at_end, c.at_end = !at_end;
          for (const bool transposed : {false, true}) rotate_alone(c, transposed);
          for (const bool row_wise : {false, true}) {
            c.row_wise = row_wise, c.weighted = !(row_wise && half_width);
            normalize_and_rotate(c);
          }
        };
        both({1, 1, 4, 2, 128, 128, 0}), both({2, 3, 7, 1, 64, 32, 8}), both({1, 5, 3, 3, 80, 80, 3});
        both({2, 2, 2, 1, 6, 4, 0}), both({1, 70, 5, 2, 64, 64, 0}), both({3, 40, 1, 1, 96, 48, 0});
        both({1, 2, 40, 8, 128, 128, 0}), both({2, 1, 3, 0, 32, 32, 5}), both({1, 3, 2, 1, 7, 2, 0});
        if (half_width != at_end) both({3, 110, 7, 2, 128, 128, 0});  // many tokens
      }
    }
  }
  std::printf("%d launches, %d failures\n", launches, failures);
  return failures > 0;
}
