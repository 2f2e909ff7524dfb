// How the weights of decode_step get into shared memory: a ring of pieces of rows, which goes round through all
// linears.
#pragma once
#include <cstdint>

#include "device/tma.cuh"
#include "plan.h"

namespace llmk::kernels {

struct StepArguments {
  DecodeStepParams p;
  StepPlan plan;
};

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
// the same time, the memory is slower. Columns come in pairs.
struct Share {
  int begin, columns, rows;

  __device__ explicit Share(const StepLinear& l) {
    const unsigned pairs = static_cast<unsigned>(l.out + 1) / 2;
    begin = static_cast<int>(pairs * blockIdx.x / gridDim.x) * 2;
    columns = max(min(static_cast<int>(pairs * (blockIdx.x + 1) / gridDim.x) * 2, l.out) - begin, 0);
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
__device__ void copy(const StepArguments& a, const Ring& ring, int index) {
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
      // The first pieces of a linear are under way while the blocks exchange vectors, which must not wait behind them.
      for (const int most = item < kStepSlots ? kStepAheadEarly : kStepAhead; under_way >= most; --under_way) {
        barrier_wait(ring.full + 8 * arrived.slot, arrived.phase);
        arrived.advance(kStepCopyWarps);
      }
      ++under_way;
      barrier_wait(ring.empty + 8 * cursor.slot, cursor.phase ^ 1);  // a slot that was never used passes for empty
      barrier_arrive_expecting(full, bytes);
      bulk_load(ring.slots + cursor.slot * a.plan.slot_bytes, from, bytes, full, kEvictFirst);
      for (piece += kStepCopyWarps; piece >= l.pieces; piece -= l.pieces) ++row;
    }
    item -= items;
  }
}

#endif

}  // namespace llmk::kernels
