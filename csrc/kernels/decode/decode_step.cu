// A whole decode step for one token, in one launch:
//
//   for every layer:  qkv = rms_norm(h) Wqkv^T + b      a = attention(rope(q), cache + rope(k), v)
//                     h += a Wo^T + b                   m = silu(g) u, [g | u] = rms_norm(h) Wgu^T      h += m Wd^T
//   logits = rms_norm(h) Whead^T + b
//
// bfloat16; products and sums in float32, rounded where linear.cu and decode_attention.cuh round. Reads every weight
// and every live key and value once, and that is its time: what else happens must not let the memory rest. As launches
// of their own the linears do let it rest, at each boundary, for as long as it takes a block to end, the next one to
// begin and its first requests to arrive. Here copying warps go on from one linear to the next, into the same ring in
// shared memory, since weights depend on nothing; only the inputs wait until all blocks have made them. An idea from
// the "megakernels" of Hazy Research (2025).
//
// What was found on an H200, with stamps of the global timer: bulk copies of whole rows (7 KB) reach 4.7 TB/s, of half
// rows 4.1, through tensor maps 4.5. With everything under way that the ring has room for, every other access waits for
// microseconds behind it; so a block has only some 90 KB under way, and less while blocks wait for each other. A
// barrier of the grid costs 2 to 4 us then, so vectors are exchanged word by word (exchange.cuh). Rows dealt out to all
// blocks in turns, or to whoever has time, were slower than a stretch of neighbours for each.
//
// One block per SM, launched cooperatively, so that all of them run when they wait for each other. x waits in shared
// memory, already multiplied by the norm's weight; 1 / rms joins at the end.
#include "decode_step.h"

#include "attend.cuh"
#include "device/grid_barrier.cuh"
#include "device/swiglu.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "linear.cuh"
#include "plan.h"

namespace llmk::kernels {
namespace {

#if __CUDA_ARCH__ >= 900

// What a layer reads besides rows of weights and keys, into the L2 cache, long before it is wanted: behind the weights
// that are under way a load takes microseconds. Every block brings another line.
__device__ void prefetch(const StepPlan& plan, const DecodeLayer& layer) {
  const auto lines = [](const void* from, int count) {
    const int at = static_cast<int>(threadIdx.x * gridDim.x + blockIdx.x) * 64;
    if (from && at < count) prefetch_l2(static_cast<const T*>(from) + at);
  };
  lines(layer.input_norm, plan.linear[kQkv].k);
  lines(layer.post_norm, plan.linear[kQkv].k);
  lines(layer.qkv_bias, plan.linear[kQkv].out);
  lines(layer.o_bias, plan.linear[kOutput].out);
}

#endif

template <int D>
__global__ void __launch_bounds__(32 * (kStepWarps + kStepCopyWarps), 1)
    decode_step_kernel(const __grid_constant__ StepArguments a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const DecodeStepParams& p = a.p;
  float* const squares = reinterpret_cast<float*>(shared + kStepSquares);
  T* const own = reinterpret_cast<T*>(shared + kStepOwn);  // this block's columns of the hidden state
  uint4* const x = reinterpret_cast<uint4*>(shared + kStepHeaderBytes);
  unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
  T* const activated = reinterpret_cast<T*>(workspace + a.plan.activated);
  T *const hidden = static_cast<T*>(p.hidden), *const logits = static_cast<T*>(p.logits);

  const Ring ring(a.plan, shared);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStepSlots; ++slot) {
      barrier_init(ring.full + 8 * slot, 1);
      barrier_init(ring.empty + 8 * slot, 1);
    }
    barrier_init_fence();
  }
  const StepPosition position = StepPosition::read<D>(p, shared + kStepAngles);
  const Share share(a.plan.linear[kDown]);
  for (int i = threadIdx.x; i < share.columns; i += blockDim.x) own[i] = hidden[share.begin + i];
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x % 32 == 0) copy(a, ring, (static_cast<int>(threadIdx.x) - kThreads) / 32);
    return;
  }

  Cursor cursor{0};
  unsigned* const counters = reinterpret_cast<unsigned*>(workspace);  // of the grid's barrier, then of the kv heads
  GridBarrier barrier{counters, kThreads};
  const auto exchange = [&](size_t offset, int number) {
    return Exchange{reinterpret_cast<uint2*>(workspace + offset), static_cast<unsigned>(number)};
  };
  const auto at = [](const void* from, int i) { return from ? to_float(static_cast<const T*>(from)[i]) : 0.f; };
  // hidden += x W^T (+ bias); what all blocks need goes to `exchange`.
  const auto add = [&](const void* bias, const Exchange& exchange, bool last) {
    return [=](int column) {
      const float first = at(bias, column), second = at(bias, column + 1);
      return [=](const auto& sum) {
        auto& kept = *reinterpret_cast<__nv_bfloat162*>(own + (column - share.begin));
        const auto change = Pair<T>::from_floats(sum(0) + first, sum(1) + second);
        kept = __hadd2_rn(kept, change);
        exchange.put(column, kept);
        if (last) *reinterpret_cast<__nv_bfloat162*>(hidden + column) = kept;
      };
    };
  };

  for (int i = 0; i < p.layers; ++i) {
    const DecodeLayer& layer = p.layer[i];
    const Exchange qkv = exchange(a.plan.qkv, i + 1), attended = exchange(a.plan.attended, i + 1);
    const Exchange middle = exchange(a.plan.middle, i + 1), output = exchange(a.plan.hidden, i + 1);
    StepAttention<D> attention(p, a.plan, position, i);
    attention.prefetch();
    if (i + 1 < p.layers) prefetch(a.plan, p.layer[i + 1]);
    {
      const int k = a.plan.linear[kQkv].k;
      const float factor = i == 0 ? stage(p, Complete{hidden}, layer.input_norm, k, x, squares)
                                  : stage(p, exchange(a.plan.hidden, i), layer.input_norm, k, x, squares);
      attention.load_ahead();
      multiply(a, 4 * i, x, shared, ring, cursor, [=](int column) {
        const float first = at(layer.qkv_bias, column), second = at(layer.qkv_bias, column + 1);
        return [=](const auto& sum) {
          qkv.put(column, Pair<T>::from_floats(sum(0) * factor + first, sum(1) * factor + second));
        };
      });
    }
    if (attention.active()) attention.run(qkv, attended, shared, workspace, a.plan, counters + 1);
    stage(p, attended, nullptr, a.plan.linear[kOutput].k, x, squares);
    multiply(a, 4 * i + 1, x, shared, ring, cursor, add(layer.o_bias, middle, false));
    {
      const float factor = stage(p, middle, layer.post_norm, a.plan.linear[kGateUp].k, x, squares);
      multiply(a, 4 * i + 2, x, shared, ring, cursor, [=](int column) {
        return [=](const auto& sum) {
          *reinterpret_cast<__nv_bfloat162*>(activated + column) = Pair<T>::from_floats(
              swiglu<T>(sum(0) * factor, sum(1) * factor), swiglu<T>(sum(2) * factor, sum(3) * factor));
        };
      });
    }
    // So long a vector goes through memory: with numbers it would be twice as long.
    barrier.arrive();
    barrier.wait();
    stage(p, Complete{activated}, nullptr, a.plan.linear[kDown].k, x, squares);
    multiply(a, 4 * i + 3, x, shared, ring, cursor, add(nullptr, output, i == p.layers - 1));
  }
  const float factor =
      stage(p, exchange(a.plan.hidden, static_cast<int>(p.layers)), p.norm, a.plan.linear[kHead].k, x, squares);
  multiply(a, 4 * p.layers, x, shared, ring, cursor, [=, &p](int column) {
    const bool both = column + 1 < p.vocab;
    const float first = at(p.head_bias, column), second = both ? at(p.head_bias, column + 1) : 0.f;
    return [=](const auto& sum) {
      logits[column] = from_float<T>(sum(0) * factor + first);
      if (both) logits[column + 1] = from_float<T>(sum(1) * factor + second);
    };
  });
#endif
}

}  // namespace

bool decode_step_supported(const DecodeStepParams& p, Dtype dtype) {
  DeviceInfo device;
  if (dtype != Dtype::kBFloat16 || device_info(device) != cudaSuccess) return false;
  if (device.compute_capability < 90 || !device.cooperative) return false;
  if (p.layers < 1 || p.layers > kMaxDecodeLayers || (p.head_dim != 64 && p.head_dim != 128)) return false;
  if (p.kv_heads < 1 || p.kv_heads > kMostKvHeads || p.kv_heads > device.sm_count || p.heads % p.kv_heads != 0)
    return false;
  if (p.heads / p.kv_heads > kStepQueries) return false;
  if (p.norm_options.weight_offset != 0 && p.norm_options.weight_offset != 1) return false;
  for (const int64_t size : {p.hidden_size, p.intermediate}) {
    if (size < 8 || size % 8 != 0 || size > 32768) return false;
  }
  if (p.hidden_size > int64_t{device.sm_count} * (kStepMostOwn - 2)) return false;
  if (p.heads * p.head_dim > 32768 || p.vocab > (1 << 22) || p.capacity > (1 << 30)) return false;
  const auto aligned = [](std::initializer_list<const void*> pointers) {
    return std::all_of(pointers.begin(), pointers.end(), [](const void* x) { return is_aligned(x, 16); });
  };
  const auto multiples = [](std::initializer_list<int64_t> strides) {
    return std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % 8 == 0; });
  };
  if (!aligned({p.hidden, p.norm, p.head, p.rope.cos, p.rope.sin}) || !p.norm) return false;
  if (!multiples({p.k_token, p.k_head, p.v_token, p.v_head, p.rope.cos_row, p.rope.sin_row})) return false;
  for (int64_t i = 0; i < p.layers; ++i) {
    const DecodeLayer& l = p.layer[i];
    if (!l.input_norm || !l.post_norm) return false;
    if (!aligned({l.input_norm, l.qkv, l.o, l.post_norm, l.gate_up, l.down, l.k, l.v})) return false;
  }
  const StepPlan plan = plan_decode_step(p, device.sm_count);
  return device.shared_bytes >= kStepSharedBytes && plan.slot_bytes >= kStepLeastSlotBytes;
}

cudaError_t decode_step_workspace_bytes(const DecodeStepParams& params, size_t& bytes) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  bytes = plan_decode_step(params, device.sm_count).workspace_bytes;
  return cudaSuccess;
}

cudaError_t decode_step(const DecodeStepParams& params, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const StepArguments arguments{params, plan_decode_step(params, device.sm_count)};
  // Of a step's own, so that steps on several streams do not meet.
  if (const cudaError_t status = cudaMemsetAsync(params.workspace, 0, arguments.plan.zero_bytes, stream);
      status != cudaSuccess) {
    return status;
  }
  LaunchShape shape{device.sm_count, dim3(32 * (kStepWarps + kStepCopyWarps)), arguments.plan.shared_bytes};
  shape.cooperative = true;
  return dispatch_int<64, 128>(static_cast<int>(params.head_dim), [&](auto head_dim) {
    return launch(decode_step_kernel<decltype(head_dim)::value>, shape, stream, arguments);
  });
}

}  // namespace llmk::kernels
