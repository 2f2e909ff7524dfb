// fp8_linear: y = (x x_scale) (weight weight_scale)^T + bias, where x and weight are FP8.
//
//   where                          | product                                   | scales and bias
//   -------------------------------|-------------------------------------------|--------------------
//   GPU, weight of e4m3, bfloat16  | _scaled_mm of torch, scales by rows       | in the product
//   the same, float16              | the same, where cuBLASLt has that         | in the product
//   GPU, any other                 | _scaled_mm of torch, unit scales, float32 | a kernel
//   CPU                            | mm of torch in float32, of a part of the  | a function
//                                  | weight at a time                          |
//
// The product is torch's, since it takes cuBLASLt or CUTLASS by GPU and version, and its op has had this signature from
// torch 2.10 to 2.15. It takes sizes and rows that are multiples of 16 bytes, from addresses that are; others are
// copied and padded by zeros.
#include "backend.h"
#include "cpu/fp8.h"
#include "params/fp8.h"
#if LLMK_CUDA
#include "kernels/launch.h"
#include "kernels/quant/fp8.h"

// Of the cuBLASLt that torch has loaded; weak, since a torch without CUDA has none.
extern "C" size_t cublasLtGetVersion() __attribute__((weak));
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

struct Fp8Linear {
  Tensor x, weight, x_scale, weight_scale;
  std::optional<Tensor> bias;
  ScalarType out_type;
  bool use_fast_accum;
};

constexpr const char* kOp = "fp8_linear";

ScalarType to_out_type(const std::string& word) {
  if (word == "bfloat16") return ScalarType::BFloat16;
  if (word == "float16") return ScalarType::Half;
  if (word == "float32") return ScalarType::Float;
  fail(kOp, "out_dtype must be bfloat16, float16 or float32, got ", word);
}

Dtype to_dtype(ScalarType type) {
  return type == ScalarType::Float ? Dtype::kFloat32 : type == ScalarType::Half ? Dtype::kFloat16 : Dtype::kBFloat16;
}

Fp8Format format_of(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Float8_e5m2 ? Fp8Format::kE5M2 : Fp8Format::kE4M3;
}

void check_fp8(const Argument& argument) {
  const ScalarType type = argument->scalar_type();
  LLMK_CHECK(type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2, kOp, argument.name,
             " must be float8_e4m3fn or float8_e5m2, got ", name(type));
}

void check_scale(const Argument& scale, IntHeaderOnlyArrayRef sizes, const char* meaning) {
  LLMK_CHECK(scale->scalar_type() == ScalarType::Float, kOp, scale.name, " must be float32, got ",
             name(scale->scalar_type()));
  LLMK_CHECK(scale->sizes().equals(sizes), kOp, scale.name, " must have shape ", text(sizes), " (", meaning, "), got ",
             shape(*scale));
}

void check(const Fp8Linear& f) {
  check_tensors(
      kOp,
      {{"x", f.x}, {"weight", f.weight}, {"x_scale", f.x_scale}, {"weight_scale", f.weight_scale}, {"bias", f.bias}});
  check_fp8({"x", f.x});
  check_fp8({"weight", f.weight});
  LLMK_CHECK(f.x.dim() >= 1, kOp, "x must have at least one dimension, got a scalar");
  const int64_t k = f.x.size(f.x.dim() - 1);
  LLMK_CHECK(f.weight.dim() == 2 && f.weight.size(1) == k, kOp, "weight must have shape [N, ", k,
             "] (x.size(-1)), got ", shape(f.weight));
  std::vector<int64_t> per_token(f.x.sizes().begin(), f.x.sizes().end());
  per_token.back() = 1;
  check_scale({"x_scale", f.x_scale}, per_token, "one per row of x");
  check_scale({"weight_scale", f.weight_scale}, {f.weight.size(0), 1}, "one per row of weight");
  if (!f.bias) return;
  LLMK_CHECK(f.bias->scalar_type() == f.out_type, kOp, "bias must have the dtype of the result, ", name(f.out_type),
             ", got ", name(f.bias->scalar_type()));
  LLMK_CHECK(f.bias->dim() == 1 && f.bias->size(0) == f.weight.size(0), kOp, "bias must have shape [", f.weight.size(0),
             "] (weight.size(0)), got ", shape(*f.bias));
}

const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

// Everything but the product's sum and where it is, for columns [begin, end).
Fp8EpilogueParams epilogue(const Fp8Linear& f, const Tensor& y, int64_t rows, int64_t begin, int64_t end) {
  const int64_t cols = f.weight.size(0), bytes = begin * y.element_size();
  Fp8EpilogueParams params{};
  params.x_scale = floats(f.x_scale);
  params.weight_scale = floats(f.weight_scale) + begin;
  if (f.bias) params.bias = static_cast<const char*>(f.bias->const_data_ptr()) + bytes;
  params.y = static_cast<char*>(y.mutable_data_ptr()) + bytes;
  params.rows = rows;
  params.cols = end - begin;
  params.y_stride = cols;
  return params;
}

// The rows [begin, end) of a matrix of FP8 as floats.
Tensor widened(const Rows& source, int64_t begin, int64_t end) {
  const Tensor wide = empty({end - begin, source.cols}, ScalarType::Float, source.tensor);
  const Fp8Format format = format_of(source.tensor);
  const auto* const from = static_cast<const char*>(source.data());
  auto* const to = static_cast<float*>(wide.mutable_data_ptr());
  parallel_for(end - begin, source.cols, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      cpu::fp8_widen(from + (begin + row) * source.stride, format, source.cols, to + row * source.cols);
    }
  });
  return wide;
}

Tensor on_cpu(const Fp8Linear& f, IntHeaderOnlyArrayRef sizes) {
  const Tensor y = empty(sizes, f.out_type, f.x);
  constexpr int64_t kElements = int64_t{1} << 22;  // of the weight that are floats at a time
  const Rows x = as_rows(f.x), weight = as_rows(f.weight);
  const Tensor wide_x = widened(x, 0, x.rows);
  const int64_t step = std::max<int64_t>(16, kElements / std::max<int64_t>(1, weight.cols));
  for (int64_t begin = 0; begin < weight.rows; begin += step) {
    const int64_t end = std::min(weight.rows, begin + step);
    const Tensor part = widened(weight, begin, end), acc = empty({x.rows, end - begin}, ScalarType::Float, f.x);
    aten::mm_out(acc, wide_x, view(part, {weight.cols, end - begin}, {1, weight.cols}, 0));
    Fp8EpilogueParams params = epilogue(f, y, x.rows, begin, end);
    params.acc = floats(acc);
    params.acc_stride = params.cols;
    parallel_for(params.rows, params.cols,
                 [&](int64_t first, int64_t last) { cpu::fp8_epilogue(params, to_dtype(f.out_type), first, last); });
  }
  return y;
}

#if LLMK_CUDA
int64_t padded(int64_t size) { return std::max<int64_t>(16, (size + 15) / 16 * 16); }

// A matrix [rows, cols] whose rows are aligned to 16 bytes: the tensor itself, or a copy filled up with zeros.
Tensor aligned(const Tensor& tensor, int64_t rows, int64_t cols) {
  const Rows given = as_rows(tensor);
  const int64_t stride = given.rows > 1 ? given.stride : given.cols, width = given.tensor.element_size();
  const Tensor matrix = view(given.tensor, {given.rows, given.cols}, {stride, 1}, 0);
  const bool fits = given.rows == rows && given.cols == cols;
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(given.data()) % 16 == 0 && (given.rows == 1 || stride * width % 16 == 0);
  if (fits && is_aligned && stride >= cols) return matrix;
  Tensor copy = empty({rows, cols}, tensor.scalar_type(), tensor);
  if (!fits) aten::zero_(copy);
  if (tensor.numel() > 0) aten::copy_(view(copy, {given.rows, given.cols}, {cols, 1}, 0), matrix);
  return copy;
}

// A vector as a matrix of one row, filled up with zeros.
std::optional<Tensor> aligned_row(const std::optional<Tensor>& vector, int64_t cols) {
  if (!vector) return std::nullopt;
  return aligned(view(*vector, {1, vector->numel()}, {vector->numel(), 1}, 0), 1, cols);
}

// Whether the product itself takes scales by rows. torch's CUTLASS kernels do for a weight of e4m3 and a result of
// bfloat16, cuBLASLt from 12.9 on for float16, too, on a Hopper GPU.
bool scales_by_rows(const Fp8Linear& f, int capability) {
  if (format_of(f.weight) != Fp8Format::kE4M3) return false;
  if (f.out_type == ScalarType::BFloat16) return true;
  return f.out_type == ScalarType::Half && capability / 10 == 9 && cublasLtGetVersion && cublasLtGetVersion() >= 120900;
}

Tensor on_cuda(const Fp8Linear& f, IntHeaderOnlyArrayRef sizes, cudaStream_t stream) {
  int capability = 0;  // the device's, not that of this library's code: the product is torch's
  check_cuda(kOp, kernels::device_capability(capability));
  LLMK_CHECK(capability >= 89, kOp, "products of FP8 need a GPU of compute capability 8.9 or later, got ",
             capability / 10, ".", capability % 10);
  const int64_t n = f.weight.size(0), k = padded(f.weight.size(1)), rows = f.x_scale.numel(), cols = padded(n);
  const Tensor x = aligned(f.x, rows, k), weight = aligned(f.weight, cols, k);
  const Tensor transposed = view(weight, {k, cols}, {1, weight.stride(0)}, 0);
  if (scales_by_rows(f, capability)) {
    const Tensor x_scale = view(*aligned_row(f.x_scale, rows), {rows, 1}, {1, 1}, 0);
    const Tensor weight_scale = *aligned_row(f.weight_scale, cols);
    std::optional<Tensor> bias = aligned_row(f.bias, cols);
    if (bias) bias = view(*bias, {cols}, {1}, 0);
    const Tensor y = aten::scaled_mm(x, transposed, x_scale, weight_scale, bias, f.out_type, dtype_code(f.out_type),
                                     f.use_fast_accum);
    std::vector<int64_t> strides(sizes.size());
    for (int64_t i = sizes.size() - 1, stride = 1; i >= 0; i--) {
      strides[i] = stride;
      stride *= i + 1 == static_cast<int64_t>(sizes.size()) ? cols : sizes[i];
    }
    const Tensor unpadded = view(y, sizes, strides, 0);
    return cols == n ? unpadded : aten::contiguous(unpadded);
  }
  const Tensor one = empty({}, ScalarType::Float, f.x), y = empty(sizes, f.out_type, f.x);
  aten::fill_(one, 1.0);
  const Tensor acc = aten::scaled_mm(x, transposed, one, one, std::nullopt, ScalarType::Float,
                                     dtype_code(ScalarType::Float), f.use_fast_accum);
  Fp8EpilogueParams params = epilogue(f, y, rows, 0, n);
  params.acc = floats(acc);
  params.acc_stride = cols;
  check_cuda(kOp, kernels::fp8_epilogue(params, to_dtype(f.out_type), stream));
  return y;
}
#endif

Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& x_scale, const Tensor& weight_scale,
                  std::optional<Tensor> bias, std::string out_dtype, bool use_fast_accum) {
  Fp8Linear f{x, weight, x_scale, weight_scale, bias, to_out_type(out_dtype), use_fast_accum};
  check(f);
  const bool both_e5m2 = format_of(x) == Fp8Format::kE5M2 && format_of(weight) == Fp8Format::kE5M2;
  LLMK_CHECK(!both_e5m2 || !x.is_cuda(), kOp,
             "weight must be float8_e4m3fn where x is float8_e5m2: GPUs have no product of two float8_e5m2");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weight.size(0);
  const bool is_empty = weight.size(0) == 0 || x_scale.numel() == 0;
  if (is_empty || is_meta(x)) return empty(sizes, f.out_type, x);
  f.x_scale = aten::contiguous(f.x_scale);
  f.weight_scale = aten::contiguous(f.weight_scale);
  if (f.bias) f.bias = aten::contiguous(*f.bias);
  std::optional<Tensor> y;
  on_device(kOp, x, LLMK_CUDA_ONLY([&](auto stream) {
              y = on_cuda(f, sizes, stream);
              return cudaSuccess;
            }),
            [&] { y = on_cpu(f, sizes); });
  return *y;
}

void register_ops(StableLibrary& ops) { ops.impl("fp8_linear", TORCH_BOX(&fp8_linear)); }

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
