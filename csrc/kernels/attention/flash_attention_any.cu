// Attention over prompts without tensor cores, for what the fast kernel (flash_attention.cuh) does not take: float32,
// and heads that are not aligned. A warp has a query, and goes over the keys that it sees, one per lane; then the lanes
// have the columns of the values. float32 arithmetic.
#include "flash_attention_any.h"

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "limits.h"
#include "score_bias.cuh"
#include "softmax.cuh"
#include "visible.cuh"

namespace llmk::kernels {
namespace {

constexpr int kQueries = 4, kColumns = kMaxFlashHeadDim / 32;  // of a block; of a lane

template <typename T>
__global__ void __launch_bounds__(32 * kQueries) flash_attention_any_kernel(const FlashAttentionParams params) {
  __shared__ float queries[kQueries][kMaxFlashHeadDim];
  const int lane = threadIdx.x, head_dim = static_cast<int>(params.head_dim);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kQueries + threadIdx.y;
  pdl_launch_dependents();
  pdl_wait();
  if (index >= params.batch * params.heads * params.q_tokens) return;
  const int query = static_cast<int>(index % params.q_tokens);
  const int64_t h = index / params.q_tokens % params.heads, b = index / params.q_tokens / params.heads;
  const int64_t kv_head = h / (params.heads / params.kv_heads);
  const T* const q = static_cast<const T*>(params.q) + b * params.q_batch + query * params.q_token + h * params.q_head;
  const T* const k = static_cast<const T*>(params.k) + b * params.k_batch + kv_head * params.k_head;
  const T* const v = static_cast<const T*>(params.v) + b * params.v_batch + kv_head * params.v_head;
  float* const of_query = queries[threadIdx.y];
  for (int d = lane; d < head_dim; d += 32) of_query[d] = to_float(q[d]);
  __syncwarp();

  const flash::Visible visible(params, b);
  const int begin = visible.begin(query), end = visible.end(query);
  const flash::HeadBias<T> bias(params, b, h, visible.shift);
  const float scale = static_cast<float>(params.softmax_scale), cap = static_cast<float>(params.softcap);
  float y[kColumns] = {}, maximum = -INFINITY, sum = 0.f;
  for (int first = begin; first < end; first += 32) {
    const int key = first + lane, count = min(32, end - first);
    float score = -INFINITY;
    if (key < end) {
      const T* const of_key = k + key * params.k_token;
      float product = 0.f;
      for (int d = 0; d < head_dim; ++d) product += of_query[d] * to_float(of_key[d]);
      score = product * scale;
      if (cap > 0.f) score = cap * tanhf(score / cap);
      score = bias.add(score, query, key);
    }
    const float highest = fmaxf(maximum, warp_max(score, 32)), shift = finite(highest);
    const float correction = expf(maximum - shift), weight = expf(score - shift);
    maximum = highest;
    sum = sum * correction + warp_sum(weight, 32);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y[i] *= correction;
    for (int j = 0; j < count; ++j) {
      const float of_key = __shfl_sync(0xffffffffu, weight, j);
      const T* const value = v + (first + j) * params.v_token;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (lane + i * 32 < head_dim) y[i] += of_key * to_float(value[lane + i * 32]);
      }
    }
  }
  const float sink = params.sinks ? to_float(static_cast<const T*>(params.sinks)[h]) : -INFINITY;
  const float shift = finite(fmaxf(maximum, sink)), correction = expf(maximum - shift);
  const float total = sum * correction + expf(sink - shift);
  const float scale_of_row = total == 0.f ? 0.f : correction / total;
  T* const target = static_cast<T*>(params.y) + ((b * params.q_tokens + query) * params.heads + h) * head_dim;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (lane + i * 32 < head_dim) target[lane + i * 32] = from_float<T>(y[i] * scale_of_row);
  }
  if (params.lse && lane == 0) static_cast<float*>(params.lse)[index] = shift + logf(total);
}

}  // namespace

cudaError_t flash_attention_any(const FlashAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t queries = params.batch * params.heads * params.q_tokens;
    return launch(flash_attention_any_kernel<T>, {(queries + kQueries - 1) / kQueries, dim3(32, kQueries)}, stream,
                  params);
  });
}

}  // namespace llmk::kernels
