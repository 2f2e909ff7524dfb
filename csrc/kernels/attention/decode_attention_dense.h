#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "dense_plan.h"
#include "dtype.h"
#include "kernels/launch.h"
#include "params/attention.h"

namespace llmk::kernels {

// Whether decode_attention_dense() takes what the fast decode_attention() takes: see its file. And whether it should.
bool decode_attention_can_be_dense(const DecodeAttentionParams& params, const DensePlan& plan,
                                   const DeviceInfo& device);
bool decode_attention_is_dense(const DecodeAttentionParams& params, const DensePlan& plan, const DeviceInfo& device);
size_t decode_attention_dense_workspace_bytes(const DecodeAttentionParams& params, const DensePlan& plan);
cudaError_t decode_attention_dense(const DecodeAttentionParams& params, const DensePlan& plan, Dtype dtype,
                                   cudaStream_t stream);

}  // namespace llmk::kernels
