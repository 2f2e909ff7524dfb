#include "decode_attention.cuh"

namespace llmk::kernels {

template cudaError_t launch_decode_attention<__half, true>(const DecodeAttentionParams&, const DecodePlan&,
                                                           const KvMaps&, const LaunchShape&, cudaStream_t);

}  // namespace llmk::kernels
