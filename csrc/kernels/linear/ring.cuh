// What the blocks of a linear for few tokens have in common: the ring in shared memory, the thread that fills it, and
// which part of it is whose.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "device/divide.cuh"
#include "device/tma.cuh"
#include "plan.h"

namespace llmk::kernels::few_tokens {

// What the kernel needs beside the tensor maps.
struct Arguments {
  const void *x, *norm_weight, *bias;
  void* y;
  bool add, swiglu, vector;  // vector: y and bias are moved 4 elements at a time
  int m, k;
  int64_t out;                  // columns of y
  int box_step;                 // rows of W from box to box
  int column_step, depth_step;  // of a chunk, in the tensor maps
  int64_t y_stride;
  bool fold;         // multiply x by the norm's weight, and sum up its squares
  bool norm_offset;  // add 1 to the norm's weight
  bool settled;      // the weights do not depend on the kernel before this one
  float eps;
  const void* next_norm_weight;  // null, or of the norm that follows the residual
  float next_offset;
  void* scaled;
  float* squares;
  int parts;  // of the squares of x, which is multiplied by the norm's weight already
  LinearPlan plan;
};

#if __CUDA_ARCH__ >= 900

// Named barriers: of the warps that compute; of those and the one that brings them 1 / rms.
constexpr int kConsumers = 1, kRstd = 2;

// Where things are in shared memory.
struct Layout {
  uint32_t full, empty, drained, squares, largest, ring, norm_weight, partials;

  __device__ Layout(uint32_t base, const LinearPlan& plan) {
    full = base;
    empty = base + 8 * plan.stages;
    drained = base + 16 * plan.stages;
    squares = base + kLinearBarrierBytes;
    largest = squares - 4;
    ring = base + kLinearHeaderBytes;
    norm_weight = ring + plan.stages * plan.stage_bytes;
    partials = plan.alias ? ring : norm_weight + plan.norm_weight_bytes;
  }
};

// The part of K that this block sums up, in stages.
struct Slice {
  int begin, end;

  __device__ Slice(const LinearPlan& plan, int rank) : begin(0), end(plan.k_stages) {
    if (plan.cluster == 1) return;
    begin = divide(plan.k_stages * rank, plan.cluster);
    end = divide(plan.k_stages * (rank + 1), plan.cluster);
  }
  __device__ int stages() const { return end - begin; }
};

// The tiles of this block: first, first + step, ...
struct Tiles {
  int first, step, end;
};

// The copying thread. It is alone and every instruction of it takes its time, so the loops only add.
__device__ inline void copy(const Arguments& a, const CUtensorMap& weight, const CUtensorMap& x, const Layout& layout,
                            const Slice& slice, const Tiles& tiles) {
  const LinearPlan& plan = a.plan;
  const int stages = slice.stages(), ahead = min(plan.stages, stages);
  const int column_step = plan.chunks * a.column_step, depth_step = plan.chunks * a.depth_step;
  const int first_column = slice.begin * column_step, first_depth = slice.begin * depth_step;
  const auto copy_weight = [&](int slot, int column, int row, int depth) {
    const uint32_t full = layout.full + 8 * slot, to = layout.ring + slot * plan.stage_bytes;
    barrier_arrive_expecting(full, plan.transfer_bytes);
    tensor_load(to, weight, column, row, depth, full, kEvictFirst);
    if (plan.boxes == 2) tensor_load(to + plan.box_bytes, weight, column, row + a.box_step, depth, full, kEvictFirst);
  };
  const auto copy_x = [&](int slot, int column, int depth) {
    const uint32_t to = layout.ring + slot * plan.stage_bytes + plan.boxes * plan.box_bytes;
    tensor_load(to, x, column, 0, depth, layout.full + 8 * slot);
  };
  // The weights of the first round of the ring need not wait for the kernel before this one if settled; x must.
  if (!a.settled) pdl_wait();
  for (int s = 0; s < ahead; ++s) {
    copy_weight(s, first_column + s * column_step, tiles.first * plan.tile_rows, first_depth + s * depth_step);
  }
  pdl_wait();
  for (int s = 0; s < ahead; ++s) copy_x(s, first_column + s * column_step, first_depth + s * depth_step);
  int slot = ahead < plan.stages ? ahead : 0, begin = ahead;
  uint32_t phase = slot == ahead;  // a slot that has not been used passes for empty
  uint32_t drained = 1;
  for (int tile = tiles.first; tile < tiles.end; tile += tiles.step, begin = 0, drained ^= 1) {
    // Partial sums in place of the ring: the tile before must be finished.
    if (plan.alias) barrier_wait(layout.drained, drained);
    int column = first_column + begin * column_step, depth = first_depth + begin * depth_step;
    for (int s = begin; s < stages; ++s, column += column_step, depth += depth_step) {
      barrier_wait(layout.empty + 8 * slot, phase);
      copy_weight(slot, column, tile * plan.tile_rows, depth);
      copy_x(slot, column, depth);
      if (++slot == plan.stages) slot = 0, phase ^= 1;
    }
  }
}

// A warp or warpgroup that computes: which part of a tile is its own, and where it stands in the ring.
struct Worker {
  int group;              // along K: it takes the stages group, group + k_workers, ...
  int first_tile, tiles;  // of rows
  int row_worker;
  int slot;
  uint32_t phase = 0;
  int stage;  // counted from the first tile on

  __device__ Worker(const LinearPlan& plan, int index) {
    row_worker = divide(index, plan.k_workers);
    group = slot = stage = index - row_worker * plan.k_workers;
    first_tile = divide(plan.row_tiles * row_worker, plan.row_workers);
    tiles = divide(plan.row_tiles * (row_worker + 1), plan.row_workers) - first_tile;
  }

  // One lane of each warp says that it has read the stage.
  __device__ void release(const LinearPlan& plan, const Layout& layout) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(layout.empty + 8 * slot);
    stage += plan.k_workers;
    slot += plan.k_workers;
    if (slot >= plan.stages) {
      slot -= plan.stages;
      phase ^= 1;
    }
  }
};

#endif

}  // namespace llmk::kernels::few_tokens
