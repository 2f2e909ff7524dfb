#include "tensor_map.h"

#include <atomic>

namespace llmk::kernels {
namespace {

// The driver's function, looked up at run time so that the library does not link to the driver. A failure is not
// cached.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
EncodeTiled encode_tiled() {
  static std::atomic<EncodeTiled> known{nullptr};
  if (const EncodeTiled function = known.load(std::memory_order_acquire)) return function;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();  // clears it, or the next launch would report it
    return nullptr;
  }
  const auto function = reinterpret_cast<EncodeTiled>(found);
  known.store(function, std::memory_order_release);
  return function;
}

}  // namespace

bool has_tensor_maps() { return encode_tiled() != nullptr; }

cudaError_t make_tensor_map(CUtensorMap& map, const void* data, const TensorBox& tensor, ElementType type) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], steps[5];
  for (int i = 0; i < tensor.dims; ++i) {
    sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
    box[i] = static_cast<cuuint32_t>(tensor.box[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(bytes_of(type, tensor.strides[i]));
  }
  const CUresult result =
      encode(&map, type == ElementType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             static_cast<cuuint32_t>(tensor.dims), const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace llmk::kernels
