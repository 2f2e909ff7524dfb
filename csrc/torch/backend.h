// Runs an op on the device of its tensors.
#pragma once
#include <algorithm>

#include "binding.h"

#if LLMK_CUDA
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

// Defined in libtorch_cuda; weak, so that the library loads under a CPU-only torch too.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) __attribute__((weak));
#endif

namespace llmk {

// The fewest elements for which a further CPU thread is worth it.
constexpr int64_t kGrain = 32768;

// Calls body(begin, end) on parts of [0, count), in parallel. An item is `size` elements of work, a part at least
// kGrain of them.
template <typename Body>
void parallel_for(int64_t count, int64_t size, const Body& body) {
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, size)), body);
}

#if LLMK_CUDA
inline void check_cuda(const char* op, cudaError_t status) {
  LLMK_CHECK(status != cudaErrorNoKernelImageForDevice, op,
             "this build has no kernels for this GPU: see `python -m llmkernels info`, rebuild with its architecture "
             "in TORCH_CUDA_ARCH_LIST (sm_80 or later)");
  LLMK_CHECK(status != cudaErrorInsufficientDriver && status != cudaErrorUnsupportedPtxVersion, op,
             "the driver of this GPU is older than the CUDA that this build was made with: see `python -m llmkernels "
             "info`, install a newer driver");
  LLMK_CHECK(status == cudaSuccess, op, "CUDA launch failed: ", cudaGetErrorString(status));
}
#endif

// Calls cuda(stream), with the device of `tensor` current, or cpu(). Does nothing for meta tensors: a fake runs the op
// on them for its checks only.
template <typename Cuda, typename Cpu>
void on_device(const char* op, const Tensor& tensor, const Cuda& cuda, const Cpu& cpu) {
#if LLMK_CUDA
  if (tensor.is_cuda()) {
    const int32_t device = tensor.get_device_index();
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (int current = -1; cudaGetDevice(&current) != cudaSuccess || current != device) guard.emplace(device);
    void* stream = nullptr;
    LLMK_CHECK(aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(device, &stream) == 0, op,
               "this torch has no CUDA support");
    check_cuda(op, cuda(static_cast<cudaStream_t>(stream)));
    return;
  }
#else
  (void)op, (void)tensor, (void)cuda;  // registered for the CPU only
#endif
  if (tensor.is_cpu()) cpu();
}

// Registers one function for an op and for its overload without autograd: see differentiable() in ops.cpp.
inline void implement_differentiable(torch::stable::detail::StableLibrary& ops, const std::string& name,
                                     void (*function)(StableIValue*, uint64_t, uint64_t)) {
  ops.impl(name.c_str(), function);
  ops.impl((name + ".no_grad").c_str(), function);
}

}  // namespace llmk

// Code that names CUDA kernels: nothing in a build without them.
#if LLMK_CUDA
#define LLMK_CUDA_ONLY(...) __VA_ARGS__
#else
#define LLMK_CUDA_ONLY(...) nullptr
#endif

// Registers register_ops(ops) for every device that this build has kernels for.
#if LLMK_CUDA
#define LLMK_IMPLEMENT(register_ops)                                     \
  STABLE_TORCH_LIBRARY_IMPL(llmkernels, CPU, ops) { register_ops(ops); } \
  STABLE_TORCH_LIBRARY_IMPL(llmkernels, CUDA, ops) { register_ops(ops); }
#else
#define LLMK_IMPLEMENT(register_ops) \
  STABLE_TORCH_LIBRARY_IMPL(llmkernels, CPU, ops) { register_ops(ops); }
#endif
