// RMSNorm and rotary embedding on the CPU, computed in float32 (float64 for float64). A row x is a head of a token, or
// all heads of a token. With r = rounding to the dtype, n = x / sqrt(mean(x^2) + eps) and m what the weight is
// multiplied by, r(n) with cast_before_weight, else n:
//   y = r(m (offset + weight)), and for every pair (a, b) of y, as in cpu/rope.cpp:
//   a' = r(r(a cos_a) - r(b sin_a)), b' = r(r(b cos_b) + r(a sin_b)); with float_angles only the sums are rounded.
// Backward: g = the gradient rotated by the transpose, all products and sums rounded to the dtype, as autograd does in
// either case; then RMSNorm's, with h = g (offset + weight):
//   grad_x = r((h - n mean(h n)) / sqrt(mean(x^2) + eps)), grad_weight = r(sum over rows of g m).
// A row is converted once and stays in cache. The sum of squares is that of cpu/norm.cpp, bit for bit.
#include "cpu/rms_norm_rope.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/head_norm.h"
#include "cpu/row_sums.h"
#include "cpu/rows.h"

namespace llmk::cpu {
namespace {

template <typename T>
inline void narrow_all(const Wide<T>* source, int64_t count, LoopType<T>* buffer, T* target) {
  LoopType<T>* out = output_buffer(target, buffer);
  for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(source[i]);
  store(out, count, target);
}

// Where the heads of a token are.
struct Strides {
  int64_t batch, token, head;
};

// The rows of q or of k, one at a time.
template <typename T>
struct Rows {
  using A = Wide<T>;

  Rows(const RmsNormRopeParams& p, const RopeTensor& tensor, const HeadNorm& norm)
      : tensor(tensor),
        norm(norm),
        of_token(p.row_wise ? 1 : tensor.heads),
        heads(p.row_wise ? tensor.heads : 1),
        dim(p.rope.head_dim),
        scale(norm_scale<T>(norm.weight, norm.cols, p.norm.weight_offset)),
        x(norm.cols),
        other(norm.cols),
        rotated(norm.cols),
        buffer(norm.cols) {}

  // Row `row` of a token, of a tensor with these strides.
  void load_row(const void* data, const Strides& strides, int64_t batch, int64_t token, int64_t row, A* target) {
    const T* source = static_cast<const T*>(data) + batch * strides.batch + token * strides.token;
    for (int64_t head = 0; head < heads; ++head) {
      widen_all(source + (row * heads + head) * strides.head, dim, buffer.data(), target + head * dim);
    }
  }
  void store_row(const A* source, int64_t batch, int64_t token, int64_t row) {
    T* target = static_cast<T*>(tensor.out) + batch * tensor.out_batch + token * tensor.out_token;
    for (int64_t head = 0; head < heads; ++head) {
      narrow_all(source + head * dim, dim, buffer.data(), target + (row * heads + head) * tensor.out_head);
    }
  }
  Strides in_strides() const { return {tensor.in_batch, tensor.in_token, tensor.in_head}; }
  Strides x_strides() const { return {norm.x_batch, norm.x_token, norm.x_head}; }

  const RopeTensor& tensor;
  const HeadNorm& norm;
  const int64_t of_token, heads, dim;       // rows of a token, heads of a row
  std::vector<A> scale, x, other, rotated;  // offset + weight; three rows
  std::vector<LoopType<T>> buffer;
};

// cos and sin of one token, an element for each of the first rotary_dim dimensions.
template <typename T>
struct Angles {
  using A = Wide<T>;
  explicit Angles(const RmsNormRopeParams& p)
      : cos(p.rope.rotary_dim), sin(p.rope.rotary_dim), buffer(p.rope.rotary_dim) {}

  void load(const RmsNormRopeParams& p, int64_t batch, int64_t token) {
    const RopeParams& rope = p.rope;
    if (rope.position_ids == nullptr) {
      load_row(p, rope.cos, batch * rope.cos_batch + token * rope.cos_token, cos.data());
      load_row(p, rope.sin, batch * rope.sin_batch + token * rope.sin_token, sin.data());
      return;
    }
    const int64_t at = batch * rope.positions_batch + token * rope.positions_token;
    const int64_t position = rope.position_ids_int64 ? static_cast<const int64_t*>(rope.position_ids)[at]
                                                     : static_cast<const int32_t*>(rope.position_ids)[at];
    load_row(p, rope.cos, position * rope.cos_row, cos.data());
    load_row(p, rope.sin, position * rope.sin_row, sin.data());
  }

  std::vector<A> cos, sin;

 private:
  void load_row(const RmsNormRopeParams& p, const void* table, int64_t offset, A* target) {
    const int64_t width = p.rope.half_width ? p.rope.rotary_dim / 2 : p.rope.rotary_dim;
    if (p.float_angles) {
      const float* source = static_cast<const float*>(table) + offset;
      // A NaN as narrow() knows it.
      for (int64_t i = 0; i < width; ++i) target[i] = source[i] == source[i] ? source[i] : A(NAN);
    } else {
      widen_all(static_cast<const T*>(table) + offset, width, buffer.data(), target);
    }
    if (!p.rope.half_width) return;
    for (int64_t i = width; i-- > 0;) {  // from the end, since the target is the source
      if (p.rope.interleaved) {
        target[2 * i] = target[2 * i + 1] = target[i];
      } else {
        target[width + i] = target[i];
      }
    }
  }

  std::vector<LoopType<T>> buffer;
};

// Rotates the first rotary_dim elements of a head and copies the others. kStep: from one pair to the next, 2 if
// interleaved. Two loops, since in one loop GCC would fuse multiplications and additions in spite of -ffp-contract=off.
template <typename T, bool kRoundsProducts, int kStep>
inline void rotate(const RopeParams& p, const Wide<T>* __restrict head, const Wide<T>* __restrict cos,
                   const Wide<T>* __restrict sin, Wide<T>* __restrict out) {
  using A = Wide<T>;
  const auto product = [](A a, A b) { return kRoundsProducts ? rounded<T>(a * b) : a * b; };
  const int64_t half = p.rotary_dim / 2, distance = kStep == 2 ? 1 : half;
  // The sines by which b and a are multiplied, and their signs.
  const A* const of_b = p.transposed ? sin + distance : sin;
  const A* const of_a = p.transposed ? sin : sin + distance;
  const A sign = p.transposed ? A(1) : A(-1);
  for (int64_t i = 0; i < half; ++i) {
    const int64_t a = i * kStep, b = a + distance;
    out[a] = rounded<T>(product(head[a], cos[a]) + sign * product(head[b], of_b[a]));
  }
  for (int64_t i = 0; i < half; ++i) {
    const int64_t a = i * kStep, b = a + distance;
    out[b] = rounded<T>(product(head[b], cos[b]) - sign * product(head[a], of_a[a]));
  }
  std::copy(head + p.rotary_dim, head + p.head_dim, out + p.rotary_dim);
}

// Rotates all heads of a row.
template <typename T>
inline void rotate_row(const RmsNormRopeParams& p, const Wide<T>* row, int64_t heads, const Angles<T>& angles,
                       Wide<T>* out) {
  // The backward pass rounds the products in any case: they are gradients of a tensor of the dtype.
  const bool rounds = !p.float_angles || p.rope.transposed;
  const bool interleaved = p.rope.interleaved;
  for (int64_t head = 0; head < heads; ++head, row += p.rope.head_dim, out += p.rope.head_dim) {
    const auto turn = [&](auto rounds_products, auto step) {
      rotate<T, decltype(rounds_products)::value, decltype(step)::value>(p.rope, row, angles.cos.data(),
                                                                         angles.sin.data(), out);
    };
    const auto turn_by = [&](auto step) {
      if (rounds) turn(std::true_type{}, step);
      if (!rounds) turn(std::false_type{}, step);
    };
    if (interleaved) turn_by(std::integral_constant<int, 2>{});
    if (!interleaved) turn_by(std::integral_constant<int, 1>{});
  }
}

// Calls visit(rows, batch, token, row) for every row of the tokens [begin, end), with the angles of its token loaded.
template <typename T, typename Visit>
inline void for_rows(const RmsNormRopeParams& p, int64_t begin, int64_t end, Rows<T>& q, Rows<T>& k, Angles<T>& angles,
                     const Visit& visit) {
  for (int64_t flat = begin; flat < end; ++flat) {
    const int64_t batch = flat / p.rope.tokens, token = flat % p.rope.tokens;
    angles.load(p, batch, token);
    for (Rows<T>* rows : {&q, &k}) {
      if (rows->norm.cols == 0) continue;
      for (int64_t row = 0; row < rows->of_token; ++row) visit(*rows, batch, token, row);
    }
  }
}

template <typename T>
inline void forward(const RmsNormRopeParams& p, int64_t begin, int64_t end) {
  Rows<T> q(p, p.rope.q, p.q), k(p, p.rope.k, p.k);
  Angles<T> angles(p);
  for_rows(p, begin, end, q, k, angles, [&](Rows<T>& rows, int64_t batch, int64_t token, int64_t row) {
    Wide<T>* const x = rows.x.data();
    rows.load_row(rows.tensor.in, rows.in_strides(), batch, token, row, x);
    normalize<T>(x, rows.scale.data(), rows.norm.cols, p.norm);
    rotate_row(p, x, rows.heads, angles, rows.rotated.data());
    rows.store_row(rows.rotated.data(), batch, token, row);
  });
}

template <typename T>
inline void backward(const RmsNormRopeParams& p, int64_t chunk_begin, int64_t chunk_end) {
  using A = Wide<T>;
  Rows<T> q(p, p.rope.q, p.q), k(p, p.rope.k, p.k);
  Angles<T> angles(p);
  const bool cast_before_weight = p.norm.cast_before_weight;
  const double eps = p.norm.eps;
  const int64_t all = p.rope.batch * p.rope.tokens;
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    const auto partial = [&](const HeadNorm& norm) {
      return norm.grad_weight ? static_cast<A*>(norm.partials) + chunk * norm.cols : nullptr;
    };
    for (const HeadNorm* norm : {&p.q, &p.k}) {
      if (A* const sums = partial(*norm)) std::fill_n(sums, norm->cols, A(0));
    }
    const int64_t begin = all * chunk / p.partial_rows, end = all * (chunk + 1) / p.partial_rows;
    for_rows(p, begin, end, q, k, angles, [&](Rows<T>& rows, int64_t batch, int64_t token, int64_t row) {
      A *const x = rows.x.data(), *const g = rows.rotated.data(), *const scale = rows.scale.data();
      const HeadNorm& norm = rows.norm;
      const int64_t cols = norm.cols;
      rows.load_row(norm.x, rows.x_strides(), batch, token, row, x);
      rows.load_row(rows.tensor.in, rows.in_strides(), batch, token, row, rows.other.data());
      rotate_row(p, rows.other.data(), rows.heads, angles, g);
      const A rstd = reciprocal_rms(x, cols, eps);
      A products = 0;
      for_blocks<kBlock>(cols, [&](int64_t from, int64_t count) {
        const A *xs = x + from, *gs = g + from, *scales = scale + from;
        products += sum_of<A>(count, [=](int64_t i) { return gs[i] * scales[i] * xs[i]; });
      });
      const A projection = products * rstd / static_cast<A>(cols);  // mean(h n)
      if (A* const sums = partial(norm)) {
        for (int64_t i = 0; i < cols; ++i) {
          const A n = x[i] * rstd;
          sums[i] += g[i] * (cast_before_weight ? rounded<T>(n) : n);
        }
      }
      for (int64_t i = 0; i < cols; ++i) x[i] = rstd * (g[i] * scale[i] - x[i] * rstd * projection);
      rows.store_row(x, batch, token, row);
    });
  }
}

}  // namespace

void rms_norm_rope(const RmsNormRopeParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { forward<typename decltype(tag)::type>(params, begin, end); });
}

void rms_norm_rope_backward(const RmsNormRopeParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) { backward<typename decltype(tag)::type>(params, begin, end); });
}

void rms_norm_rope_grad_weight(const HeadNorm& norm, int64_t partial_rows, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_kernel(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    add_partials(static_cast<const Wide<T>*>(norm.partials), partial_rows, norm.cols, begin, end,
                 static_cast<T*>(norm.grad_weight));
  });
}

}  // namespace llmk::cpu
