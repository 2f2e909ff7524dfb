// The interface between the host code of decode_attention and its kernel, which are compiled apart: the kernel takes
// long.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/launch.h"
#include "params/attention.h"
#include "plan.h"

namespace llmk::kernels {

struct KvMaps {
  CUtensorMap k, v;  // boxes of DecodePlan::box_keys() keys and 64 columns
};

// Launches the kernel for this head_dim and number of queries. kNorm: heads are normalized
// (DecodeAttentionParams::norm). Instantiated for __half and __nv_bfloat16 with and without norm, in four files.
template <typename T, bool kNorm>
cudaError_t launch_decode_attention(const DecodeAttentionParams& params, const DecodePlan& plan, const KvMaps& maps,
                                    const LaunchShape& shape, cudaStream_t stream);

}  // namespace llmk::kernels
