// Rotates the queries in place, writes the rotated keys and the values to the KV cache, in one launch; before that it
// normalizes q and k, each head or all heads of a token, if there are weights for it. Positions, lengths and block
// table are read on the device. Rounds as kernels/rope/rope.cu and rms_norm_rope.cu do: bitwise equal to eager PyTorch.
// Tokens that would lie outside the cache are not written.
//
// Reads and writes every element of q, k and v once. A thread has two vectors of a head, of N elements, that are
// rotated together (rotate.cuh, PairPlace); interleaved, 2 N neighbours.
#include <algorithm>
#include <initializer_list>

#include "decode_attention.h"
#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/norm/plan.h"
#include "kernels/recorder.h"
#include "qk_norm.cuh"
#include "rotate.cuh"

namespace llmk::kernels {
namespace {

constexpr int kThreads = kRowThreads;

// Rotates a pair of neighbours. The interleaved layout has the scalar path only.
template <typename T>
__device__ void rotate_neighbours(Vec<T, 1>& low, Vec<T, 1>& high, const RopeTables& rope, int64_t position,
                                  int64_t d) {
  RopeTables tables = rope;
  tables.half_width = false;
  rotate(low, high, Angles<T, 1>::load(tables, position, rope.half_width ? d / 2 : d, rope.half_width ? d / 2 : d + 1));
}

// A head of q, k or v of one token.
template <typename T>
struct Head {
  int64_t b, t, head;
  bool is_q, is_k;
  const T* in;
  T* out;

  // row: (batch, token, head). Reads nothing from memory.
  __device__ Head(const RopeKvWriteParams& params, int64_t row) {
    const int64_t heads = params.heads + 2 * params.kv_heads;
    head = row % heads;
    b = row / heads / params.tokens;
    t = row / heads % params.tokens;
    is_q = head < params.heads;
    is_k = !is_q && head < params.heads + params.kv_heads;
  }

  // Finds `in` and `out`; returns false where there is no such head, or no place for it in the cache.
  __device__ bool find(const RopeKvWriteParams& params) {
    if (b >= params.batch) return false;
    const int64_t kv_head = head - params.heads - (is_k ? 0 : params.kv_heads);
    if (is_q) {
      out = static_cast<T*>(params.q) + b * params.q_batch + t * params.q_token + head * params.q_head;
      in = out;
    } else {
      in = is_k ? static_cast<const T*>(params.k) + b * params.k_batch + t * params.k_token + kv_head * params.k_head
                : static_cast<const T*>(params.v) + b * params.v_batch + t * params.v_token + kv_head * params.v_head;
      const KvCache& cache = params.cache;
      const int64_t place = params.cache_seqlens[b] - params.tokens + t;
      if (place < 0 || place >= cache.capacity) return false;
      int64_t page = b, in_page = place;
      if (cache.block_table) {
        page = cache.block_table[b * cache.table_stride + place / cache.page_size];
        in_page = place % cache.page_size;
        if (page < 0 || page >= cache.pages) return false;
      }
      out = is_k ? static_cast<T*>(cache.k) + page * cache.k_page + in_page * cache.k_token + kv_head * cache.k_head
                 : static_cast<T*>(cache.v) + page * cache.v_page + in_page * cache.v_token + kv_head * cache.v_head;
    }
    return true;
  }

  __device__ const T* norm_weight(const RopeKvWriteParams& params) const {
    return static_cast<const T*>(is_q ? params.norm.q_weight : is_k ? params.norm.k_weight : nullptr);
  }

  // The strides between heads of q, of k or of v.
  __device__ int64_t in_stride(const RopeKvWriteParams& params) const {
    return is_q ? params.q_head : is_k ? params.k_head : params.v_head;
  }
  __device__ int64_t out_stride(const RopeKvWriteParams& params) const {
    return is_q ? params.q_head : is_k ? params.cache.k_head : params.cache.v_head;
  }
};

// Two vectors of a head, from pair d on.
template <typename T, int N>
struct Pairs {
  using V = Vec<T, N>;
  PairPlace at;
  V low, high;

  __device__ Pairs(const RopeKvWriteParams& params, const Head<T>& head, int d)
      : at(d, static_cast<int>(params.head_dim), static_cast<int>(params.rope.rotary_dim)) {
    if (params.interleaved) at.low = 2 * d, at.high = 2 * d + N;
    low = V::load(head.in + at.low);
    high = V::load(head.in + at.high);
  }

  // weight: that of the head.
  __device__ void normalize_by(const T* weight, float rstd, const RmsNormOptions& options) {
    low = normalize(low, rstd, V::load(weight + at.low), options);
    high = normalize(high, rstd, V::load(weight + at.high), options);
  }

  __device__ void rotate_and_store(const RopeKvWriteParams& params, const Head<T>& head) {
    if (at.rotated && (head.is_q || head.is_k)) {
      const int64_t index = head.b * params.positions_batch + head.t * params.positions_token;
      const int64_t position = params.position_ids_int64 ? static_cast<const int64_t*>(params.position_ids)[index]
                                                         : static_cast<const int32_t*>(params.position_ids)[index];
      if constexpr (N == 1) {
        if (params.interleaved) {
          rotate_neighbours(low, high, params.rope, position, at.low);
        } else {
          rotate(low, high, Angles<T, 1>::load(params.rope, position, at.low, at.high));
        }
      } else {
        rotate(low, high, Angles<T, N>::load(params.rope, position, at.low, at.high));
      }
    }
    low.store(head.out + at.low);
    high.store(head.out + at.high);
  }
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) rope_kv_write_kernel(const RopeKvWriteParams params) {
  const int64_t pairs = params.head_dim / 2 / N;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / pairs;
  const int d = static_cast<int>(index % pairs * N);
  Head<T> head(params, row);
  pdl_launch_dependents();
  pdl_wait();
  if (!head.find(params)) return;
  Pairs<T, N>(params, head, d).rotate_and_store(params, head);
}

// The same with a norm before the rotation: a head has `lanes` neighbouring lanes, a power of two, each with one or
// more pairs of vectors. They are read twice, the second time from L1.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) norm_rope_kv_write_kernel(const RopeKvWriteParams params, int lanes) {
  const int rank = static_cast<int>(threadIdx.x) % lanes;
  Head<T> head(params, static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes);
  pdl_launch_dependents();
  pdl_wait();
  // All lanes of a warp take part in the sum, those without a head, too.
  const int half = head.find(params) ? static_cast<int>(params.head_dim / 2) : 0;
  const T* const weight = head.norm_weight(params);
  float squares = 0.f;
  if (weight) {
    for (int d = rank * N; d < half; d += lanes * N) {
      const Pairs<T, N> x(params, head, d);
      squares = add_squares(squares, x.low, x.high);
    }
  }
  const float rstd = reciprocal_rms(warp_sum(squares, lanes), static_cast<int>(params.head_dim), params.norm.options);
  for (int d = rank * N; d < half; d += lanes * N) {
    Pairs<T, N> x(params, head, d);
    if (weight) x.normalize_by(weight, rstd, params.norm.options);
    x.rotate_and_store(params, head);
  }
}

// The same with a norm of all heads of a token together. A block has those of q, of k or of v: q changes in place, so
// no other block may need a part of it. The row is read twice, too.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) row_norm_rope_kv_write_kernel(const RopeKvWriteParams params) {
  __shared__ float of_warps[kThreads / 32];
  const int64_t token = blockIdx.x / 3, all_heads = params.heads + 2 * params.kv_heads;
  const int part = static_cast<int>(blockIdx.x % 3);  // q, k or v
  const int64_t first = part == 0 ? 0 : params.heads + (part - 1) * params.kv_heads;
  const unsigned heads = static_cast<unsigned>(part == 0 ? params.heads : params.kv_heads);
  const unsigned head_dim = static_cast<unsigned>(params.head_dim), pairs = head_dim / 2 / N;
  Head<T> head(params, token * all_heads + first);
  pdl_launch_dependents();
  pdl_wait();
  if (heads == 0 || !head.find(params)) return;  // the whole block
  const int64_t in_stride = head.in_stride(params), out_stride = head.out_stride(params);
  const T* const weight = head.norm_weight(params);
  float rstd = 1.f;
  if (weight) {
    const float squares = warp_squares<T, N>(head.in, in_stride, heads, head_dim);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = squares;
    __syncthreads();  // and nothing is written before all has been read
    rstd = reciprocal_rms(row_squares(of_warps, 1), static_cast<int>(heads * head_dim), params.norm.options);
  }
  const T* const in = head.in;
  T* const out = head.out;
  for (unsigned i = threadIdx.x; i < heads * pairs; i += kThreads) {
    const unsigned h = i / pairs;
    head.in = in + h * in_stride;
    head.out = out + h * out_stride;
    Pairs<T, N> x(params, head, (i - h * pairs) * N);
    if (weight) x.normalize_by(weight + h * head_dim, rstd, params.norm.options);
    x.rotate_and_store(params, head);
  }
}

template <typename T>
bool heads_and_caches_aligned(const RopeKvWriteParams& p) {
  constexpr int N = kVecWidth<T>;
  const KvCache& c = p.cache;
  for (const void* pointer :
       {static_cast<const void*>(p.q), p.k, p.v, static_cast<const void*>(c.k), static_cast<const void*>(c.v),
        p.rope.cos, p.rope.sin, p.norm.q_weight, p.norm.k_weight}) {
    if (!is_aligned(pointer, 16)) return false;
  }
  const std::initializer_list<int64_t> strides = {
      p.q_batch, p.q_token, p.q_head, p.k_batch, p.k_token, p.k_head, p.v_batch,      p.v_token,      p.v_head,
      c.k_page,  c.k_token, c.k_head, c.v_page,  c.v_token, c.v_head, p.rope.cos_row, p.rope.sin_row, p.head_dim / 2};
  if (p.interleaved || p.rope.rotary_dim / 2 % N != 0) return false;
  return std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s % N == 0; });
}

cudaError_t launch_rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, cudaStream_t stream) {
  const int64_t rows = params.batch * params.tokens * (params.heads + 2 * params.kv_heads);
  if (rows == 0 || params.head_dim == 0) return cudaSuccess;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const auto run = [&](auto kernel, int width) {
      const int64_t threads = rows * (params.head_dim / 2 / width);
      return launch(kernel, {(threads + kThreads - 1) / kThreads, dim3(kThreads)}, stream, params);
    };
    if (!params.norm.q_weight && !params.norm.k_weight) {
      return heads_and_caches_aligned<T>(params) ? run(rope_kv_write_kernel<T, N>, N)
                                                 : run(rope_kv_write_kernel<T, 1>, 1);
    }
    if (params.norm.row_wise) {
      const LaunchShape shape{params.batch * params.tokens * 3, dim3(kThreads)};
      return heads_and_caches_aligned<T>(params) ? launch(row_norm_rope_kv_write_kernel<T, N>, shape, stream, params)
                                                 : launch(row_norm_rope_kv_write_kernel<T, 1>, shape, stream, params);
    }
    const auto run_norm = [&](auto kernel, int width) {
      const int lanes = group_threads(params.head_dim / 2 / width, 1, 32), heads = kThreads / lanes;  // of a block
      return launch(kernel, {(rows + heads - 1) / heads, dim3(kThreads)}, stream, params, lanes);
    };
    return heads_and_caches_aligned<T>(params) ? run_norm(norm_rope_kv_write_kernel<T, N>, N)
                                               : run_norm(norm_rope_kv_write_kernel<T, 1>, 1);
  });
}

}  // namespace

cudaError_t rope_kv_write(const RopeKvWriteParams& params, Dtype dtype, cudaStream_t stream) {
  const auto launch = [=](const RopeKvWriteParams& p) { return launch_rope_kv_write(p, dtype, stream); };
  return launch_movable(params, launch, [](RopeKvWriteParams& p, const Moves& moves) {
    moves(p.cache.k, p.cache.v, p.cache_seqlens, p.position_ids);
  });
}

}  // namespace llmk::kernels
