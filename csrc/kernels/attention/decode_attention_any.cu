// Decode attention for what the tensor-core kernel does not support: float32, other head_dims, other alignments. The
// formula is that of decode_attention.cuh, all of it in fp32. A block has one query. Each of its four warps takes every
// fourth key, with head_dim spread over the lanes; at the end their partial outputs are merged in shared memory, in
// order. Not tuned for speed.
#include "decode_attention_any.h"

#include <cmath>

#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kWarps = 4, kPerLane = kMaxHeadDim / 32;

template <typename T>
__global__ void __launch_bounds__(32 * kWarps) decode_attention_any_kernel(const DecodeAttentionParams params) {
  __shared__ float outputs[kWarps][kMaxHeadDim], maxima[kWarps], totals[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_dim = static_cast<int>(params.head_dim);
  const int64_t head = blockIdx.x % params.heads, row = blockIdx.x / params.heads;
  const int64_t b = row / params.tokens, t = row % params.tokens, kv_head = head / (params.heads / params.kv_heads);
  const KvCache& cache = params.cache;
  pdl_launch_dependents();
  pdl_wait();
  const int64_t length = max(min(int64_t{params.cache_seqlens[b]}, cache.capacity), int64_t{0});
  const int64_t end = length - params.tokens + t + 1;
  int64_t begin = params.cache_leftpad ? max(params.cache_leftpad[b], 0) : 0;
  if (params.window_left >= 0) begin = max(begin, end - 1 - params.window_left);

  const T* const q = static_cast<const T*>(params.q) + b * params.q_batch + t * params.q_token + head * params.q_head;
  float query[kPerLane], output[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    query[i] = lane + 32 * i < head_dim ? to_float(q[lane + 32 * i]) : 0.f;
    output[i] = 0.f;
  }
  float maximum = -INFINITY, total = 0.f;
  for (int64_t key = begin + warp; key < end; key += kWarps) {
    int64_t page = b, in_page = key;
    if (cache.block_table) {
      page = cache.block_table[b * cache.table_stride + key / cache.page_size];
      in_page = key % cache.page_size;
    }
    const bool valid = page >= 0 && page < cache.pages;  // no such page: zeros, as in the fast kernel
    const T* const k =
        static_cast<const T*>(cache.k) + page * cache.k_page + in_page * cache.k_token + kv_head * cache.k_head;
    const T* const v =
        static_cast<const T*>(cache.v) + page * cache.v_page + in_page * cache.v_token + kv_head * cache.v_head;
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (valid && lane + 32 * i < head_dim) score += query[i] * to_float(k[lane + 32 * i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) score += __shfl_xor_sync(0xffffffffu, score, offset);
    score *= static_cast<float>(params.softmax_scale);
    if (params.softcap > 0) {
      const float cap = static_cast<float>(params.softcap);
      score = cap * tanhf(score / cap);
    }
    const float new_maximum = fmaxf(maximum, score), base = new_maximum == -INFINITY ? 0.f : new_maximum;
    const float rescale = expf(maximum - base), weight = expf(score - base);
    maximum = new_maximum;
    total = total * rescale + weight;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool mine = valid && lane + 32 * i < head_dim;
      output[i] = output[i] * rescale + (mine ? weight * to_float(v[lane + 32 * i]) : 0.f);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) outputs[warp][lane + 32 * i] = output[i];
  if (lane == 0) maxima[warp] = maximum, totals[warp] = total;
  __syncthreads();
  float merged_maximum = -INFINITY, sum = 0.f, weights[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) merged_maximum = fmaxf(merged_maximum, maxima[w]);
  const float base = merged_maximum == -INFINITY ? 0.f : merged_maximum;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = expf(maxima[w] - base);
    sum += weights[w] * totals[w];
  }
  const float factor = sum == 0.f ? 0.f : 1.f / sum;
  T* const out = static_cast<T*>(params.out) + (row * params.heads + head) * params.head_dim;
  for (int d = threadIdx.x; d < head_dim; d += 32 * kWarps) {
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += weights[w] * outputs[w][d];
    out[d] = from_float<T>(value * factor);
  }
}

}  // namespace

cudaError_t decode_attention_any(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.new_k || params.head_dim > kMaxHeadDim) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const LaunchShape shape{params.batch * params.tokens * params.heads, dim3(32 * kWarps)};
    return launch(decode_attention_any_kernel<T>, shape, stream, params);
  });
}

}  // namespace llmk::kernels
