#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "dtype.h"
#include "params/decode.h"

namespace llmk::kernels {

// Whether the kernel takes this, on the current device: bfloat16, sm_90, head_dim 64 or 128, up to 8 query heads per kv
// head, sizes that are multiples of 8, everything aligned to 16 bytes, cooperative launches.
bool decode_step_supported(const DecodeStepParams& params, Dtype dtype);

// What `workspace` must hold.
cudaError_t decode_step_workspace_bytes(const DecodeStepParams& params, size_t& bytes);

// cudaErrorCooperativeLaunchTooLarge or cudaErrorNotSupported, and nothing done, where this process is not given all of
// the SMs that the device reports, one block on each.
cudaError_t decode_step(const DecodeStepParams& params, cudaStream_t stream);

}  // namespace llmk::kernels
