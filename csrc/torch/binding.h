// Shared by all bindings: argument checks whose errors name the op, dtypes, rows, allocation.
#pragma once
#include <array>
#include <cmath>
#include <initializer_list>
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
// RuntimeError("rms_norm: x must have a dimension"), from which the public functions make a ValueError where the
// argument is no tensor: the type of any other C++ exception is lost on its way through some versions of torch.
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

// Whether the tensor has no memory: a fake runs the checks of an op.
inline bool is_meta(const Tensor& tensor) { return !tensor.is_cuda() && !tensor.is_cpu(); }

inline const char* name(ScalarType type) { return torch::headeronly::toString(type); }

// The name of a tensor in errors: "weight", or "weights[2]" in a list.
struct Name {
  Name(const char* text, int64_t index = -1) : text(text), index(index) {}

  const char* text;
  int64_t index;
};

inline std::ostream& operator<<(std::ostream& out, const Name& name) {
  out << name.text;
  return name.index < 0 ? out : out << "[" << name.index << "]";
}

enum class Access { kRead, kWrite };

// A tensor argument of an op; empty if it is optional and was not given.
class Argument {
 public:
  Argument(Name name, const Tensor& tensor, Access access = Access::kRead)
      : name(name), access(access), tensor_(&tensor) {}
  Argument(Name name, const std::optional<Tensor>& tensor, Access access = Access::kRead)
      : name(name), access(access), tensor_(tensor ? &*tensor : nullptr) {}

  explicit operator bool() const { return tensor_ != nullptr; }
  const Tensor& operator*() const { return *tensor_; }
  const Tensor* operator->() const { return tensor_; }
  std::optional<Tensor> optional() const { return tensor_ ? std::optional(*tensor_) : std::nullopt; }

  Name name;
  Access access;

 private:
  const Tensor* tensor_;
};

// Every op begins with this. Checks that all arguments are tensors on the device of the first, that no argument which
// the op writes shares memory with another argument, and that no two elements of it share memory.
void check_tensors(const char* op, const Argument* arguments, size_t count);
inline void check_tensors(const char* op, std::initializer_list<Argument> arguments) {
  check_tensors(op, arguments.begin(), arguments.size());
}

inline Dtype to_dtype(const char* op, const Argument& argument) {
  const ScalarType type = argument->scalar_type();
  switch (type) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Double:
      LLMK_CHECK(!argument->is_cuda(), op, argument.name, " is float64, which is supported on the CPU only");
      return Dtype::kFloat64;
    default: break;
  }
  fail(op, argument.name, " must be float32, float16, bfloat16 (or float64 on the CPU), got ", name(type));
}

inline void check_dtype(const char* op, const Argument& argument, const Argument& model) {
  LLMK_CHECK(dtype_code(*argument) == dtype_code(*model), op, argument.name, " must have the dtype of ", model.name,
             ", ", name(model->scalar_type()), ", got ", name(argument->scalar_type()));
}

inline void check_like(const char* op, const Argument& argument, const Argument& model) {
  check_dtype(op, argument, model);
  LLMK_CHECK(argument->sizes().equals(model->sizes()), op, argument.name, " must have the shape of ", model.name, ", ",
             shape(*model), ", got ", shape(*argument));
}

// The dtype of `model`, and one dimension; or nothing, for one that is optional.
inline void check_vector(const char* op, const Argument& argument, const Argument& model, int64_t size,
                         const char* meaning) {
  if (!argument) return;
  check_dtype(op, argument, model);
  LLMK_CHECK(argument->dim() == 1 && argument->size(0) == size, op, argument.name, " must have shape [", size, "] (",
             meaning, "), got ", shape(*argument));
}

inline void check_finite(const char* op, const char* name, double value) {
  LLMK_CHECK(std::isfinite(value), op, name, " must be finite, got ", value);
}

inline void check_not_negative(const char* op, const char* name, double value) {
  LLMK_CHECK(std::isfinite(value) && value >= 0, op, name, " must be finite and at least 0, got ", value);
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

// For an argument that is written to by its rows.
inline void check_rows_in_place(const char* op, const Argument& argument) {
  LLMK_CHECK(as_rows(*argument).tensor.get() == argument->get(), op, argument.name,
             " must have contiguous columns and rows a constant distance apart, as it is written to, got shape ",
             shape(*argument), " with strides ", text(argument->strides()));
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
