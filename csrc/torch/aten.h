// The ATen functions that the bindings call. Their errors reach Python with type and text, torch.OutOfMemoryError among
// them.
//
// torch's stable C functions catch every exception and return a code: the type is lost, before torch 2.13 the text too,
// and the exception is printed with its C++ frames. So functions that can fail are called by the symbols of the C++
// functions that the stable ones wrap. A symbol contains all types of the signature (here references, pointers,
// integers and optionals of integers), so a torch with another signature lacks the symbol. It does not contain how
// those types lie in memory, which is known of the releases up to kNewestTorch. All symbols are weak. If one is
// missing, or torch is newer, the stable function is called instead; tests/test_package.py reports such a torch.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#if LLMK_CUDA
#include "kernels/recorder.h"
#endif

// Of torch 2.13 and newer: the text of the last exception that a stable function has caught on this thread.
extern "C" const char* torch_exception_get_what_without_backtrace() __attribute__((weak));

namespace llmk::aten {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::stable::Tensor;

// Around each call that may launch a kernel: see recorder.h.
struct CaptureScope {
#if LLMK_CUDA
  CaptureScope() {
    if (recorder) recorder->begin_capture();
  }
  ~CaptureScope() {
    if (recorder) recorder->end_capture();
  }
  kernels::Recorder* const recorder = kernels::current_recorder;
#endif
};

// c10 and at types as they are passed. What has a destructor is returned through memory that the caller gives.
struct Array {
  const int64_t* data;
  size_t size;
};
struct Device {
  int8_t type, index;
};
struct NewTensor {
  void* impl;
  ~NewTensor() {}
};
struct OptionalTensor {
  void* impl;
  bool exists;
};
struct Scalar {
  alignas(16) char bytes[64];  // of which c10::Scalar takes 32
  ~Scalar() {}
};
using Code = std::optional<int8_t>;  // of a dtype, a layout, a memory format

namespace symbol {

#define LLMK_SYMBOL(name) __asm__(name) __attribute__((weak))
NewTensor empty_strided_cpu(Array sizes, Array strides, int8_t dtype, bool pinned)
    LLMK_SYMBOL("_ZN2at6detail17empty_strided_cpuEN3c108ArrayRefIlEES3_NS1_10ScalarTypeEb");
NewTensor empty_strided_cuda(Array sizes, Array strides, int8_t dtype, std::optional<Device> device)
    LLMK_SYMBOL("_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE");
NewTensor empty_like(AtenTensorHandle tensor, Code dtype, Code layout, std::optional<Device> device,
                     std::optional<bool> pinned, Code memory_format)
    LLMK_SYMBOL(
        "_ZN2at4_ops10empty_like4callERKNS_6TensorESt8optionalIN3c1010ScalarTypeEES5_INS6_6LayoutEES5_"
        "INS6_6DeviceEES5_IbES5_INS6_12MemoryFormatEE");
NewTensor contiguous(AtenTensorHandle tensor, int8_t memory_format)
    LLMK_SYMBOL("_ZN2at4_ops10contiguous4callERKNS_6TensorEN3c1012MemoryFormatE");
NewTensor linear(AtenTensorHandle x, AtenTensorHandle weight, const OptionalTensor& bias)
    LLMK_SYMBOL("_ZN2at4_ops6linear4callERKNS_6TensorES4_RKSt8optionalIS2_E");
NewTensor scaled_mm(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle a_scale, AtenTensorHandle b_scale,
                    const OptionalTensor& bias, const OptionalTensor& result_scale, Code dtype, bool fast_accumulation)
    LLMK_SYMBOL("_ZN2at4_ops10_scaled_mm4callERKNS_6TensorES4_S4_S4_RKSt8optionalIS2_ES8_S5_IN3c1010ScalarTypeEEb");
AtenTensorHandle zero_(AtenTensorHandle tensor) LLMK_SYMBOL("_ZN2at4_ops5zero_4callERNS_6TensorE");
AtenTensorHandle add_(AtenTensorHandle target, AtenTensorHandle other, const Scalar& factor)
    LLMK_SYMBOL("_ZN2at4_ops11add__Tensor4callERNS_6TensorERKS2_RKN3c106ScalarE");
AtenTensorHandle mm_out(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle out)
    LLMK_SYMBOL("_ZN2at4_ops6mm_out4callERKNS_6TensorES4_RS2_");
AtenTensorHandle mm_dtype_out(AtenTensorHandle a, AtenTensorHandle b, int8_t dtype, AtenTensorHandle out)
    LLMK_SYMBOL("_ZN2at4_ops12mm_dtype_out4callERKNS_6TensorES4_N3c1010ScalarTypeERS2_");
AtenTensorHandle addmm_out(AtenTensorHandle self, AtenTensorHandle a, AtenTensorHandle b, const Scalar& beta,
                           const Scalar& alpha, AtenTensorHandle out)
    LLMK_SYMBOL("_ZN2at4_ops9addmm_out4callERKNS_6TensorES4_S4_RKN3c106ScalarES8_RS2_");
AtenTensorHandle addmm_dtype_out(AtenTensorHandle self, AtenTensorHandle a, AtenTensorHandle b, int8_t dtype,
                                 const Scalar& beta, const Scalar& alpha, AtenTensorHandle out)
    LLMK_SYMBOL("_ZN2at4_ops15addmm_dtype_out4callERKNS_6TensorES4_S4_N3c1010ScalarTypeERKNS5_6ScalarES9_RS2_");
Scalar item(AtenTensorHandle tensor) LLMK_SYMBOL("_ZN2at4_ops4item4callERKNS_6TensorE");
#undef LLMK_SYMBOL

}  // namespace symbol

// The newest torch in which Scalar, Device and the others above are as they are declared here: 2.15, as
// TORCH_ABI_VERSION has it in its upper 16 bits. The same as NEWEST_TORCH in llmkernels/_library.py.
constexpr uint64_t kNewestTorch = 0x020f;

// Whether a function of `symbol` may be called.
template <typename Function>
bool is_known(Function* function) {
  static const bool is_known_torch = aoti_torch_abi_version() >> 48 <= kNewestTorch;
  return function && is_known_torch;
}

// The result of call(), which returns a NewTensor. A handle is a pointer to an at::Tensor on the heap.
template <typename Call>
Tensor own(const Call& call) {
  return Tensor(reinterpret_cast<AtenTensorHandle>(new NewTensor(call())));
}

// Throws an error that a stable function has caught, as far as it is known.
inline void check(AOTITorchError code, const char* name) {
  if (code == AOTI_TORCH_SUCCESS) return;
  const char* what = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : "";
  throw std::runtime_error(std::string(name) + " failed" + (*what ? ": " : "") + what);
}

// Calls an overload of an op through the dispatcher; `Result` is Tensor or void.
template <typename Result, typename... Values>
Result call_overload(const char* op, const char* overload, const Values&... values) {
  std::array<StableIValue, sizeof...(Values)> stack{torch::stable::detail::from(values)...};
  check(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION), op);
  if constexpr (!std::is_void_v<Result>) return torch::stable::detail::to<Result>(stack[0]);
}
template <typename Result, typename... Values>
Result call_stable(const char* op, const Values&... values) {
  return call_overload<Result>(op, "", values...);
}

// An uninitialised tensor on the device of `like`.
inline Tensor empty_strided(IntHeaderOnlyArrayRef sizes, const int64_t* strides, int32_t dtype, const Tensor& like) {
  const Array size_array{sizes.data(), sizes.size()}, stride_array{strides, sizes.size()};
  const auto code = static_cast<int8_t>(dtype);
  if (like.is_cpu() && is_known(symbol::empty_strided_cpu)) {
    return own([&] { return symbol::empty_strided_cpu(size_array, stride_array, code, false); });
  }
  int32_t device_type = 0;
  check(aoti_torch_get_device_type(like.get(), &device_type), "get_device_type");
  if (like.is_cuda() && is_known(symbol::empty_strided_cuda)) {
    const Device device{static_cast<int8_t>(device_type), static_cast<int8_t>(like.get_device_index())};
    return own([&] { return symbol::empty_strided_cuda(size_array, stride_array, code, device); });
  }
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype, device_type,
                                 like.get_device_index(), &handle),
        "aten::empty_strided");
  return Tensor(handle);
}

// In the memory order of `tensor`.
inline Tensor empty_like(const Tensor& tensor) {
  if (!is_known(symbol::empty_like)) return torch::stable::empty_like(tensor);
  return own([&] { return symbol::empty_like(tensor.get(), {}, {}, {}, {}, {}); });
}

inline Tensor contiguous(const Tensor& tensor) {
  [[maybe_unused]] const CaptureScope capture;
  if (!is_known(symbol::contiguous)) return torch::stable::contiguous(tensor);
  constexpr int8_t kContiguousFormat = 0;
  return own([&] { return symbol::contiguous(tensor.get(), kContiguousFormat); });
}

// The same tensor, without a reference of its own.
inline OptionalTensor borrow(const std::optional<Tensor>& tensor) {
  return {tensor ? reinterpret_cast<const NewTensor*>(tensor->get())->impl : nullptr, tensor.has_value()};
}

inline Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  [[maybe_unused]] const CaptureScope capture;
  if (!is_known(symbol::linear)) return call_stable<Tensor>("aten::linear", x, weight, bias);
  const OptionalTensor borrowed = borrow(bias);
  return own([&] { return symbol::linear(x.get(), weight.get(), borrowed); });
}

// a b of FP8 matrices, times their scales.
inline Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                        const std::optional<Tensor>& bias, torch::headeronly::ScalarType type, int32_t dtype,
                        bool fast_accumulation) {
  [[maybe_unused]] const CaptureScope capture;
  const std::optional<Tensor> none;
  if (!is_known(symbol::scaled_mm)) {
    return call_stable<Tensor>("aten::_scaled_mm", a, b, a_scale, b_scale, bias, none, std::optional(type),
                               fast_accumulation);
  }
  const OptionalTensor borrowed = borrow(bias), no_scale = borrow(none);
  return own([&] {
    return symbol::scaled_mm(a.get(), b.get(), a_scale.get(), b_scale.get(), borrowed, no_scale,
                             static_cast<int8_t>(dtype), fast_accumulation);
  });
}

inline void fill_(Tensor tensor, double value) {
  [[maybe_unused]] const CaptureScope capture;
  torch::stable::fill_(tensor, value);
}

inline void zero_(Tensor tensor) {
  [[maybe_unused]] const CaptureScope capture;
  if (is_known(symbol::zero_)) {
    symbol::zero_(tensor.get());
  } else {
    torch::stable::zero_(tensor);
  }
}

// A number, or null where this torch has no symbol to make it with. Until the next call: of those other than 0 and 1
// each thread keeps the last.
inline const Scalar* number(double value) {
  if (!is_known(symbol::item)) return nullptr;
  const auto make = [](double value) {
    return symbol::item(torch::stable::full({}, value, torch::headeronly::ScalarType::Double).get());
  };
  static const Scalar zero = make(0), one = make(1);
  if (value == 0 || value == 1) return value == 0 ? &zero : &one;
  thread_local double last = 0;
  thread_local Scalar kept = zero;
  if (value != last) kept = make(last = value);
  return &kept;
}

// target += factor other
inline void add_(Tensor target, const Tensor& other, double factor = 1) {
  const Scalar* const scale = is_known(symbol::add_) ? number(factor) : nullptr;
  [[maybe_unused]] const CaptureScope capture;
  if (scale) {
    symbol::add_(target.get(), other.get(), *scale);
  } else {  // the stable functions have no sum: target - (-factor) other
    torch::stable::copy_(target, torch::stable::subtract(target, other, -factor));
  }
}

// target *= factor, rounded to its dtype.
inline void mul_(const Tensor& target, double factor) {
  const Tensor number = torch::stable::full({}, factor, torch::headeronly::ScalarType::Double);
  [[maybe_unused]] const CaptureScope capture;
  call_overload<Tensor>("aten::mul_", "Tensor", target, number);
}

// out = a b by elements, rounded once, to the dtype of `out`.
inline void mul_out(Tensor out, const Tensor& a, const Tensor& b) {
  [[maybe_unused]] const CaptureScope capture;
  call_overload<Tensor>("aten::mul", "out", a, b, out);
}

// out = factor a b. Autocast leaves it alone, unlike linear().
inline void mm_out(Tensor out, const Tensor& a, const Tensor& b, double factor = 1) {
  if (factor != 1) {
    const Scalar* const scale = is_known(symbol::addmm_out) ? number(factor) : nullptr;
    if (!scale) {
      mm_out(out, a, b);
      return add_(out, out, factor - 1);
    }
    [[maybe_unused]] const CaptureScope capture;
    symbol::addmm_out(out.get(), a.get(), b.get(), *number(0), *scale, out.get());
    return;
  }
  [[maybe_unused]] const CaptureScope capture;
  if (is_known(symbol::mm_out)) {
    symbol::mm_out(a.get(), b.get(), out.get());
  } else {
    call_overload<Tensor>("aten::mm", "out", a, b, out);
  }
}

// out = self + factor a b; `self` has the shape of `out` or of one row, and may be `out`.
inline void addmm_out(Tensor out, const Tensor& self, const Tensor& a, const Tensor& b, double factor = 1) {
  if (const Scalar* const scale = is_known(symbol::addmm_out) ? number(factor) : nullptr) {
    [[maybe_unused]] const CaptureScope capture;
    symbol::addmm_out(self.get(), a.get(), b.get(), *number(1), *scale, out.get());
  } else if (self.get() == out.get()) {
    const Tensor product = aten::empty_like(out);
    mm_out(product, a, b);
    add_(out, product, factor);
  } else {
    mm_out(out, a, b, factor);
    add_(out, self);
  }
}

// Whether this torch has the next function. Its kernels are for CUDA only.
inline bool has_wide_products() {
  return is_known(symbol::mm_dtype_out) && is_known(symbol::addmm_dtype_out) && number(1);
}

// out = a b, or out += a b; a and b have 16 bits, `out` is float32.
inline void mm_wide_out(Tensor out, const Tensor& a, const Tensor& b, int32_t float32, bool add) {
  const Scalar& factor = *number(1);
  const auto code = static_cast<int8_t>(float32);
  [[maybe_unused]] const CaptureScope capture;
  if (add) {
    symbol::addmm_dtype_out(out.get(), a.get(), b.get(), code, factor, factor, out.get());
  } else {
    symbol::mm_dtype_out(a.get(), b.get(), code, out.get());
  }
}

// target = source, in the dtype of the target.
inline void copy_(Tensor target, const Tensor& source) {
  [[maybe_unused]] const CaptureScope capture;
  torch::stable::copy_(target, source);
}

}  // namespace llmk::aten
