// The norm of a list of gradients, and their clipping to a norm:
//
//   norm = sqrt(sum g^2) or max |g|               g = g min(1, max_norm / (norm + 1e-6))
//
// Gradients are float32, float16 or bfloat16. A first kernel sums up each chunk in float32, a second one, of one block,
// the chunks in float64; the order depends on the sizes
// and the alignment to 16 bytes alone. The norm reads each element once, clipping reads and
// writes it, or ends at once if there is nothing to clip.
#include "grad_norm.h"

#include "device/ptx.cuh"
#include "kernels/dispatch.cuh"
#include "list.cuh"
#include "optim_arithmetic.h"

namespace llmk::kernels {
namespace {

template <int kCount>
struct GradTable {
  static constexpr int kTensors = kCount;
  void* data[kCount];
  int64_t size[kCount];
  int first_block[kCount];
  uint8_t kind[kCount];
};
using FewTensors = GradTable<180>;
using ManyTensors = GradTable<(kManyBytes - 64) / 22>;
static_assert(sizeof(FewTensors) + 64 <= kFewBytes);
static_assert(sizeof(ManyTensors) + 64 <= kManyBytes);

// What a tensor's kind says: its dtype, and whether it is aligned to 16 bytes.
constexpr int kAligned = 1, kDtypeShift = 1;

template <typename Table>
void set(Table& table, int i, const GradTensor& tensor) {
  table.data[i] = tensor.data;
  table.kind[i] = static_cast<uint8_t>((is_aligned(tensor.data, 16) ? kAligned : 0) | static_cast<int>(tensor.dtype)
                                                                                          << kDtypeShift);
}

// Calls body(TypeTag<T>{}) with the type of a kind.
template <typename Body>
__device__ void dispatch_kind(int kind, const Body& body) {
  switch (static_cast<Dtype>(kind >> kDtypeShift)) {
    case Dtype::kFloat16: return body(TypeTag<__half>{});
    case Dtype::kBFloat16: return body(TypeTag<__nv_bfloat16>{});
    default: return body(TypeTag<float>{});
  }
}

// NaN if either is.
template <bool kInfinity, typename A>
__device__ A combine(A a, A b) {
  if constexpr (kInfinity) return a > b || a != a ? a : b;
  return a + b;
}

// Over the threads of a block, a multiple of 32; thread 0 gets the result. `shared` has an element per warp.
template <bool kInfinity, typename A>
__device__ A combine_block(A value, A* shared) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine<kInfinity>(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 1; i < blockDim.x / 32; ++i) value = combine<kInfinity>(value, shared[i]);
  }
  return value;
}

// Template parameters: kInfinity, the arithmetic; Table, since its size is that of the launch.
template <bool kInfinity, typename Table>
__global__ void __launch_bounds__(kListThreads)
    grad_norm_kernel(const __grid_constant__ Table table, int count, int64_t chunk_size, float* partials) {
  __shared__ float shared[kListThreads / 32];
  const int t = tensor_of_block(table.first_block, count);
  const Chunk chunk = chunk_of_block(table.first_block[t], chunk_size, table.size[t]);
  pdl_launch_dependents();
  pdl_wait();
  float total = 0.f;
  dispatch_kind(table.kind[t], [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    const T* const data = static_cast<const T*>(table.data[t]);
    const auto add = [&](float g) { total = combine<kInfinity>(kInfinity ? fabsf(g) : g * g, total); };
    const int64_t middle = end_of_vectors<N>(chunk, table.kind[t] & kAligned);
#pragma unroll 4
    for (int64_t i = chunk.begin + static_cast<int64_t>(threadIdx.x) * N; i < middle; i += kListThreads * N) {
      Elements<T, N> g;
      g.load(data + i);
#pragma unroll
      for (int k = 0; k < N; ++k) add(g[k]);
    }
    for (int64_t i = middle + threadIdx.x; i < chunk.end; i += kListThreads) add(to_float(data[i]));
  });
  total = combine_block<kInfinity>(total, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

constexpr int kSumThreads = 1024;

template <bool kInfinity>
__global__ void __launch_bounds__(kSumThreads)
    combine_partials_kernel(const float* partials, int64_t count, float* norm) {
  __shared__ double shared[kSumThreads / 32];
  pdl_launch_dependents();
  pdl_wait();
  double total = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) {
    total = combine<kInfinity>(static_cast<double>(partials[i]), total);
  }
  total = combine_block<kInfinity>(total, shared);
  if (threadIdx.x == 0) *norm = static_cast<float>(kInfinity ? total : sqrt(total));
}

template <typename Table>
__global__ void __launch_bounds__(kListThreads)
    clip_grads_kernel(const __grid_constant__ Table table, int count, int64_t chunk_size, const float* norm,
                      float max_norm) {
  const int t = tensor_of_block(table.first_block, count);
  const Chunk chunk = chunk_of_block(table.first_block[t], chunk_size, table.size[t]);
  pdl_launch_dependents();
  pdl_wait();
  const float factor = optim::clip_factor(*norm, max_norm);
  if (factor == 1.f) return;
  dispatch_kind(table.kind[t], [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVecWidth<T>;
    T* const data = static_cast<T*>(table.data[t]);
    const int64_t middle = end_of_vectors<N>(chunk, table.kind[t] & kAligned);
    for (int64_t i = chunk.begin + static_cast<int64_t>(threadIdx.x) * N; i < middle; i += kListThreads * N) {
      Elements<T, N> g;
      g.load(data + i);
      float scaled[N];
#pragma unroll
      for (int k = 0; k < N; ++k) scaled[k] = g[k] * factor;
      g.store(scaled, data + i);
    }
    for (int64_t i = middle + threadIdx.x; i < chunk.end; i += kListThreads) {
      data[i] = from_float<T>(to_float(data[i]) * factor);
    }
  });
}

template <typename Body>
cudaError_t for_grads(const GradTensor* tensors, int64_t count, int64_t chunk, const Body& body) {
  const auto set_entry = [](auto& table, int i, const GradTensor& tensor) { set(table, i, tensor); };
  return for_tables<FewTensors, ManyTensors>(tensors, count, chunk, set_entry, body);
}

template <bool kInfinity>
cudaError_t norm_of(const GradNormParams& params, cudaStream_t stream) {
  const int64_t chunk = chunk_for(params.tensors, params.count);
  int64_t partials = 0;
  const auto run = [&](const auto& table, int64_t first, int64_t end, int64_t blocks) {
    if (blocks == 0) return cudaSuccess;
    using Table = std::decay_t<decltype(table)>;
    float* const into = params.partials + partials;
    partials += blocks;
    return launch(grad_norm_kernel<kInfinity, Table>, {blocks, dim3(kListThreads)}, stream, table,
                  static_cast<int>(end - first), chunk, into);
  };
  const cudaError_t status = for_grads(params.tensors, params.count, chunk, run);
  if (status != cudaSuccess) return status;
  return launch(combine_partials_kernel<kInfinity>, {1, dim3(kSumThreads)}, stream,
                static_cast<const float*>(params.partials), partials, params.norm);
}

}  // namespace

int64_t grad_norm_partials(const GradTensor* tensors, int64_t count) {
  const int64_t chunk = chunk_for(tensors, count);
  int64_t partials = 0;
  for (int64_t i = 0; i < count; ++i) partials += chunks(tensors[i].size, chunk);
  return partials;
}

cudaError_t grad_norm(const GradNormParams& params, cudaStream_t stream) {
  return params.infinity ? norm_of<true>(params, stream) : norm_of<false>(params, stream);
}

cudaError_t clip_grads(const ClipGradParams& params, cudaStream_t stream) {
  const int64_t chunk = chunk_for(params.tensors, params.count);
  return for_grads(
      params.tensors, params.count, chunk, [&](const auto& table, int64_t first, int64_t end, int64_t blocks) {
        if (blocks == 0) return cudaSuccess;
        using Table = std::decay_t<decltype(table)>;
        return launch(clip_grads_kernel<Table>, {blocks, dim3(kListThreads)}, stream, table,
                      static_cast<int>(end - first), chunk, params.norm, static_cast<float>(params.max_norm));
      });
}

}  // namespace llmk::kernels
