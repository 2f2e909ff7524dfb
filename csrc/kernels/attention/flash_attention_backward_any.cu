// Gradients of attention over prompts without tensor cores, for what the fast kernels (flash_attention_backward.cuh) do
// not take. A warp has a query and goes over the keys that it sees, or has a key and goes over the queries that see it:
// 32 at a time, one per lane, then the lanes have the columns of the sums. float32 arithmetic.
#include "flash_attention_backward_any.h"

#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "limits.h"
#include "score_bias.cuh"
#include "softmax.cuh"
#include "statistics.cuh"
#include "visible.cuh"

namespace llmk::kernels {
namespace {

constexpr int kWarps = 4, kColumns = kMaxFlashHeadDim / 32;  // of a block; of a lane

// p, and ds * softmax_scale, of a query and a key from their products.
struct Weights {
  float p, ds;

  // `with_bias`: a score with what is added to it.
  template <typename WithBias>
  __device__ Weights(const FlashAttentionParams& params, float qk, float grad_y_v, float lse, float delta,
                     const WithBias& with_bias) {
    const float scale = static_cast<float>(params.softmax_scale), cap = static_cast<float>(params.softcap);
    float score = qk * scale, derivative = scale;
    if (cap > 0.f) {
      const float t = tanhf(score / cap);
      score = cap * t, derivative *= 1.f - t * t;
    }
    p = exp2f(fmaf(with_bias(score), kLog2E, -lse));
    ds = p * (grad_y_v - delta) * derivative;
  }
};

// The rows of a warp's own key or query, in float32.
struct OwnRows {
  float first[kMaxFlashHeadDim], second[kMaxFlashHeadDim];

  template <typename T>
  __device__ void load(const T* a, const T* b, int head_dim) {
    for (int d = threadIdx.x; d < head_dim; d += 32) first[d] = to_float(a[d]), second[d] = to_float(b[d]);
    __syncwarp();
  }
  template <typename T>
  __device__ void multiply(const T* a, const T* b, int head_dim, float& with_first, float& with_second) const {
    with_first = with_second = 0.f;
    for (int d = 0; d < head_dim; ++d)
      with_first += first[d] * to_float(a[d]), with_second += second[d] * to_float(b[d]);
  }
};

// sums += weight row, the lanes having the columns.
template <typename T>
__device__ void add_row(float (&sums)[kColumns], float weight, const T* row, int head_dim) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (const int d = threadIdx.x + i * 32; d < head_dim) sums[i] += weight * to_float(row[d]);
  }
}

template <typename T>
__device__ void store_sums(const float (&sums)[kColumns], T* target, int head_dim) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (const int d = threadIdx.x + i * 32; d < head_dim) target[d] = from_float<T>(sums[i]);
  }
}

template <typename T>
__global__ void __launch_bounds__(32 * kWarps) backward_queries_any_kernel(const FlashAttentionBackwardParams params) {
  __shared__ OwnRows rows[kWarps];
  const int head_dim = static_cast<int>(params.head_dim);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  pdl_launch_dependents();
  pdl_wait();
  if (index >= params.batch * params.heads * params.q_tokens) return;
  const int query = static_cast<int>(index % params.q_tokens);
  const int64_t h = index / params.q_tokens % params.heads, b = index / params.q_tokens / params.heads;
  const int64_t kv_head = h / (params.heads / params.kv_heads), padded = flash::padded_q_tokens(params);
  const T* const k = static_cast<const T*>(params.k) + b * params.k_batch + kv_head * params.k_head;
  const T* const v = static_cast<const T*>(params.v) + b * params.v_batch + kv_head * params.v_head;
  OwnRows& own = rows[threadIdx.y];
  own.load(static_cast<const T*>(params.q) + b * params.q_batch + query * params.q_token + h * params.q_head,
           static_cast<const T*>(params.grad_y) + b * params.grad_y_batch + query * params.grad_y_token +
               h * params.grad_y_head,
           head_dim);
  const float* const statistics = params.statistics + (b * params.heads + h) * padded + query;
  const float lse = statistics[0], delta = statistics[params.batch * params.heads * padded];
  const flash::Visible visible(params, b);
  const flash::HeadBias<T> bias(params, b, h, visible.shift);
  const int end = visible.end(query);
  float sums[kColumns] = {};
  for (int first = visible.begin(query); first < end; first += 32) {
    const int key = first + static_cast<int>(threadIdx.x), count = min(32, end - first);
    float ds = 0.f;
    if (key < end) {
      float qk, grad_y_v;
      own.multiply(k + key * params.k_token, v + key * params.v_token, head_dim, qk, grad_y_v);
      ds = Weights(params, qk, grad_y_v, lse, delta, [&](float score) { return bias.add(score, query, key); }).ds;
    }
    for (int j = 0; j < count; ++j) {
      add_row(sums, __shfl_sync(0xffffffffu, ds, j), k + (first + j) * params.k_token, head_dim);
    }
  }
  store_sums(sums, static_cast<T*>(params.grad_q) + ((b * params.q_tokens + query) * params.heads + h) * head_dim,
             head_dim);
}

template <typename T>
__global__ void __launch_bounds__(32 * kWarps) backward_keys_any_kernel(const FlashAttentionBackwardParams params) {
  __shared__ OwnRows rows[kWarps];
  const int head_dim = static_cast<int>(params.head_dim);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  pdl_launch_dependents();
  pdl_wait();
  if (index >= params.batch * params.kv_heads * params.k_tokens) return;
  const int key = static_cast<int>(index % params.k_tokens);
  const int64_t kv_head = index / params.k_tokens % params.kv_heads, b = index / params.k_tokens / params.kv_heads;
  const int64_t heads = params.heads / params.kv_heads, padded = flash::padded_q_tokens(params);
  const flash::Visible visible(params, b);
  const int begin = visible.first_query(key), end = visible.end_query(key);
  OwnRows& own = rows[threadIdx.y];
  if (begin < end) {
    own.load(static_cast<const T*>(params.k) + b * params.k_batch + key * params.k_token + kv_head * params.k_head,
             static_cast<const T*>(params.v) + b * params.v_batch + key * params.v_token + kv_head * params.v_head,
             head_dim);
  }
  float k_sums[kColumns] = {}, v_sums[kColumns] = {};
  for (int64_t h = kv_head * heads; h < (kv_head + 1) * heads; ++h) {
    const T* const q = static_cast<const T*>(params.q) + b * params.q_batch + h * params.q_head;
    const T* const grad_y = static_cast<const T*>(params.grad_y) + b * params.grad_y_batch + h * params.grad_y_head;
    const flash::HeadBias<T> bias(params, b, h, visible.shift);
    const float* const lse = params.statistics + (b * params.heads + h) * padded;
    const float* const delta = lse + params.batch * params.heads * padded;
    for (int first = begin; first < end; first += 32) {
      const int query = first + static_cast<int>(threadIdx.x), count = min(32, end - first);
      float p = 0.f, ds = 0.f;
      if (query < end) {
        float qk, grad_y_v;
        own.multiply(q + query * params.q_token, grad_y + query * params.grad_y_token, head_dim, qk, grad_y_v);
        const Weights weights(params, qk, grad_y_v, lse[query], delta[query],
                              [&](float score) { return bias.add(score, query, key); });
        p = weights.p, ds = weights.ds;
      }
      for (int i = 0; i < count; ++i) {
        add_row(k_sums, __shfl_sync(0xffffffffu, ds, i), q + (first + i) * params.q_token, head_dim);
        add_row(v_sums, __shfl_sync(0xffffffffu, p, i), grad_y + (first + i) * params.grad_y_token, head_dim);
      }
    }
  }
  const int64_t target = ((b * params.k_tokens + key) * params.kv_heads + kv_head) * head_dim;
  store_sums(k_sums, static_cast<T*>(params.grad_k) + target, head_dim);
  store_sums(v_sums, static_cast<T*>(params.grad_v) + target, head_dim);
}

}  // namespace

cudaError_t flash_attention_backward_any(const FlashAttentionBackwardParams& params, Dtype dtype, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t queries = params.batch * params.heads * params.q_tokens;
    const int64_t keys = params.batch * params.kv_heads * params.k_tokens;
    const auto shape = [](int64_t rows) { return LaunchShape{(rows + kWarps - 1) / kWarps, dim3(32, kWarps)}; };
    auto status = keys == 0 ? cudaSuccess : launch(backward_keys_any_kernel<T>, shape(keys), stream, params);
    if (status == cudaSuccess && queries > 0) {
      status = launch(backward_queries_any_kernel<T>, shape(queries), stream, params);
    }
    return status;
  });
}

}  // namespace llmk::kernels
