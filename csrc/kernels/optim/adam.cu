// A step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) for a list of tensors:
//
//   g = grad / grad_scale * clipping              m = m + (1 - beta1) (g - m)       v = beta2 v + (1 - beta2) g^2
//   p = p (1 - lr weight_decay) - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)
//
// or, if the weight decay is not decoupled, g + weight_decay p instead of the factor; amsgrad has the largest v so far
// in the root. Parameters and gradients are float32, float16 or bfloat16, states float32 or bfloat16; float32
// arithmetic, each result rounded once; parameters of 16 bits stochastically on request. In float32 it moves 28 bytes
// per element: memory is the limit. Idea of the table: the multi-tensor kernels of NVIDIA's Apex.
//
// All steps are counted up by the last block that has read its own. So a tensor's blocks belong to one launch.
//
// The next kernel starts after the end of this one, since it may read the parameters early (ptx.cuh).
#include "adam.h"

#include "device/ptx.cuh"
#include "kernels/dispatch.cuh"
#include "list.cuh"
#include "optim_arithmetic.h"

namespace llmk::kernels {
namespace {

using optim::AdamConstants;
using optim::AdamScalars;

template <int kCount>
struct AdamTable {
  static constexpr int kTensors = kCount;
  void* param[kCount];
  const void* grad[kCount];
  void* exp_avg[kCount];
  void* exp_avg_sq[kCount];
  void* max_exp_avg_sq[kCount];
  float* step[kCount];
  int64_t size[kCount];
  int first_block[kCount];
  int index[kCount];
  uint8_t kind[kCount];
};

// The rest of the parameters.
struct AdamLaunch {
  AdamConstants<float> constants;
  const float *lr, *grad_scale, *found_inf, *grad_norm;
  uint64_t seed;
  int* counter;
  int64_t chunk;
  int count;
};

using FewTensors = AdamTable<60>;
using ManyTensors = AdamTable<(kManyBytes - 256) / 65>;
static_assert(sizeof(FewTensors) + sizeof(AdamLaunch) <= kFewBytes);
static_assert(sizeof(ManyTensors) + sizeof(AdamLaunch) <= kManyBytes);

// What a tensor's kind says: its dtypes, and whether all of its memory is aligned to 16 bytes.
constexpr int kAligned = 1, kBFloat16State = 2, kDtypeShift = 2;

int kind_of(const AdamTensor& tensor) {
  bool aligned = true;
  for (const void* pointer :
       {static_cast<const void*>(tensor.param), tensor.grad, static_cast<const void*>(tensor.exp_avg),
        static_cast<const void*>(tensor.exp_avg_sq), static_cast<const void*>(tensor.max_exp_avg_sq)}) {
    aligned = aligned && is_aligned(pointer, 16);
  }
  return (aligned ? kAligned : 0) | (tensor.state_dtype == Dtype::kBFloat16 ? kBFloat16State : 0) |
         static_cast<int>(tensor.dtype) << kDtypeShift;
}

// What one thread of a block reads for all.
struct Shared {
  AdamScalars<float> scalars;
  float step;
  bool skip;
};

// The memory of one tensor. P: parameter and gradient, S: state.
template <typename P, typename S>
struct Operands {
  P* param;
  const P* grad;
  S *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
};

// N neighbouring elements of a tensor, from element i on.
template <typename P, typename S, int N, bool kAmsgrad>
struct Slice {
  Elements<P, N> p, g;
  Elements<S, N> m, v, v_max;

  __device__ void load(const Operands<P, S>& at, int64_t i) {
    p.load(at.param + i);
    g.load(at.grad + i);
    m.load(at.exp_avg + i);
    v.load(at.exp_avg_sq + i);
    if constexpr (kAmsgrad) v_max.load(at.max_exp_avg_sq + i);
  }

  template <bool kStochastic>
  __device__ void update(const Operands<P, S>& at, int64_t i, uint64_t seed, int index, const Shared& shared) const {
    const AdamScalars<float>& scalars = shared.scalars;
    float new_p[N], new_m[N], new_v[N], new_max[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      new_m[k] = m[k];
      new_v[k] = v[k];
      if constexpr (kAmsgrad) new_max[k] = v_max[k];
      new_p[k] = scalars.update<kAmsgrad>(p[k], g[k], new_m[k], new_v[k], new_max[k]);
    }
    if constexpr (kStochastic && sizeof(P) == 2) {
      const optim::RandomQuads random(seed, shared.step, index);
      constexpr int kQuad = N < 4 ? N : 4;
#pragma unroll
      for (int k = 0; k < N; k += kQuad) {
        const uint64_t bits = random((i + k) / 4) >> (i + k) % 4 * 16;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          const uint32_t own = static_cast<uint32_t>(bits >> 16 * j) & 0xffffu;
          new_p[k + j] = std::is_same_v<P, __half> ? optim::round_to_float16(new_p[k + j], own)
                                                   : optim::round_to_bfloat16(new_p[k + j], own);
        }
      }
    }
    p.store(new_p, at.param + i);
    m.store(new_m, at.exp_avg + i);
    v.store(new_v, at.exp_avg_sq + i);
    if constexpr (kAmsgrad) v_max.store(new_max, at.max_exp_avg_sq + i);
  }
};

// The first loads are under way while thread 0 prepares the scalars. Returns, in thread 0, how many blocks had read
// their step before: nothing waits for the answer before the end.
template <typename P, typename S, bool kAmsgrad, bool kStochastic>
__device__ int update_chunk(const Operands<P, S>& at, const Chunk& chunk, bool aligned, uint64_t seed, int index,
                            int* counter, const Shared& shared) {
  constexpr int N = kVecWidth<P>;
  const int64_t middle = end_of_vectors<N>(chunk, aligned);
  int64_t i = chunk.begin + static_cast<int64_t>(threadIdx.x) * N;
  Slice<P, S, N, kAmsgrad> vectors;
  if (i < middle) vectors.load(at, i);
  __syncthreads();  // the scalars are there
  const int before = threadIdx.x == 0 ? atomic_add_release(counter, 1) : 0;
  if (shared.skip) return before;
  while (i < middle) {
    vectors.template update<kStochastic>(at, i, seed, index, shared);
    i += kListThreads * N;
    if (i < middle) vectors.load(at, i);
  }
#pragma unroll 1
  for (i = middle + threadIdx.x; i < chunk.end; i += kListThreads) {
    Slice<P, S, 1, kAmsgrad> single;
    single.load(at, i);
    single.template update<kStochastic>(at, i, seed, index, shared);
  }
  return before;
}

// Calls body(TypeTag<P>{}, TypeTag<S>{}) with the types of a kind.
template <typename Body>
__device__ void dispatch_kind(int kind, const Body& body) {
  const auto with_state = [&](auto param) {
    if (kind & kBFloat16State) {
      body(param, TypeTag<__nv_bfloat16>{});
    } else {
      body(param, TypeTag<float>{});
    }
  };
  switch (static_cast<Dtype>(kind >> kDtypeShift)) {
    case Dtype::kFloat16: return with_state(TypeTag<__half>{});
    case Dtype::kBFloat16: return with_state(TypeTag<__nv_bfloat16>{});
    default: return with_state(TypeTag<float>{});
  }
}

// Template parameters: kAmsgrad and kStochastic, since they cost registers; Table, since its size is that of the
// launch.
template <bool kAmsgrad, bool kStochastic, typename Table>
__global__ void __launch_bounds__(kListThreads, kAmsgrad || kStochastic ? 3 : 4)
    adam_kernel(const __grid_constant__ Table table, const __grid_constant__ AdamLaunch launch) {
  __shared__ Shared shared;
  __shared__ bool last;
  const int t = tensor_of_block(table.first_block, launch.count);
  const Chunk chunk = chunk_of_block(table.first_block[t], launch.chunk, table.size[t]);
  pdl_wait();
  if (threadIdx.x == 0) {
    // The other threads go on to their loads.
    shared.skip = launch.found_inf && *launch.found_inf != 0.f;
    shared.step = *table.step[t];
    shared.scalars = launch.constants.at(shared.step + 1.f, launch.lr, launch.grad_scale, launch.grad_norm);
  }
  int before = 0;
  dispatch_kind(table.kind[t], [&](auto param, auto state) {
    using P = typename decltype(param)::type;
    using S = typename decltype(state)::type;
    const Operands<P, S> at{static_cast<P*>(table.param[t]), static_cast<const P*>(table.grad[t]),
                            static_cast<S*>(table.exp_avg[t]), static_cast<S*>(table.exp_avg_sq[t]),
                            static_cast<S*>(table.max_exp_avg_sq[t])};
    before = update_chunk<P, S, kAmsgrad, kStochastic>(at, chunk, table.kind[t] & kAligned, launch.seed, table.index[t],
                                                       launch.counter, shared);
  });
  if (threadIdx.x == 0) {
    last = before == static_cast<int>(gridDim.x) - 1;
    if (last) __threadfence();  // the steps are written after all blocks have read them
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) *launch.counter = 0;
  if (shared.skip) return;
  for (int i = static_cast<int>(threadIdx.x); i < launch.count; i += kListThreads) *table.step[i] += 1.f;
}

template <typename Table>
cudaError_t run(const Table& table, const AdamLaunch& launch_params, int64_t blocks, bool amsgrad, bool stochastic,
                cudaStream_t stream) {
  const auto kernel = amsgrad ? (stochastic ? adam_kernel<true, true, Table> : adam_kernel<true, false, Table>)
                              : (stochastic ? adam_kernel<false, true, Table> : adam_kernel<false, false, Table>);
  return launch(kernel, {blocks, dim3(kListThreads)}, stream, table, launch_params);
}

// Elements per block: two vectors for each thread. A list that runs at once takes few blocks, since each of them reads
// its step and computes its scalars first.
//
//   value       | case, an H200                        | result
//   ------------|--------------------------------------|-------------------------------
//   1024        | 1 million float32                    | 8 % slower than 4096
//   4096        | 10, 50 million float32               | 1 % slower than 2048
//   8192, 16384 | 50 million float32, 952 million bf16 | 2.5 % slower than two vectors
int64_t adam_chunk(const AdamTensor* tensors, int64_t count) {
  constexpr int64_t kLeast = 1024, kAtOnce = 2 << 20, kFewBlocks = 256;
  int64_t total = 0, vector = 4;
  for (int64_t i = 0; i < count; ++i) {
    total += tensors[i].size;
    if (tensors[i].dtype != Dtype::kFloat32) vector = 8;
  }
  const int64_t two_vectors = 2 * vector * kListThreads;
  if (total > kAtOnce) return two_vectors;
  int64_t chunk = kLeast;
  while (chunk < 4096 && total / chunk >= kFewBlocks) chunk *= 2;
  return chunk;
}

}  // namespace

cudaError_t adam(const AdamParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  const int64_t chunk = adam_chunk(params.tensors, params.count);
  const bool amsgrad = params.amsgrad;
  const auto set = [](auto& table, int i, const AdamTensor& tensor) {
    table.param[i] = tensor.param;
    table.grad[i] = tensor.grad;
    table.exp_avg[i] = tensor.exp_avg;
    table.exp_avg_sq[i] = tensor.exp_avg_sq;
    table.max_exp_avg_sq[i] = tensor.max_exp_avg_sq;
    table.step[i] = tensor.step;
    table.index[i] = tensor.index;
    table.kind[i] = static_cast<uint8_t>(kind_of(tensor));
  };
  const auto run_table = [&](const auto& table, int64_t first, int64_t end, int64_t blocks) {
    const AdamLaunch launch_params{.constants = AdamConstants<float>(params.options),
                                   .lr = params.lr,
                                   .grad_scale = params.grad_scale,
                                   .found_inf = params.found_inf,
                                   .grad_norm = params.grad_norm,
                                   .seed = params.seed,
                                   .counter = params.counter,
                                   .chunk = chunk,
                                   .count = static_cast<int>(end - first)};
    // Without any element there are steps to count.
    return run(table, launch_params, std::max<int64_t>(blocks, 1), amsgrad, params.stochastic, stream);
  };
  return for_tables<FewTensors, ManyTensors>(params.tensors, params.count, chunk, set, run_table);
}

}  // namespace llmk::kernels
