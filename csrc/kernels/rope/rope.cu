// Rotary position embedding (Su et al. 2021) of queries and keys in one launch. With h = rotary_dim / 2, pairs
// (a, b) = (i, i + h), or (2i, 2i + 1) when interleaved, and r = rounding to the dtype:
//
//   out[a] = r(r(x[a] cos[a]) + r(-x[b] sin[a]))        out[b] = r(r(x[b] cos[b]) + r(x[a] sin[b]))
//
// bitwise equal to eager PyTorch's (x * cos) + (rotate_half(x) * sin). The backward pass is the transpose: sin is taken
// from the other element of the pair, with the other sign. Dimensions from rotary_dim on are copied.
// Tensors are [batch, tokens, heads, head_dim] by any strides; float32, float16 or bfloat16.
//
// Reads and writes every element of q and k once; cos and sin stay in registers for all heads of a token. A thread
// holds two vectors of the head, N elements at d and N at d + h, so that both layouts find their pairs in registers. A
// block takes one or more tokens; threadIdx.y strides over the heads of q, then of k.
#include "rope.h"

#include <algorithm>

#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/recorder.h"
#include "rotation.cuh"

namespace llmk::kernels {
namespace {

constexpr int kHeads = 2;  // heads per thread and iteration, whose loads are in flight together

// One head of one token.
template <typename T>
struct Head {
  const T* in;
  T* out;
  __device__ Head(const RopeParams& params, int64_t b, int64_t t, int head) {
    const bool is_q = head < params.q.heads;
    const RopeTensor& tensor = is_q ? params.q : params.k;
    const int64_t h = is_q ? head : head - params.q.heads;
    in = static_cast<const T*>(tensor.in) + b * tensor.in_batch + t * tensor.in_token + h * tensor.in_head;
    out = static_cast<T*>(tensor.out) + b * tensor.out_batch + t * tensor.out_token + h * tensor.out_head;
  }
};

// N: elements per access, 1 where something is not aligned to 16 bytes. kInterleaved is a template parameter because
// its pairs lie in other registers.
template <typename T, int N, bool kInterleaved>
__global__ void __launch_bounds__(256) rope_kernel(const RopeParams params, bool keep_inputs) {
  using V = Vec<T, N>;
  const int64_t half = params.rotary_dim / 2;
  const int heads = static_cast<int>(params.q.heads + params.k.heads);
  const unsigned token = blockIdx.x * blockDim.z + threadIdx.z, tokens = static_cast<unsigned>(params.tokens);
  // In 32 bits, and only where it is needed: a division takes as long as the rotation.
  const unsigned b = params.batch == 1 ? 0 : token / tokens, t = token - b * tokens;
  if (token >= params.batch * params.tokens) return;
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();

  for (int64_t d = static_cast<int64_t>(threadIdx.x) * N; d < half; d += static_cast<int64_t>(blockDim.x) * N) {
    const Span<N, kInterleaved> at(d, half);
    V low[kHeads], high[kHeads];
    const auto load = [&](int first) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        const int head = first + j * blockDim.y;
        if (head >= heads) continue;
        const T* const in = Head<T>(params, b, t, head).in;
        low[j] = V::load(in + at.low, policy);
        high[j] = V::load(in + at.high, policy);
      }
    };
    int first = threadIdx.y;
    load(first);  // before the angles, so that both loads are in flight
    const Rotation<T, N> rotation = load_rotation_of<T>(params, b, t, d, at);
    while (true) {
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        const int head = first + j * blockDim.y;
        if (head >= heads) continue;
        V of_low, of_high;
        partners<T, N, kInterleaved>(low[j], high[j], of_low, of_high);
        T* const out = Head<T>(params, b, t, head).out;
        add(mul(low[j], rotation.own_low), mul(of_low, rotation.other_low)).store(out + at.low);
        add(mul(high[j], rotation.own_high), mul(of_high, rotation.other_high)).store(out + at.high);
      }
      first += kHeads * blockDim.y;
      if (first >= heads) break;
      load(first);
    }
  }

  for (int64_t d = params.rotary_dim + threadIdx.x; d < params.head_dim; d += blockDim.x) {
    for (int head = threadIdx.y; head < heads; head += blockDim.y) {
      const Head<T> pointers(params, b, t, head);
      if (pointers.in != pointers.out) pointers.out[d] = pointers.in[d];
    }
  }
}

template <typename T>
bool heads_and_angles_aligned(const RopeParams& p) {
  constexpr int N = kVecWidth<T>;
  return p.rotary_dim / 2 % N == 0 && are_vectors<T>(p.q, N) && are_vectors<T>(p.k, N) && has_vector_angles<T>(p, N);
}

// x: pairs of a head, y: heads, in as few rounds as 256 threads allow and then evenly, z: tokens.
dim3 block_shape(const RopeParams& params, int width) {
  constexpr int kThreads = 256;
  const auto pairs = static_cast<int>(std::clamp<int64_t>(params.rotary_dim / 2 / width, 1, 32));
  const int64_t heads = params.q.heads + params.k.heads, rounds = (heads * pairs + kThreads - 1) / kThreads;
  const int rows = static_cast<int>(std::min<int64_t>((heads + rounds - 1) / rounds, kThreads / pairs));
  return dim3(pairs, rows, std::clamp(kThreads / (pairs * rows), 1, 64));
}

cudaError_t launch_rope(const RopeParams& params, Dtype dtype, cudaStream_t stream) {
  const int64_t tokens = params.batch * params.tokens;
  if (tokens == 0 || params.head_dim == 0 || params.q.heads + params.k.heads == 0) return cudaSuccess;
  if (tokens > kMaxRopeTokens) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const int64_t bytes = 2 * tokens * (params.q.heads + params.k.heads) * params.head_dim * sizeof(T);
    const auto run = [&](auto kernel, int width) {
      const dim3 threads = block_shape(params, width);
      return launch(kernel, {(tokens + threads.z - 1) / threads.z, threads}, stream, params,
                    keeps_inputs(device, bytes));
    };
    if (!heads_and_angles_aligned<T>(params)) {
      return run(params.interleaved ? rope_kernel<T, 1, true> : rope_kernel<T, 1, false>, 1);
    }
    return run(params.interleaved ? rope_kernel<T, N, true> : rope_kernel<T, N, false>, N);
  });
}

}  // namespace

cudaError_t rope(const RopeParams& params, Dtype dtype, cudaStream_t stream) {
  return launch_movable(
      params, [=](const RopeParams& p) { return launch_rope(p, dtype, stream); },
      [](RopeParams& p, const Moves& moves) { moves(p.position_ids); });
}

}  // namespace llmk::kernels
