// What every binding needs: argument checks that name the op, dtypes, rows, allocation.
#pragma once
#include <array>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "aten.h"
#include "dtype.h"

namespace llmk {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// LLMK_CHECK(ok, "rms_norm", "x must have a dimension"): raised in Python as
// RuntimeError("rms_norm: x must have a dimension").
#define LLMK_CHECK(condition, op, ...)               \
  do {                                               \
    if (!(condition)) ::llmk::fail(op, __VA_ARGS__); \
  } while (false)

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

inline std::string text(IntHeaderOnlyArrayRef values) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  text << "]";
  return text.str();
}
inline std::string shape(const Tensor& tensor) { return text(tensor.sizes()); }

// The dtype as torch's C functions have it: cheaper to get, compare and pass on than a ScalarType.
inline int32_t dtype_code(const Tensor& tensor) {
  int32_t code = 0;
  aten::check(aoti_torch_get_dtype(tensor.get(), &code), "get_dtype");
  return code;
}

inline const char* name(ScalarType type) { return torch::headeronly::toString(type); }

// A tensor argument and what to call it in an error.
struct Argument {
  const char* name;
  const Tensor& tensor;
};

inline Dtype to_dtype(const char* op, const Argument& argument) {
  const ScalarType type = argument.tensor.scalar_type();
  switch (type) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Double:
      LLMK_CHECK(!argument.tensor.is_cuda(), op, argument.name, " is float64, which is supported on the CPU only");
      return Dtype::kFloat64;
    default: break;
  }
  fail(op, argument.name, " must be float32, float16, bfloat16 (or float64 on the CPU), got ", name(type));
}

inline void check_same_device(const char* op, const Argument& argument, const Argument& model) {
  const bool same = argument.tensor.is_cuda() == model.tensor.is_cuda() &&
                    argument.tensor.get_device_index() == model.tensor.get_device_index();
  LLMK_CHECK(same, op, argument.name, " must be on the device of ", model.name);
}

inline void check_same_dtype_and_device(const char* op, const Argument& argument, const Argument& model) {
  check_same_device(op, argument, model);
  LLMK_CHECK(dtype_code(argument.tensor) == dtype_code(model.tensor), op, argument.name, " must have the dtype of ",
             model.name, ", ", name(model.tensor.scalar_type()), ", got ", name(argument.tensor.scalar_type()));
}

inline void check_like(const char* op, const Argument& argument, const Argument& model) {
  check_same_dtype_and_device(op, argument, model);
  LLMK_CHECK(argument.tensor.sizes().equals(model.tensor.sizes()), op, argument.name, " must have the shape of ",
             model.name, ", ", shape(model.tensor), ", got ", shape(argument.tensor));
}

inline int32_t dtype_code(ScalarType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

// An uninitialised contiguous tensor on the device of `like`.
inline Tensor empty(IntHeaderOnlyArrayRef sizes, int32_t dtype, const Tensor& like) {
  std::array<int64_t, 8> few;
  std::vector<int64_t> many(sizes.size() > few.size() ? sizes.size() : 0);
  int64_t* const strides = many.empty() ? few.data() : many.data();
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return aten::empty_strided(sizes, strides, dtype, like);
}
inline Tensor empty(IntHeaderOnlyArrayRef sizes, ScalarType type, const Tensor& like) {
  return empty(sizes, dtype_code(type), like);
}
inline Tensor empty_rows(const Tensor& like) { return empty(like.sizes(), dtype_code(like), like); }

inline const void* data(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// A tensor as a matrix of its last dimension: rows `stride` elements apart, columns contiguous. Views that are such a
// matrix are taken as they are, anything else is copied.
struct Rows {
  Tensor tensor;
  int64_t rows, cols, stride;

  const void* data() const { return tensor.const_data_ptr(); }
};

inline Rows as_rows(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t last = tensor.dim() - 1, cols = sizes[last];
  int64_t rows = 1, stride = cols;
  bool regular = cols <= 1 || strides[last] == 1;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (rows == 1) stride = strides[i];
    regular = regular && strides[i] == stride * rows;
    rows *= sizes[i];
  }
  if (regular || tensor.numel() == 0) return {tensor, rows, cols, stride};
  return {aten::contiguous(tensor), rows, cols, cols};
}

inline bool has_unit_last_stride(const Tensor& tensor) {
  return tensor.size(tensor.dim() - 1) <= 1 || tensor.stride(tensor.dim() - 1) == 1;
}

// The tensor, or a contiguous copy.
inline Tensor with_unit_last_stride(const Tensor& tensor) {
  return has_unit_last_stride(tensor) ? tensor : aten::contiguous(tensor);
}

// A view of the same memory, `offset` elements further on.
inline Tensor view(const Tensor& tensor, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides, int64_t offset) {
  AtenTensorHandle handle = nullptr;
  aten::check(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                             strides.data(), offset, &handle),
              "reinterpret_tensor");
  return Tensor(handle);
}

}  // namespace llmk
