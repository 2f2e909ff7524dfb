// A whole decode step for one token, in one launch:
//
//   for every layer:  qkv = rms_norm(h) Wqkv^T + b      a = attention(rope(q), cache + rope(k), v)
//                     h += a Wo^T + b                   m = silu(g) u, [g | u] = rms_norm(h) Wgu^T      h += m Wd^T
//   logits = rms_norm(h) Whead^T + b
//
// bfloat16; products and sums in float32, rounded where linear.cu and decode_attention.cu round. Reads every weight and
// every live key and value once, and that is its time: what else happens must not let the memory rest. As launches of
// their own the linears do let it rest, at each boundary, for as long as it takes a block to end, the next one to begin
// and its first requests to arrive. Here a warp that has summed up its last rows of one linear goes on requesting its
// rows of the next one, into the same ring, since weights depend on nothing; only the inputs wait for the barrier of
// all blocks. The ring holds about 5 us of memory time, which is more than a barrier or the attention of a short
// context takes.
//
// One block per SM, launched cooperatively, so that all of them run when they wait for each other. The columns of a
// result are dealt out evenly to the blocks, and the rows of W that make them, in pieces of some KB, to the warps: so
// all warps are done at about the same time, however few rows there are or long they are. x waits in shared memory,
// already multiplied by the norm's weight; 1 / rms joins at the end. An idea from the "megakernels" of Hazy Research
// (2025).
#include "decode_step.h"

#include "attend.cuh"
#include "device/mma.cuh"
#include "device/reduce.cuh"
#include "device/tma.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "plan.h"

namespace llmk::kernels {
namespace {

using T = __nv_bfloat16;
using V = Vec<T, 8>;
constexpr int kThreads = 32 * kStepWarps;
[[maybe_unused]] constexpr int kHeld = 5;  // vectors of x per thread on their way into shared memory

struct Arguments {
  DecodeStepParams p;
  StepPlan plan;
};

// Of the grid's barrier, then of the kv heads; zero again at the end. Grids of this kernel may share them, for each
// wants every SM for itself.
__device__ unsigned counters[1 + 1024];

#if __CUDA_ARCH__ >= 900

// Linears are counted through the whole model, four to a layer, the head at the end.
__device__ inline StepKind kind_of(const DecodeStepParams& p, int linear) {
  return linear == 4 * p.layers ? kHead : static_cast<StepKind>(linear % 4);
}
__device__ inline const void* weight_of(const DecodeStepParams& p, int linear) {
  const DecodeLayer& layer = p.layer[linear / 4];
  switch (kind_of(p, linear)) {
    case kQkv: return layer.qkv;
    case kOutput: return layer.o;
    case kGateUp: return layer.gate_up;
    case kDown: return layer.down;
    default: return p.head;
  }
}

// What is this block's of a linear: columns of y, and so many rows of W: one for each, or two, of the gate and of the
// up projection in turns. A block's rows are neighbours: with neighbours in different blocks, which all of them read at
// the same time, the memory is slower.
struct Share {
  int begin, columns, rows;

  __device__ explicit Share(const StepLinear& l) {
    begin = static_cast<int>(static_cast<unsigned>(l.out) * blockIdx.x / gridDim.x);
    columns = static_cast<int>(static_cast<unsigned>(l.out) * (blockIdx.x + 1) / gridDim.x) - begin;
    rows = l.swiglu ? 2 * columns : columns;
  }
};

// A way along the ring: slots of a piece each, filled in the order of the block's pieces through all linears. A piece
// belongs to the warp whose turn it is, and so does the slot.
struct Cursor {
  int slot;
  uint32_t phase = 0;

  __device__ void advance(int by) {
    slot += by;
    if (slot >= kStepSlots) slot -= kStepSlots, phase ^= 1;
  }
};

// Where the ring is: addresses in shared memory.
struct Ring {
  uint32_t full, empty, slots;

  __device__ Ring(const StepPlan& plan, const unsigned char* shared)
      : full(shared_address(shared)), empty(full + 8 * kStepSlots), slots(full + kStepHeaderBytes + plan.x_bytes) {}
};

// A copying thread: every kStepCopyWarps-th piece, of one linear after the other, as soon as there is room. Every
// instruction of it takes its time, so there are few.
__device__ void copy(const Arguments& a, const Ring& ring, int index) {
  static_assert(kStepSlots % kStepCopyWarps == 0);
  const int linears = static_cast<int>(4 * a.p.layers) + 1;
  Cursor cursor{index}, arrived{index};
  int under_way = 0, item = index;
  for (int linear = 0; linear < linears; ++linear) {
    const StepLinear& l = a.plan.linear[kind_of(a.p, linear)];
    const Share share(l);
    const int items = share.rows * l.pieces;
    const int64_t row_bytes = 2 * static_cast<int64_t>(l.k);
    const char* const weight = static_cast<const char*>(weight_of(a.p, linear)) + share.begin * row_bytes;
    const int64_t up = l.out * row_bytes;
    const uint32_t piece_bytes = 2 * l.piece, last_bytes = 2 * (l.k - (l.pieces - 1) * l.piece);
    int row = item / l.pieces, piece = item - row * l.pieces;
    for (; item < items; item += kStepCopyWarps, cursor.advance(kStepCopyWarps)) {
      const char* const from =
          (l.swiglu ? weight + (row / 2) * row_bytes + (row % 2 ? up : 0) : weight + row * row_bytes) +
          piece * piece_bytes;
      const uint32_t bytes = piece == l.pieces - 1 ? last_bytes : piece_bytes, full = ring.full + 8 * cursor.slot;
      if (under_way == kStepAhead) {
        barrier_wait(ring.full + 8 * arrived.slot, arrived.phase);
        arrived.advance(kStepCopyWarps);
      } else {
        ++under_way;
      }
      barrier_wait(ring.empty + 8 * cursor.slot, cursor.phase ^ 1);  // a slot that was never used passes for empty
      barrier_arrive_expecting(full, bytes);
      bulk_load(ring.slots + cursor.slot * a.plan.slot_bytes, from, bytes, full, kEvictFirst);
      for (piece += kStepCopyWarps; piece >= l.pieces; piece -= l.pieces) ++row;
    }
    item -= items;
  }
}

// Brings x to shared memory, multiplied by the norm's weight if there is one. Returns what the sums are to be
// multiplied by: 1 / rms(x), or 1. All threads that compute.
__device__ float stage(const DecodeStepParams& p, const void* source, const void* norm_weight, int k, uint4* x,
                       float* squares) {
  constexpr int kHeld = 5;  // vectors per thread on their way
  const int count = k / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float offset = static_cast<float>(p.norm_options.weight_offset);
  float sum[1] = {0.f};
#pragma unroll 1
  for (int first = 0; first < count; first += kHeld * kThreads) {
    uint4 values[kHeld], weights[kHeld];  // raw: vectors of 16-bit elements would take twice the registers
    const auto load_all = [&](uint4(&vectors)[kHeld], const void* from) {
#pragma unroll
      for (int v = 0; v < kHeld; ++v) {
        const int i = first + v * kThreads + threadIdx.x;
        if (i < count) vectors[v] = __ldcg(static_cast<const uint4*>(from) + i);  // past L1: other blocks write it
      }
    };
    load_all(values, source);
    if (norm_weight) load_all(weights, norm_weight);
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int i = first + v * kThreads + threadIdx.x;
      if (i >= count) continue;
      if (norm_weight) {
        const V value = reinterpret_cast<const V&>(values[v]), weight = reinterpret_cast<const V&>(weights[v]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[0] += value[e] * value[e];
        const V product = V::of([&](int e) { return value[e] * (offset + weight[e]); });
        values[v] = reinterpret_cast<const uint4&>(product);
      }
      x[i] = values[v];
    }
  }
  if (norm_weight) {
    warp_sum(sum, 32);
    if (lane == 0) squares[warp] = sum[0];
  }
  named_barrier(1, kThreads);
  if (!norm_weight) return 1.f;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kStepWarps; ++i) total += squares[i];
  return rsqrtf(total * (1.f / static_cast<float>(k)) + static_cast<float>(p.norm_options.eps));
}

// What a layer reads besides rows of weights and keys, into the L2 cache, long before it is wanted: behind the weights
// that are under way a load takes microseconds. Every block brings another line.
__device__ void prefetch(const StepPlan& plan, const DecodeLayer& layer) {
  const auto lines = [](const void* from, int count) {
    const int at = (static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x)) * 64;
    if (from && at < count) prefetch_l2(static_cast<const T*>(from) + at);
  };
  lines(layer.input_norm, plan.linear[kQkv].k);
  lines(layer.post_norm, plan.linear[kQkv].k);
  lines(layer.qkv_bias, plan.linear[kQkv].out);
  lines(layer.o_bias, plan.linear[kOutput].out);
}

// The products of x with this block's rows of W. finish(column) returns a function of a column's sum, or with SwiGLU of
// the sums of the gate and of the up projection; it is called first, to load what it needs.
//
// By tensor cores, though there is but one column: they convert and add up for a fraction of the instructions. 256
// elements of a row are eight rows of the one operand and those of x eight columns of the other; their dot products are
// the diagonal. A lane takes 16 contiguous bytes of both as its part of two products.
template <typename Finish>
__device__ void multiply(const Arguments& a, int linear, const uint4* x, unsigned char* shared, const Ring& ring,
                         Cursor& cursor, const Finish& finish) {
  const StepLinear& l = a.plan.linear[kind_of(a.p, linear)];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const sums = reinterpret_cast<float*>(shared + kStepHeaderBytes + 2 * l.k);
  const Share share(l);
  const auto end_of_first = finish(share.begin + static_cast<int>(threadIdx.x) % share.columns);
  // The cursor stands at the first piece of the linear, which is the first warp's.
  const int items = share.rows * l.pieces;
  Cursor mine = cursor;
  mine.advance(warp);
  cursor.advance(items % kStepSlots);
  if (items / kStepSlots % 2) cursor.phase ^= 1;
  int piece = warp % l.pieces;
  for (int item = warp; item < items; item += kStepWarps, mine.advance(kStepWarps)) {
    const int vectors = min(l.piece, l.k - piece * l.piece) / 8;
    const uint4* const w =
        reinterpret_cast<const uint4*>(shared + (ring.slots - shared_address(shared)) + mine.slot * a.plan.slot_bytes) +
        lane;
    const uint4* const v = x + piece * (l.piece / 8) + lane;
    float c[4][4] = {};
    const auto add = [&](const uint4& m, const uint4& n, float(&first)[4], float(&second)[4]) {
      mma_16x8x16<T>(first, {m.x, 0, m.y, 0}, n.x, n.y);
      mma_16x8x16<T>(second, {m.z, 0, m.w, 0}, n.z, n.w);
    };
    barrier_wait(ring.full + 8 * mine.slot, mine.phase);
    int i = 0;
#pragma unroll 4
    for (; i + 64 <= vectors; i += 64) {
      add(w[i], v[i], c[0], c[1]);
      add(w[i + 32], v[i + 32], c[2], c[3]);
    }
    if (i + 32 <= vectors) {
      add(w[i], v[i], c[0], c[1]);
      i += 32;
    }
    if (i < vectors) {
      const bool inside = i + lane < vectors;
      const uint4 zero = make_uint4(0, 0, 0, 0);
      add(inside ? w[i] : zero, inside ? v[i] : zero, c[2], c[3]);
    }
    __syncwarp();  // all have read it
    if (lane == 0) barrier_arrive(ring.empty + 8 * mine.slot);
    // Row g, column g: one of the first two of the lane g / 2 of the row's four.
    float sum[1] = {lane / 4 % 2 ? (c[0][1] + c[1][1]) + (c[2][1] + c[3][1])
                                 : (c[0][0] + c[1][0]) + (c[2][0] + c[3][0])};
    if (lane % 4 != lane / 8) sum[0] = 0.f;
    warp_sum(sum, 32);
    if (lane == 0) sums[item] = sum[0];
    piece = (piece + kStepWarps) % l.pieces;
  }
  named_barrier(1, kThreads);
  const auto row_sum = [&](int row) {
    float sum = 0.f;
    for (int i = 0; i < l.pieces; ++i) sum += sums[row * l.pieces + i];
    return sum;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < share.columns; i += kThreads) {
    const auto end = i < kThreads ? end_of_first : finish(share.begin + i);
    if (l.swiglu) {
      end(row_sum(2 * i), row_sum(2 * i + 1));
    } else {
      end(row_sum(i), 0.f);
    }
  }
}

#endif

template <int D>
__global__ void __launch_bounds__(kThreads + 32 * kStepCopyWarps, 1)
    decode_step_kernel(const __grid_constant__ Arguments a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const DecodeStepParams& p = a.p;
  float* const squares = reinterpret_cast<float*>(shared + 16 * kStepSlots);
  static_assert(16 * kStepSlots + 4 * kStepWarps <= kStepHeaderBytes);
  uint4* const x = reinterpret_cast<uint4*>(shared + kStepHeaderBytes);
  unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
  T* const qkv = static_cast<T*>(p.workspace);
  T* const attended = reinterpret_cast<T*>(workspace + a.plan.attended);
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
  static_assert(512 + 4 * D <= kStepHeaderBytes);
  const StepPosition position = StepPosition::read<D>(p, shared + 512);
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x % 32 == 0) copy(a, ring, (static_cast<int>(threadIdx.x) - kThreads) / 32);
    return;
  }

  Cursor cursor{0};
  GridBarrier barrier{counters, kThreads};
  const auto at = [](const void* from, int i) {  // past L1: other blocks write it
    const unsigned short raw = __ldcg(static_cast<const unsigned short*>(from) + i);
    return to_float(reinterpret_cast<const T&>(raw));
  };
  // y = x W^T (+ bias), or y += that.
  const auto write = [&](const void* bias, T* y, bool add, float factor) {
    return [=](int column) {
      const float offset = bias ? at(bias, column) : 0.f, old = add ? at(y, column) : 0.f;
      return [=](float sum, float) {
        const T result = from_float<T>(sum * factor + offset);
        y[column] = add ? from_float<T>(old + to_float(result)) : result;
      };
    };
  };

  for (int i = 0; i < p.layers; ++i) {
    const DecodeLayer& layer = p.layer[i];
    StepAttention<D> attention(p, a.plan, position, i);
    attention.prefetch();
    if (i + 1 < p.layers) prefetch(a.plan, p.layer[i + 1]);
    {
      barrier.wait();
      const float factor = stage(p, hidden, layer.input_norm, a.plan.linear[kQkv].k, x, squares);
      attention.load_ahead();
      multiply(a, 4 * i, x, shared, ring, cursor, write(layer.qkv_bias, qkv, false, factor));
      barrier.arrive();
    }
    barrier.wait();
    if (attention.active()) attention.run(qkv, shared + kStepHeaderBytes, workspace, a.plan, counters + 1);
    barrier.arrive();
    {
      barrier.wait();
      const float factor = stage(p, attended, nullptr, a.plan.linear[kOutput].k, x, squares);
      multiply(a, 4 * i + 1, x, shared, ring, cursor, write(layer.o_bias, hidden, true, factor));
      barrier.arrive();
    }
    {
      barrier.wait();
      const float factor = stage(p, hidden, layer.post_norm, a.plan.linear[kGateUp].k, x, squares);
      multiply(a, 4 * i + 2, x, shared, ring, cursor, [=](int column) {
        return [=](float gate_sum, float up_sum) {
          const float gate = to_float(from_float<T>(gate_sum * factor)), up = to_float(from_float<T>(up_sum * factor));
          const float silu = to_float(from_float<T>(gate / (1.f + __expf(-gate))));
          activated[column] = from_float<T>(silu * up);
        };
      });
      barrier.arrive();
    }
    {
      barrier.wait();
      const float factor = stage(p, activated, nullptr, a.plan.linear[kDown].k, x, squares);
      multiply(a, 4 * i + 3, x, shared, ring, cursor, write(nullptr, hidden, true, factor));
      barrier.arrive();
    }
  }
  barrier.wait();
  const float factor = stage(p, hidden, p.norm, a.plan.linear[kHead].k, x, squares);
  multiply(a, 4 * p.layers, x, shared, ring, cursor, write(p.head_bias, logits, false, factor));
  barrier.finish();
#endif
}

}  // namespace

bool decode_step_supported(const DecodeStepParams& p, Dtype dtype) {
  DeviceInfo device;
  if (dtype != Dtype::kBFloat16 || device_info(device) != cudaSuccess || device.compute_capability < 90) return false;
  if (p.layers < 1 || p.layers > kMaxDecodeLayers || (p.head_dim != 64 && p.head_dim != 128)) return false;
  if (p.kv_heads < 1 || p.kv_heads > 1024 || p.kv_heads > device.sm_count || p.heads % p.kv_heads != 0) return false;
  if (p.heads / p.kv_heads > kStepQueries) return false;
  if (p.norm_options.weight_offset != 0 && p.norm_options.weight_offset != 1) return false;
  for (const int64_t size : {p.hidden_size, p.intermediate}) {
    if (size < 8 || size % 8 != 0 || size > 32768) return false;
  }
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
  return device.shared_bytes >= kStepSharedBytes && plan.slot_bytes >= 1024;
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
  const Arguments arguments{params, plan_decode_step(params, device.sm_count)};
  LaunchShape shape{device.sm_count, dim3(kThreads + 32 * kStepCopyWarps), arguments.plan.shared_bytes};
  shape.cooperative = true;
  return dispatch_int<64, 128>(static_cast<int>(params.head_dim), [&](auto head_dim) {
    return launch(decode_step_kernel<decltype(head_dim)::value>, shape, stream, arguments);
  });
}

}  // namespace llmk::kernels
