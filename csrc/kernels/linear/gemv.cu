// Linear for one token: linear.cu's formulas with m = 1, by dot products.
//
// The columns of y are dealt out evenly to the blocks, and a block's rows of W two at a time to its warps (gate and up
// for SwiGLU), so that a piece of x is read once for both. Every warp sums up whole rows and has a small ring of its
// own in shared memory, into which it requests pieces of them, contiguous in memory; the first, if the weights are
// settled (see linear.cu), before the kernel in front of this one has ended. x waits in shared memory, already
// multiplied by the norm's weight; 1 / rms joins at the end.
#include "gemv.h"

#include <algorithm>

#include "device/reduce.cuh"
#include "device/swiglu.cuh"
#include "device/tma.cuh"
#include "device/vec.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kWarps = kGemvWarps, kThreads = 32 * kWarps;
[[maybe_unused]] constexpr int kHeld = 4;  // vectors of x per thread on their way into shared memory
constexpr int kSlotsPerWarp = 2, kSlots = kWarps * kSlotsPerWarp;
// Two blocks fit an SM, so the next kernel begins while this one ends.
constexpr int kSharedBytes = 112 * 1024, kHeaderBytes = 512;

struct Arguments {
  const void *x, *norm_weight, *weight, *bias;
  void* y;
  bool add, swiglu, fold, norm_offset, settled;
  int k;
  int piece, pieces;  // elements of a row per slot; how many make up a row
  int share, rest;    // columns of y for each block; how many blocks have one more
  int step;           // columns of y in a pair of rows
  int64_t second;     // rows from the first of a pair to the second
  int64_t row_bytes;  // between rows
  float eps;
};

// sum += the dot product of eight elements; even and odd ones apart, for two shorter chains.
template <typename T>
__device__ inline void dot(float (&sum)[2], const Vec<T, 8>& w, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    sum[0] = fmaf(w[i], x[i], sum[0]);
    sum[1] = fmaf(w[i + 1], x[i + 1], sum[1]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) gemv_kernel(const __grid_constant__ Arguments a) {
#if __CUDA_ARCH__ >= 900
  using V = Vec<T, 8>;
  extern __shared__ __align__(128) unsigned char shared[];
  float* const squares = reinterpret_cast<float*>(shared + 8 * kSlots);
  V* const x = reinterpret_cast<V*>(shared + kHeaderBytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slot_bytes = 4 * a.piece;
  const int block = static_cast<int>(blockIdx.x), begin = block * a.share + min(block, a.rest);
  const int end = begin + a.share + (block < a.rest);
  // This warp's part of the ring, and of the barriers.
  unsigned char* const ring = shared + kHeaderBytes + (2 * a.k + 127) / 128 * 128 + warp * kSlotsPerWarp * slot_bytes;
  const uint32_t full = shared_address(shared) + 8 * kSlotsPerWarp * warp;
  // Requests the next piece of this warp's next pair of rows; the last one may lack its second.
  int next = begin + warp * a.step, next_piece = 0;
  const auto request = [&](int slot) {
    if (next >= end) return;
    if (lane == 0) {
      const bool both = a.swiglu || next + 1 < end;
      const char* const from = static_cast<const char*>(a.weight) + next * a.row_bytes + 2 * next_piece * a.piece;
      const uint32_t bytes = 2 * min(a.piece, a.k - next_piece * a.piece);
      const uint32_t to = shared_address(ring) + slot * slot_bytes, barrier = full + 8 * slot;
      barrier_arrive_expecting(barrier, both ? 2 * bytes : bytes);
      bulk_load(to, from, bytes, barrier, kEvictFirst);
      if (both) bulk_load(to + 2 * a.piece, from + a.second * a.row_bytes, bytes, barrier, kEvictFirst);
    }
    if (++next_piece == a.pieces) next_piece = 0, next += kWarps * a.step;
  };
  if (lane == 0) {
    for (int slot = 0; slot < kSlotsPerWarp; ++slot) barrier_init(full + 8 * slot, 1);
    barrier_init_fence();
  }
  __syncwarp();
  if (!a.settled) pdl_wait();
  for (int slot = 0; slot < kSlotsPerWarp; ++slot) request(slot);
  // At once: later, blocks of the next kernel would crowd onto the SMs that are done first.
  pdl_launch_dependents();

  // x into shared memory, kHeld vectors per thread in flight; the first of the norm's weight are there before x is.
  const int count = a.k / 8;
  const auto load_all = [&](V(&vectors)[kHeld], const void* from, int first) {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int i = first + v * kThreads + threadIdx.x;
      if (i < count) vectors[v] = V::load(static_cast<const T*>(from) + i * 8);
    }
  };
  V norm_weight[kHeld], values[kHeld];
  if (a.fold) load_all(norm_weight, a.norm_weight, 0);
  pdl_wait();
  float sum[1] = {0.f};
  for (int first = 0; first < count; first += kHeld * kThreads) {
    load_all(values, a.x, first);
    if (a.fold && first > 0) load_all(norm_weight, a.norm_weight, first);
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int i = first + v * kThreads + threadIdx.x;
      if (i >= count) continue;
      if (a.fold) {
        const float offset = a.norm_offset ? 1.f : 0.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[0] += values[v][e] * values[v][e];
        values[v] = V::of([&](int e) { return values[v][e] * (offset + norm_weight[v][e]); });
      }
      *reinterpret_cast<uint4*>(x + i) = reinterpret_cast<const uint4&>(values[v]);
    }
  }
  if (a.fold) {
    warp_sum(sum, 32);
    if (lane == 0) squares[warp] = sum[0];
  }
  __syncthreads();
  float rstd = 1.f;
  if (a.fold) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += squares[i];
    rstd = rsqrtf(total * (1.f / static_cast<float>(a.k)) + a.eps);
  }

  int slot = 0;
  uint32_t phase = 0;
  for (int first = begin + warp * a.step; first < end; first += kWarps * a.step) {
    float sums[2][2] = {};
    for (int p = 0; p < a.pieces; ++p) {
      const int units = min(a.piece, a.k - p * a.piece) / 8;
      const V* const w0 = reinterpret_cast<const V*>(ring + slot * slot_bytes);
      const V* const w1 = w0 + a.piece / 8;
      const V* const x0 = x + p * (a.piece / 8);
      barrier_wait(full + 8 * slot, phase);
#pragma unroll 4
      for (int u = lane; u < units; u += 32) {
        const V v = V::load(x0[u].data), first_row = V::load(w0[u].data), second_row = V::load(w1[u].data);
        float wide[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) wide[e] = v[e];
        dot(sums[0], first_row, wide);
        dot(sums[1], second_row, wide);
      }
      __syncwarp();  // all have read it
      request(slot);
      if (++slot == kSlotsPerWarp) slot = 0, phase ^= 1;
    }
    float both[2] = {sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]};
    warp_sum(both, 32);
    const float mine = (lane % 2 ? both[1] : both[0]) * rstd;  // lane 0 goes on with the first row, lane 1 the second
    T* const y = static_cast<T*>(a.y);
    if (a.swiglu) {
      if (lane == 0) y[first] = from_float<T>(swiglu<T>(mine, both[1] * rstd));
    } else if (lane < 2 && first + lane < end) {
      const int column = first + lane;
      const float bias = a.bias ? to_float(static_cast<const T*>(a.bias)[column]) : 0.f;
      T result = from_float<T>(mine + bias);
      if (a.add) result = from_float<T>(to_float(y[column]) + to_float(result));
      y[column] = result;
    }
  }
#endif
}

}  // namespace

cudaError_t gemv(const LinearParams& p, Dtype dtype, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const bool swiglu = p.epilogue == LinearEpilogue::kSwiglu;
  const int k = static_cast<int>(p.k), ring = kSharedBytes - kHeaderBytes - (2 * k + 127) / 128 * 128;
  const int most = ring / kSlots / 4 / 64 * 64;  // elements of a piece
  const int pieces = (k + most - 1) / most, piece = ((k + pieces - 1) / pieces + 63) / 64 * 64;
  const int out = static_cast<int>(swiglu ? p.n / 2 : p.n), blocks = std::min(device.sm_count, out);
  const Arguments arguments{p.x,
                            p.norm_weight,
                            p.weight,
                            p.bias,
                            p.residual ? p.residual : p.y,
                            p.residual != nullptr,
                            swiglu,
                            p.normalize,
                            p.norm.weight_offset != 0,
                            p.settled,
                            k,
                            piece,
                            pieces,
                            out / blocks,
                            out % blocks,
                            swiglu ? 1 : 2,
                            swiglu ? out : 1,
                            p.weight_stride * 2,
                            static_cast<float>(p.norm.eps)};
  const size_t shared = kHeaderBytes + (2 * k + 127) / 128 * 128 + static_cast<size_t>(kSlots) * 4 * piece;
  const LaunchShape shape{blocks, dim3(kThreads), shared};
  return launch(dtype == Dtype::kFloat16 ? gemv_kernel<__half> : gemv_kernel<__nv_bfloat16>, shape, stream, arguments);
}

}  // namespace llmk::kernels
