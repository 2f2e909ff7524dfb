// Rotates the queries in place, writes the rotated keys and the values to the KV cache, in one launch. Positions,
// lengths and block table are read on the device. Rounds as kernels/rope/rope.cu does: bitwise equal to eager PyTorch.
// Tokens that would lie outside the cache are not written.
//
// Reads and writes every element of q, k and v once. A thread has two vectors of a head that are rotated together: N
// elements at d and N at d + head_dim / 2; interleaved, 2 N neighbours.
#include <algorithm>
#include <initializer_list>

#include "decode_attention.h"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "rotate.cuh"

namespace llmk::kernels {
namespace {

constexpr int kThreads = 128;

// Rotates a pair of neighbours. The interleaved layout has the scalar path only.
template <typename T>
__device__ void rotate_neighbours(Vec<T, 1>& low, Vec<T, 1>& high, const RopeTables& rope, int64_t position,
                                  int64_t d) {
  RopeTables tables = rope;
  tables.half_width = false;
  rotate(low, high, Angles<T, 1>::load(tables, position, rope.half_width ? d / 2 : d, rope.half_width ? d / 2 : d + 1));
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) rope_kv_write_kernel(const RopeKvWriteParams params) {
  using V = Vec<T, N>;
  const int64_t pairs = params.head_dim / 2 / N, heads = params.heads + 2 * params.kv_heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / pairs, d = index % pairs * N;  // row: (batch, token, head)
  const int64_t head = row % heads, b = row / heads / params.tokens, t = row / heads % params.tokens;
  pdl_launch_dependents();
  pdl_wait();
  if (b >= params.batch) return;
  const bool is_q = head < params.heads, is_k = !is_q && head < params.heads + params.kv_heads;
  const int64_t kv_head = head - params.heads - (is_k ? 0 : params.kv_heads);
  const int64_t low_at = params.interleaved ? 2 * d : d,
                high_at = params.interleaved ? 2 * d + N : d + params.head_dim / 2;

  const T* in;
  T* out;
  if (is_q) {
    out = static_cast<T*>(params.q) + b * params.q_batch + t * params.q_token + head * params.q_head;
    in = out;
  } else {
    in = is_k ? static_cast<const T*>(params.k) + b * params.k_batch + t * params.k_token + kv_head * params.k_head
              : static_cast<const T*>(params.v) + b * params.v_batch + t * params.v_token + kv_head * params.v_head;
    const KvCache& cache = params.cache;
    const int64_t place = params.cache_seqlens[b] - params.tokens + t;
    if (place < 0 || place >= cache.capacity) return;
    int64_t page = b, in_page = place;
    if (cache.block_table) {
      page = cache.block_table[b * cache.table_stride + place / cache.page_size];
      in_page = place % cache.page_size;
      if (page < 0 || page >= cache.pages) return;
    }
    out = is_k ? static_cast<T*>(cache.k) + page * cache.k_page + in_page * cache.k_token + kv_head * cache.k_head
               : static_cast<T*>(cache.v) + page * cache.v_page + in_page * cache.v_token + kv_head * cache.v_head;
  }
  V low = V::load(in + low_at), high = V::load(in + high_at);
  if (is_q || is_k) {
    const int64_t at = b * params.positions_batch + t * params.positions_token;
    const int64_t position = params.position_ids_int64 ? static_cast<const int64_t*>(params.position_ids)[at]
                                                       : static_cast<const int32_t*>(params.position_ids)[at];
    if constexpr (N == 1) {
      if (params.interleaved) {
        rotate_neighbours(low, high, params.rope, position, low_at);
      } else {
        rotate(low, high, Angles<T, 1>::load(params.rope, position, low_at, high_at));
      }
    } else {
      rotate(low, high, Angles<T, N>::load(params.rope, position, low_at, high_at));
    }
  }
  low.store(out + low_at);
  high.store(out + high_at);
}

template <typename T>
bool is_vector(const RopeKvWriteParams& p) {
  constexpr int N = kVecWidth<T>;
  const KvCache& c = p.cache;
  for (const void* pointer : {static_cast<const void*>(p.q), p.k, p.v, static_cast<const void*>(c.k),
                              static_cast<const void*>(c.v), p.rope.cos, p.rope.sin}) {
    if (!is_aligned(pointer, 16)) return false;
  }
  const std::initializer_list<int64_t> strides = {
      p.q_batch, p.q_token, p.q_head, p.k_batch, p.k_token, p.k_head, p.v_batch,      p.v_token,      p.v_head,
      c.k_page,  c.k_token, c.k_head, c.v_page,  c.v_token, c.v_head, p.rope.cos_row, p.rope.sin_row, p.head_dim / 2};
  return !p.interleaved && std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s % N == 0; });
}

}  // namespace

cudaError_t rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, cudaStream_t stream) {
  const int64_t rows = params.batch * params.tokens * (params.heads + 2 * params.kv_heads);
  if (rows == 0 || params.head_dim == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const auto run = [&](auto kernel, int width) {
      const int64_t threads = rows * (params.head_dim / 2 / width);
      return launch(kernel, {(threads + kThreads - 1) / kThreads, dim3(kThreads)}, stream, params);
    };
    return is_vector<T>(params) ? run(rope_kv_write_kernel<T, N>, N) : run(rope_kv_write_kernel<T, 1>, 1);
  });
}

}  // namespace llmk::kernels
