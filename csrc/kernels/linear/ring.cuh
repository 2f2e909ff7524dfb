// The shared-memory ring of the linear for few tokens: its stages and barriers, the producer that fills it, and the
// state of a consumer that drains it.
//
//        W in device memory       x in the L2 cache
//                   \                 /
//                 TMA copies, issued by one producer thread:
//                 wait for empty[s], announce the bytes to full[s], copy
//                           |
//                           v
//          +---------+---------+---------+-- --+-----------+     stage: `chunks` chunks of 64 columns of K,
//          | stage 0 | stage 1 | stage 2 | ... | stage S-1 |     for the rows of W in the tile (1 or 2 boxes)
//          +---------+---------+---------+-- --+-----------+     and for all tokens of x
//                           |
//                           v
//                 consumers (warps with mma.sync, warpgroups with wgmma):
//                 wait for full[s], multiply, arrive at empty[s]
//
//   k tile i lies in stage i % S. It belongs to K group i % k_consumers, whose row_consumers divide its rows of W:
//
//                     K group 0        K group 1         (k_consumers = 2, row_consumers = 3)
//     rows  0.. 47    consumer 0       consumer 1
//     rows 48.. 95    consumer 2       consumer 3
//     rows 96..143    consumer 4       consumer 5
//
//   barrier        arrivals                                completes when                     who waits
//   full[s]        1 (producer) and transfer_bytes         the copies of a k tile are there   consumers of the K group
//   empty[s]       each warp of the stage's consumers      they have read the stage           producer
//   epilogue_done  each consumer warp                      the partial sums have been read    producer, sums_alias_ring
//
// S is a multiple of k_consumers, so a stage always belongs to the same K group. A consumer that met other groups'
// phases could wait for one that has not begun, and would not be stopped.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "device/divide.cuh"
#include "device/tma.cuh"
#include "params/glu.h"
#include "plan.h"

namespace llmk::kernels::few_tokens {

// What the kernel needs beside the tensor maps.
struct Arguments {
  const void *x, *norm_weight, *bias;
  void* y;                         // or the residual
  bool add_residual, glu, vector;  // vector: y and bias are moved 4 elements at a time
  Activation activation;           // with glu
  float alpha;                     // of what is added to the residual
  int m, k;
  int64_t out;                  // columns of y
  int box_step;                 // rows of W from box to box
  int column_step, depth_step;  // of a chunk, in the tensor maps
  int64_t y_stride;
  bool fold_norm;         // multiply x by the norm's weight, and sum up its squares
  bool norm_offset;       // add 1 to the norm's weight
  bool prefetch_weights;  // the weights do not depend on the kernel before this one
  float eps;
  const void* next_norm_weight;  // of the norm that follows the residual add, or null
  float next_offset;
  void* scaled;          // the new residual times that weight,
  float* next_squares;   // and its squares, for the next linear
  const float* squares;  // of the linear before
  int parts;  // partial sums of squares per token of an x that is already multiplied by the norm's weight; or 0
  LinearPlan plan;
};

// Named barriers: all consumers; the consumers and the warp that loads 1 / rms.
constexpr int kConsumersBarrier = 1, kRstdBarrier = 2;

// Addresses in shared memory.
struct Layout {
  uint32_t full, empty, epilogue_done, squares, norm_weight_max, ring, norm_weight, partials;

  __device__ Layout(uint32_t base, const LinearPlan& plan) {
    full = base;
    empty = base + 8 * plan.stages;
    epilogue_done = base + 16 * plan.stages;
    squares = base + kLinearBarrierBytes;
    norm_weight_max = squares - 4;
    ring = base + kLinearHeaderBytes;
    norm_weight = ring + plan.stages * plan.stage_bytes;
    partials = plan.sums_alias_ring ? ring : norm_weight + plan.norm_weight_bytes;
  }
};

#if __CUDA_ARCH__ >= 900

// The k tiles that this block sums up: split-K over the blocks of the cluster.
struct KRange {
  int begin, end;

  __device__ KRange(const LinearPlan& plan, int rank) : begin(0), end(plan.k_tiles) {
    if (plan.cluster == 1) return;
    begin = divide(plan.k_tiles * rank, plan.cluster);
    end = divide(plan.k_tiles * (rank + 1), plan.cluster);
  }
  __device__ int k_tiles() const { return end - begin; }
};

// Static tile scheduler: this block's output tiles are first, first + step, ...
struct TileScheduler {
  int first, step, end;
};

// The producer. Its one thread issues every copy alone, so the loops are kept to additions.
__device__ inline void produce(const Arguments& a, const CUtensorMap& weight, const CUtensorMap& x,
                               const Layout& layout, const KRange& k_range, const TileScheduler& scheduler) {
  const LinearPlan& plan = a.plan;
  const int k_tiles = k_range.k_tiles(), prologue_stages = min(plan.stages, k_tiles);
  const int column_step = plan.chunks * a.column_step, depth_step = plan.chunks * a.depth_step;
  const int first_column = k_range.begin * column_step, first_depth = k_range.begin * depth_step;
  const auto copy_weight = [&](int stage, int column, int row, int depth) {
    const uint32_t full = layout.full + 8 * stage, to = layout.ring + stage * plan.stage_bytes;
    barrier_arrive_expecting(full, plan.transfer_bytes);
    tensor_load(to, weight, column, row, depth, full, kEvictFirst);
    if (plan.boxes == 2) tensor_load(to + plan.box_bytes, weight, column, row + a.box_step, depth, full, kEvictFirst);
  };
  const auto copy_x = [&](int stage, int column, int depth) {
    const uint32_t to = layout.ring + stage * plan.stage_bytes + plan.boxes * plan.box_bytes;
    tensor_load(to, x, column, 0, depth, layout.full + 8 * stage);
  };
  // Prologue: fill the ring once. With prefetch_weights, W is requested before the previous kernel has ended; x never.
  if (!a.prefetch_weights) pdl_wait();
  for (int s = 0; s < prologue_stages; ++s) {
    copy_weight(s, first_column + s * column_step, scheduler.first * plan.tile_rows, first_depth + s * depth_step);
  }
  pdl_wait();
  for (int s = 0; s < prologue_stages; ++s) copy_x(s, first_column + s * column_step, first_depth + s * depth_step);
  // Main loop.
  int stage = prologue_stages < plan.stages ? prologue_stages : 0, begin = prologue_stages;
  uint32_t phase = stage == prologue_stages;  // waiting for the parity before the first phase passes: unused is empty
  uint32_t epilogue_done = 1;
  for (int tile = scheduler.first; tile < scheduler.end; tile += scheduler.step, begin = 0, epilogue_done ^= 1) {
    // The partial sums of the previous tile lie in the ring: its epilogue must have read them.
    if (plan.sums_alias_ring) barrier_wait(layout.epilogue_done, epilogue_done);
    int column = first_column + begin * column_step, depth = first_depth + begin * depth_step;
    for (int k_tile = begin; k_tile < k_tiles; ++k_tile, column += column_step, depth += depth_step) {
      barrier_wait(layout.empty + 8 * stage, phase);
      copy_weight(stage, column, tile * plan.tile_rows, depth);
      copy_x(stage, column, depth);
      if (++stage == plan.stages) stage = 0, phase ^= 1;
    }
  }
}

// A warp (mma.sync) or warpgroup (wgmma) that multiplies: its part of a tile, and its position in the ring.
struct Consumer {
  int k_group;                    // takes the k tiles k_group, k_group + k_consumers, ...
  int first_mma_tile, mma_tiles;  // its rows of the weight
  int row_consumer;
  int stage;
  uint32_t phase = 0;
  int k_tile;  // counted from the block's first output tile on

  __device__ Consumer(const LinearPlan& plan, int index) {
    row_consumer = divide(index, plan.k_consumers);
    k_group = stage = k_tile = index - row_consumer * plan.k_consumers;
    first_mma_tile = divide(plan.mma_tiles * row_consumer, plan.row_consumers);
    mma_tiles = divide(plan.mma_tiles * (row_consumer + 1), plan.row_consumers) - first_mma_tile;
  }

  // Frees the stage, one arrival per warp, and advances to the next one.
  __device__ void release(const LinearPlan& plan, const Layout& layout) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(layout.empty + 8 * stage);
    k_tile += plan.k_consumers;
    stage += plan.k_consumers;
    if (stage >= plan.stages) {
      stage -= plan.stages;
      phase ^= 1;
    }
  }
};

#endif

}  // namespace llmk::kernels::few_tokens
