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
#include <initializer_list>

#include "device/ptx.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kHeads = 2;  // heads per thread and iteration, whose loads are in flight together

// Where the two vectors of the thread at pair d (a multiple of N) begin in a head. With N = 1 an interleaved pair is
// two neighbours; with N > 1 each vector holds whole interleaved pairs.
template <int N, bool kInterleaved>
struct Span {
  int64_t low, high;
  __device__ Span(int64_t d, int64_t half)
      : low(kInterleaved && N == 1 ? 2 * d : d), high(kInterleaved && N == 1 ? 2 * d + 1 : d + half) {}
};

// Whether both elements of a pair lie in the same vector, rather than one each in the low and the high vector.
template <int N, bool kInterleaved>
constexpr bool kNeighbours = kInterleaved&& N > 1;

// The elements of `low` and `high` that each element is paired with.
template <typename T, int N, bool kInterleaved>
__device__ void partners(const Vec<T, N>& low, const Vec<T, N>& high, Vec<T, N>& of_low, Vec<T, N>& of_high) {
  if constexpr (kNeighbours<N, kInterleaved>) {
#pragma unroll
    for (int i = 0; i < N; ++i) of_low.data[i] = low.data[i ^ 1], of_high.data[i] = high.data[i ^ 1];
  } else {
    of_low = high;
    of_high = low;
  }
}

// The factors of the two vectors of a thread: out = x * own + partner * other.
template <typename T, int N>
struct Rotation {
  Vec<T, N> own_low, own_high, other_low, other_high;
};

// cos or sin of the two vectors.
template <typename T, int N, bool kInterleaved>
__device__ void load_angles(const T* row, int64_t d, const Span<N, kInterleaved>& at, bool half_width, Vec<T, N>& low,
                            Vec<T, N>& high) {
  if (!half_width) {
    low = Vec<T, N>::load(row + at.low);
    high = Vec<T, N>::load(row + at.high);
  } else if constexpr (kNeighbours<N, kInterleaved>) {  // one angle for two neighbours
#pragma unroll
    for (int i = 0; i < N; ++i) low.data[i] = row[(at.low + i) / 2], high.data[i] = row[(at.high + i) / 2];
  } else {
    low = high = Vec<T, N>::load(row + d);
  }
}

template <typename T, int N, bool kInterleaved>
__device__ Rotation<T, N> load_rotation(const T* cos, const T* sin, int64_t d, const Span<N, kInterleaved>& at,
                                        const RopeParams& params) {
  using V = Vec<T, N>;
  Rotation<T, N> rotation;
  V sin_low, sin_high;
  load_angles(cos, d, at, params.half_width, rotation.own_low, rotation.own_high);
  load_angles(sin, d, at, params.half_width, sin_low, sin_high);
  if (params.transposed) {  // the sin of the other element of the pair
    V other_low, other_high;
    partners<T, N, kInterleaved>(sin_low, sin_high, other_low, other_high);
    sin_low = other_low;
    sin_high = other_high;
  }
  // The first element of a pair gets -sin, the second sin; the transpose has it the other way round.
  const float sign = params.transposed ? 1.f : -1.f;
  constexpr bool kAlternating = kNeighbours<N, kInterleaved>;
  rotation.other_low = V::of([&](int i) { return (kAlternating && i % 2 ? -sign : sign) * sin_low[i]; });
  rotation.other_high = V::of([&](int i) { return (kAlternating && i % 2 == 0 ? sign : -sign) * sin_high[i]; });
  return rotation;
}

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

// Finds the rows of cos and sin that belong to a token; false for a position outside the table.
template <typename T>
__device__ bool angle_rows(const RopeParams& params, int64_t b, int64_t t, const T*& cos, const T*& sin) {
  cos = static_cast<const T*>(params.cos);
  sin = static_cast<const T*>(params.sin);
  if (!params.position_ids) {
    cos += b * params.cos_batch + t * params.cos_token;
    sin += b * params.sin_batch + t * params.sin_token;
    return true;
  }
  const int64_t at = b * params.positions_batch + t * params.positions_token;
  const int64_t position = params.position_ids_int64 ? static_cast<const int64_t*>(params.position_ids)[at]
                                                     : static_cast<const int32_t*>(params.position_ids)[at];
  if (position < 0 || position >= params.table_rows) return false;
  cos += position * params.cos_row;
  sin += position * params.sin_row;
  return true;
}

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
    Rotation<T, N> rotation;
    const T *cos, *sin;
    if (angle_rows(params, b, t, cos, sin)) {
      rotation = load_rotation(cos, sin, d, at, params);
    } else {  // no such position: NaN, rather than a wrong rotation
      rotation.own_low = rotation.own_high = rotation.other_low = rotation.other_high =
          V::of([](int) { return __int_as_float(0x7fc00000); });
    }
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
bool is_vector(const RopeParams& p) {
  constexpr int N = kVecWidth<T>;
  const auto multiple = [](std::initializer_list<int64_t> strides) {
    return std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % N == 0; });
  };
  const auto tensor = [&](const RopeTensor& x) {
    return is_aligned(x.in, 16) && is_aligned(x.out, 16) &&
           multiple({x.in_batch, x.in_token, x.in_head, x.out_batch, x.out_token, x.out_head});
  };
  // Interleaved angles of half width are read one by one.
  const bool angles = (p.interleaved && p.half_width) ||
                      (is_aligned(p.cos, 16) && is_aligned(p.sin, 16) &&
                       multiple({p.cos_batch, p.cos_token, p.cos_row, p.sin_batch, p.sin_token, p.sin_row}));
  return p.rotary_dim / 2 % N == 0 && tensor(p.q) && tensor(p.k) && angles;
}

// x: pairs of a head, y: heads, in as few rounds as 256 threads allow and then evenly, z: tokens.
dim3 block_shape(const RopeParams& params, int width) {
  constexpr int kThreads = 256;
  const auto pairs = static_cast<int>(std::clamp<int64_t>(params.rotary_dim / 2 / width, 1, 32));
  const int64_t heads = params.q.heads + params.k.heads, rounds = (heads * pairs + kThreads - 1) / kThreads;
  const int rows = static_cast<int>(std::min<int64_t>((heads + rounds - 1) / rounds, kThreads / pairs));
  return dim3(pairs, rows, std::clamp(kThreads / (pairs * rows), 1, 64));
}

}  // namespace

cudaError_t rope(const RopeParams& params, Dtype dtype, cudaStream_t stream) {
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
    if (!is_vector<T>(params)) {
      return run(params.interleaved ? rope_kernel<T, 1, true> : rope_kernel<T, 1, false>, 1);
    }
    return run(params.interleaved ? rope_kernel<T, N, true> : rope_kernel<T, N, false>, N);
  });
}

}  // namespace llmk::kernels
