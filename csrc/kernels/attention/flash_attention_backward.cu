// Gradients of attention over prompts: what they need to know of each query, and the launches. Which kernels: route.h.
#include "flash_attention_backward.cuh"

#include <tuple>

#include "device/reduce.cuh"
#include "flash_attention.h"
#include "flash_attention_backward.h"
#include "flash_attention_backward_any.h"
#include "flash_attention_backward_sm90.cuh"
#include "flash_attention_maps.h"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kRowsOfBlock = 8, kSinkThreads = 256;

// statistics.cuh says what this writes. A warp has a query.
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kRowsOfBlock) statistics_kernel(const FlashAttentionBackwardParams params) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t padded = flash::padded_q_tokens(params), rows = params.batch * params.heads * padded;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.y;
  if (index >= rows) return;
  const int64_t query = index % padded, of_head = index / padded, h = of_head % params.heads,
                b = of_head / params.heads;
  float lse = INFINITY, delta = 0.f;
  if (query < params.q_tokens) {
    const int64_t of_lse = of_head * params.q_tokens + query;
    const float given = static_cast<const float*>(params.lse)[of_lse];
    if (given != -INFINITY) {
      const T* const y =
          static_cast<const T*>(params.y) + ((b * params.q_tokens + query) * params.heads + h) * params.head_dim;
      const T* const grad_y = static_cast<const T*>(params.grad_y) + b * params.grad_y_batch +
                              query * params.grad_y_token + h * params.grad_y_head;
      for (int d = kWidth * threadIdx.x; d < params.head_dim; d += kWidth * 32) {
        const auto of_y = Vec<T, kWidth>::load(y + d), of_grad = Vec<T, kWidth>::load(grad_y + d);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) delta += of_y[i] * of_grad[i];
      }
      delta = warp_sum(delta, 32);
      if (params.grad_lse) delta -= static_cast<const float*>(params.grad_lse)[of_lse];
      lse = given * kLog2E;
    }
  }
  if (threadIdx.x == 0) params.statistics[index] = lse, params.statistics[rows + index] = delta;
}

// The gradient of the sink of a head, by a block: of all queries, always in the same order.
template <typename T>
__global__ void __launch_bounds__(kSinkThreads) grad_sinks_kernel(const FlashAttentionBackwardParams params) {
  __shared__ float shared[kSinkThreads / 32];
  pdl_launch_dependents();
  pdl_wait();
  const int64_t padded = flash::padded_q_tokens(params), plane = params.batch * params.heads * padded, h = blockIdx.x;
  const float sink = to_float(static_cast<const T*>(params.sinks)[h]) * kLog2E;
  float total[1] = {0.f};
  for (int64_t b = 0; b < params.batch; ++b) {
    const float* const lse = params.statistics + (b * params.heads + h) * padded;
    for (int64_t i = threadIdx.x; i < padded; i += kSinkThreads) {
      total[0] -= exp2_approximate(sink - lse[i]) * lse[plane + i];
    }
  }
  group_sum(total, Group{kSinkThreads, static_cast<int>(threadIdx.x), 0}, shared);
  if (threadIdx.x == 0) static_cast<T*>(params.grad_sinks)[h] = from_float<T>(total[0]);
}

template <typename T, int kDim, bool kBiased>
cudaError_t launch_tiles(const FlashAttentionBackwardParams& params, cudaStream_t stream) {
  using Size = flash::BackwardTile<kDim>;
  constexpr int64_t kRows = Size::kRows;
  if (const int64_t blocks = (params.k_tokens + kRows - 1) / kRows * params.batch * params.kv_heads; blocks > 0) {
    const LaunchShape shape{blocks, dim3(Size::kKeyThreads), Size::kKeyBytes};
    const auto status = launch(flash::flash_attention_backward_keys_kernel<T, kDim, kBiased>, shape, stream, params);
    if (status != cudaSuccess) return status;
  }
  const int64_t blocks = (params.q_tokens + kRows - 1) / kRows * params.batch * params.heads;
  if (blocks == 0) return cudaSuccess;
  const LaunchShape shape{blocks, dim3(Size::kQueryThreads), Size::kQueryBytes};
  return launch(flash::flash_attention_backward_queries_kernel<T, kDim, kBiased>, shape, stream, params);
}

int64_t statistics_count(const FlashAttentionParams& params) {
  return 2 * params.batch * params.heads * flash::padded_q_tokens(params);
}

// Of each of grad_k and grad_v.
int64_t key_elements(const FlashAttentionParams& p) { return p.batch * p.k_tokens * p.kv_heads * p.head_dim; }

template <typename T, int kDim>
cudaError_t launch_sm90(const FlashAttentionBackwardParams& params, int splits, Dtype dtype, cudaStream_t stream) {
  using namespace flash;
  using Size = Sm90Backward<kDim>;
  const Operand operands[] = {q_operand(params), grad_y_operand(params), k_operand(params), v_operand(params)};
  BackwardMaps of_keys{}, of_queries{};
  for (int i = 0; i < 2; ++i) {
    for (const auto& [map, operand, rows] : {std::tuple{&of_keys.rows[i], &operands[2 + i], Size::kRows},
                                             std::tuple{&of_keys.columns[i], &operands[i], Size::kColumns},
                                             std::tuple{&of_queries.rows[i], &operands[i], Size::kRows},
                                             std::tuple{&of_queries.columns[i], &operands[2 + i], Size::kColumns}}) {
      if (const auto status = make_map(*map, params, *operand, rows, dtype); status != cudaSuccess) return status;
    }
  }
  float* const parts = splits > 1 ? params.statistics + statistics_count(params) : nullptr;
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const LaunchShape keys{divide_up(params.k_tokens, Size::kRows) * params.batch * params.kv_heads * splits,
                         dim3(Size::kThreads), Size::kSharedBytes};
  auto status =
      launch(flash_attention_backward_keys_sm90_kernel<T, kDim>, keys, stream, params, of_keys, splits, parts);
  if (status != cudaSuccess) return status;
  const LaunchShape queries{divide_up(params.q_tokens, Size::kRows) * params.batch * params.heads, dim3(Size::kThreads),
                            Size::kSharedBytes};
  status = launch(flash_attention_backward_queries_sm90_kernel<T, kDim>, queries, stream, params, of_queries);
  if (status != cudaSuccess || !parts) return status;
  const int64_t count = key_elements(params);
  const LaunchShape adds{divide_up(count, 8 * 256), dim3(256)};
  for (int i = 0; i < 2 && status == cudaSuccess; ++i) {
    status = launch(add_parts_kernel<T>, adds, stream, params, const_cast<const float*>(parts), splits, count, i);
  }
  return status;
}

template <typename T>
cudaError_t launch_route(const FlashAttentionBackwardParams& params, const AttentionRoute& route, Dtype dtype,
                         cudaStream_t stream) {
  const int columns = route.backward_plan.head_columns;
  if (route.backward == AttentionVariant::kWgmma) {
    return dispatch_int<64, 128>(
        columns, [&](auto dim) { return launch_sm90<T, decltype(dim)::value>(params, route.splits, dtype, stream); });
  }
  return dispatch_int<64, 128, 256>(columns, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    return params.bias ? launch_tiles<T, kDim, true>(params, stream) : launch_tiles<T, kDim, false>(params, stream);
  });
}

template <typename T, int kWidth>
cudaError_t launch_statistics(const FlashAttentionBackwardParams& params, cudaStream_t stream) {
  const int64_t rows = statistics_count(params) / 2;
  if (rows > 0) {
    const LaunchShape shape{(rows + kRowsOfBlock - 1) / kRowsOfBlock, dim3(32, kRowsOfBlock)};
    if (const auto status = launch(statistics_kernel<T, kWidth>, shape, stream, params)) return status;
  }
  if (!params.grad_sinks || params.heads == 0) return cudaSuccess;
  return launch(grad_sinks_kernel<T>, {params.heads, dim3(kSinkThreads)}, stream, params);
}

}  // namespace

int64_t flash_attention_backward_workspace(const FlashAttentionBackwardParams& params, Dtype dtype) {
  const int splits = route_attention(problem_of(params, dtype)).splits;
  return statistics_count(params) + (splits > 1 ? 2 * splits * key_elements(params) : 0);
}

cudaError_t flash_attention_backward(const FlashAttentionBackwardParams& params, Dtype dtype, cudaStream_t stream) {
  const AttentionRoute route = route_attention(problem_of(params, dtype));
  if (route.backward == AttentionVariant::kNone) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (route.backward != AttentionVariant::kPlain) {
        const auto status = launch_statistics<T, 8>(params, stream);
        return status == cudaSuccess ? launch_route<T>(params, route, dtype, stream) : status;
      }
    }
    const auto status = launch_statistics<T, 1>(params, stream);
    return status == cudaSuccess ? flash_attention_backward_any(params, dtype, stream) : status;
  });
}

}  // namespace llmk::kernels
