// The beginning of a forward, in one launch: the embeddings of the tokens, scaled, and where they are.
//
//   hidden[r] = round(scale embedding[ids[r]])         NaN where there is no such token; with accumulate, which
//                                                      embeddings of positions have, round(hidden[r] + that)
//   counters += advance
//   positions[b, t] = clamp(counters[0, b] - (tokens - 1) + t, 0, max_position)      of the counters behind that
//
// float32, float16 or bfloat16; counters and positions int32. A block for each row, whose threads have a vector each
// time, and one more for the counters.
//
// The next kernel may not start early, since the keys and values that it may read then are those of the counters before
// (see hf/step/compose.py).
#include "embed_tokens.h"

#include <algorithm>

#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/recorder.h"

namespace llmk::kernels {
namespace {

__device__ void count(const EmbedTokensParams& p) {
  const int64_t total = p.positions ? p.batch * p.tokens : 0;
  for (int64_t i = threadIdx.x; i < total; i += blockDim.x) {
    const int64_t b = i / p.tokens, t = i - b * p.tokens;
    const int64_t position = int64_t{p.counters[b]} + p.advance - (p.tokens - 1) + t;
    p.positions[i] = static_cast<int32_t>(max(int64_t{0}, min(position, int64_t{p.max_position})));
  }
  __syncthreads();  // all have read the first row
  for (int64_t i = threadIdx.x; i < p.counts * p.batch; i += blockDim.x) p.counters[i] += p.advance;
}

template <typename T, int N>
__global__ void __launch_bounds__(1024) embed_tokens_kernel(const EmbedTokensParams p) {
  using V = Vec<T, N>;
  pdl_wait();
  const int64_t row = blockIdx.x;
  if (row == p.rows) return count(p);
  const int64_t id = p.ids_int64 ? static_cast<const int64_t*>(p.ids)[row] : static_cast<const int32_t*>(p.ids)[row];
  const bool is_token = id >= 0 && id < p.vocab;
  const float scale = static_cast<float>(p.scale);
  const T* const from = static_cast<const T*>(p.embedding) + (is_token ? id : 0) * p.embedding_stride;
  T* const to = static_cast<T*>(p.hidden) + row * p.hidden_stride;
  for (int64_t c = int64_t{threadIdx.x} * N; c < p.cols; c += int64_t{blockDim.x} * N) {
    const V x = is_token ? V::load(from + c) : V::of([](int) { return NAN; });
    V y = V::of([&](int i) { return scale * x[i]; });
    if (p.accumulate) {
      const V sum = V::load(to + c);
      y = V::of([&](int i) { return sum[i] + y[i]; });
    }
    y.store(to + c);
  }
}

cudaError_t launch_embed_tokens(const EmbedTokensParams& params, Dtype dtype, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const bool vector = params.cols * sizeof(T) % 16 == 0 &&
                        rows_aligned(params.embedding, params.embedding_stride, params.vocab, sizeof(T)) &&
                        rows_aligned(params.hidden, params.hidden_stride, params.rows, sizeof(T));
    const int64_t vectors = params.cols / (vector ? N : 1);
    const auto threads = static_cast<unsigned>(std::clamp<int64_t>((vectors + 31) / 32 * 32, 32, 1024));
    const LaunchShape shape{params.rows + (params.counters != nullptr), dim3(threads)};
    return launch(vector ? embed_tokens_kernel<T, N> : embed_tokens_kernel<T, 1>, shape, stream, params);
  });
}

}  // namespace

cudaError_t embed_tokens(const EmbedTokensParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.rows == 0 && !params.counters) return cudaSuccess;
  return launch_movable(
      params, [=](const EmbedTokensParams& p) { return launch_embed_tokens(p, dtype, stream); },
      [](EmbedTokensParams& p, const Moves& moves) { moves(p.counters, p.ids); });
}

}  // namespace llmk::kernels
