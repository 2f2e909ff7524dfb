// A linear of decode_step for the block: its input into shared memory, then the products with the block's rows.
#pragma once
#include <cuda_bf16.h>

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "dot.cuh"
#include "exchange.cuh"
#include "ring.cuh"

namespace llmk::kernels {

#if __CUDA_ARCH__ >= 900

using T = __nv_bfloat16;
using V = Vec<T, 8>;
constexpr int kThreads = 32 * kStepWarps;

// Brings x to shared memory, as soon as it is there, multiplied by the norm's weight if there is one. Returns what the
// sums are to be multiplied by: 1 / rms(x), or 1. All threads that compute.
template <typename Source>
__device__ float stage(const DecodeStepParams& p, const Source& source, const void* norm_weight, int k, uint4* x,
                       float* squares) {
  constexpr int kHeld = Source::kHeld;
  const int count = k / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float offset = static_cast<float>(p.norm_options.weight_offset);
  float sum[1] = {0.f};
  // While there is nothing to take, a few lanes look at a few places: the weights need the way.
  if (warp == 0 && lane < 8) {
    const int i = count * lane / 8;
    source.take(8 * i, source.look(8 * i));
  }
  named_barrier(1, kThreads);
#pragma unroll 1
  for (int first = 0; first < count; first += kHeld * kThreads) {
    typename Source::Found found[kHeld];
    uint4 weights[kHeld];  // raw: vectors of 16-bit elements would take twice the registers
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int i = first + v * kThreads + threadIdx.x;
      if (i >= count) continue;
      if (norm_weight) weights[v] = __ldcg(static_cast<const uint4*>(norm_weight) + i);
      found[v] = source.look(8 * i);
    }
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int i = first + v * kThreads + threadIdx.x;
      if (i >= count) continue;
      uint4 raw = source.take(8 * i, found[v]);
      if (norm_weight) {
        const V value = reinterpret_cast<const V&>(raw), weight = reinterpret_cast<const V&>(weights[v]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[0] += value[e] * value[e];
        const V product = V::of([&](int e) { return value[e] * (offset + weight[e]); });
        raw = reinterpret_cast<const uint4&>(product);
      }
      x[i] = raw;
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

// The products of x with this block's rows of W. finish(column) is called for every pair of columns, of which the
// second may be beyond the last; it loads what it needs and returns a function of sum(0) and sum(1), or with SwiGLU of
// sum(0) and sum(2) of the gate, sum(1) and sum(3) of the up projection.
template <typename Finish>
__device__ void multiply(const StepArguments& a, int linear, const uint4* x, unsigned char* shared, const Ring& ring,
                         Cursor& cursor, const Finish& finish) {
  const StepLinear& l = a.plan.linear[kind_of(a.p, linear)];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* const sums = reinterpret_cast<float*>(shared + kStepHeaderBytes + 2 * l.k);
  const Share share(l);
  const int pairs = (share.columns + 1) / 2;
  // Before anything else, so that it is there in time; threads that have no pair load that of another.
  const auto end_of_first =
      finish(max(min(share.begin + 2 * min(static_cast<int>(threadIdx.x), pairs - 1), l.out - 1), 0) / 2 * 2);
  // The cursor stands at the first piece of the linear, which is the first warp's.
  const int items = share.rows * l.pieces;
  Cursor mine = cursor;
  mine.advance(warp);
  cursor.advance(items % kStepSlots);
  if (items / kStepSlots % 2) cursor.phase ^= 1;
  int piece = warp % l.pieces;
  for (int item = warp; item < items; item += kStepWarps, mine.advance(kStepWarps)) {
    const int vectors = min(l.piece, l.k - piece * l.piece) / 8;
    const uint4* const row =
        reinterpret_cast<const uint4*>(shared + (ring.slots - shared_address(shared)) + mine.slot * a.plan.slot_bytes);
    RowDot<T> dot;
    barrier_wait(ring.full + 8 * mine.slot, mine.phase);
    dot.add(row, x + piece * (l.piece / 8), vectors);
    __syncwarp();  // all have read it
    if (lane == 0) barrier_arrive(ring.empty + 8 * mine.slot);
    const float sum = dot.sum();
    if (lane == 0) sums[item] = sum;
    piece = (piece + kStepWarps) % l.pieces;
  }
  named_barrier(1, kThreads);
  const auto row_sum = [&](int row) {
    float sum = 0.f;
    for (int i = 0; i < l.pieces; ++i) sum += sums[row * l.pieces + i];
    return sum;
  };
  const int per_column = l.swiglu ? 2 : 1;
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs; i += kThreads) {
    const auto sum = [&](int row) { return row_sum(min(2 * per_column * i + row, share.rows - 1)); };
    if (i < kThreads) {
      end_of_first(sum);
    } else {
      finish(share.begin + 2 * i)(sum);
    }
  }
  named_barrier(1, kThreads);  // the sums, and x, have been read
}

#endif

}  // namespace llmk::kernels
