// Linear for up to 16 tokens without TMA: compute capability 8.0, and GPUs whose blocks have only 99 KB of shared
// memory. The formulas, roundings, fold of the norm and epilogue are those of linear.cu.
//
//   block     an output tile of up to 48 rows of W for all tokens, then the next: tiles blockIdx.x, + gridDim.x, ...
//   warps     split K: warp w takes k tiles w, w + 4, ... of each output tile, all of its rows
//   ring      of each warp, filled by cp.async. A warp is its own producer and consumer, so it waits for no other one;
//             its copies go on through the output tiles, so that they are under way during an epilogue
//   stage     `chunks` chunks of 64 columns of K; a chunk has the rows of W, then those of x, then the norm's weight,
//             each of 128 bytes, swizzled as in main_loop_mma.cuh
//
// What it waits for are copies: what is under way counts more than how many warps there are. One H200, 3584 x 18944, in
// us, where cuBLAS takes 37 and 38:
//
//   design                                                          | 1 token | 16 tokens
//   ----------------------------------------------------------------|---------|----------
//   a warp for each K group, three stages under way                 | 53      | 60
//   the same with more instructions for each row that is copied     | 60      | 68
//   two warps for each K group and its ring, two stages under way   | 58      | 74
//
// Behind it in_step works as in linear.cu, where the GPU has programmatic dependent launch: from 9.0 on.
#pragma once
#include "epilogue.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "main_loop_mma.cuh"

namespace llmk::kernels::few_tokens {

struct Sm80Operands {
  const void *weight, *x;
  int64_t weight_row_bytes, x_row_bytes;
};

// The copies of a warp: an output tile, and a k tile in it.
struct Sm80Position {
  int tile, k_tile;

  __device__ bool exists(const LinearPlan& plan) const { return tile < plan.output_tiles && k_tile < plan.k_tiles; }
  __device__ void advance(const LinearPlan& plan, int warp) {
    k_tile += kLinearSm80Warps;
    if (k_tile >= plan.k_tiles) k_tile = warp, tile += static_cast<int>(gridDim.x);
  }
};

// The ring of a warp.
class Sm80Ring {
 public:
  __device__ Sm80Ring(const Arguments& a, const Sm80Operands& operands, uint32_t ring)
      : a_(a),
        operands_(operands),
        ring_(ring),
        lane_row_(threadIdx.x % 32 / 8),
        vector_(threadIdx.x % 8),
        rows_(a.plan.boxes * a.plan.box_rows),
        chunk_bytes_(a.plan.stage_bytes / a.plan.chunks),
        policy_(l2_policy(false)) {}

  __device__ uint32_t stage(int index) const { return ring_ + index * a_.plan.stage_bytes; }
  __device__ int chunk_bytes() const { return chunk_bytes_; }
  __device__ int x_offset() const { return rows_ * 128; }
  __device__ int norm_weight_offset() const { return (rows_ + a_.m) * 128; }

  // Zeros beyond the weight, and beyond K.
  __device__ void copy_weight(int index, const Sm80Position& at) const {
    const LinearPlan& plan = a_.plan;
    const int64_t first = static_cast<int64_t>(at.tile) * plan.tile_rows, row_bytes = operands_.weight_row_bytes;
    const int rows = static_cast<int>(min(int64_t{plan.box_rows}, a_.out - first));
    for_each_chunk(index, at, [&](uint32_t chunk, int64_t column, int bytes) {
      const char* from = static_cast<const char*>(operands_.weight) + first * row_bytes + column * kHalfBytes;
      for (int box = 0; box < plan.boxes; ++box) {
        copy_rows(chunk + box * plan.box_rows * 128, from, row_bytes, plan.box_rows, rows, bytes);
        from += a_.box_step * row_bytes;
      }
    });
  }
  // And the norm's weight.
  __device__ void copy_x(int index, const Sm80Position& at) const {
    for_each_chunk(index, at, [&](uint32_t chunk, int64_t column, int bytes) {
      copy_rows(chunk + x_offset(), static_cast<const char*>(operands_.x) + column * kHalfBytes, operands_.x_row_bytes,
                a_.m, a_.m, bytes);
      if (a_.fold_norm && lane_row_ == 0) {
        const char* const from = static_cast<const char*>(a_.norm_weight) + column * kHalfBytes;
        copy(chunk + norm_weight_offset() + vector_ * 16, bytes > 0 ? from : operands_.weight, bytes);
      }
    });
  }

 private:
  template <typename Body>
  __device__ void for_each_chunk(int index, const Sm80Position& at, const Body& body) const {
    uint32_t chunk = stage(index);
    int column = at.k_tile * a_.plan.chunks * kLinearChunk + vector_ * 8;
    for (int c = 0; c < a_.plan.chunks; ++c, chunk += chunk_bytes_, column += kLinearChunk)
      body(chunk, column, column < a_.k ? 16 : 0);
  }
  // This lane's vectors of `rows` rows, of which `existing` are in memory, four rows at a time. A warp has its
  // scheduler to itself, so each instruction here counts. Four rows further the swizzle differs in one bit.
  __device__ void copy_rows(uint32_t to, const char* from, int64_t row_bytes, int rows, int existing, int bytes) const {
    uint32_t at = swizzled(to + lane_row_ * 128, vector_);
    from += lane_row_ * row_bytes;
    const int64_t step = 4 * row_bytes;
#pragma unroll 4
    for (int r = lane_row_; r < rows; r += 4, at = (at + 512) ^ 64, from += step) {
      const bool exists = r < existing && bytes > 0;
      copy(at, exists ? from : operands_.weight, exists ? bytes : 0);
    }
  }
  __device__ void copy(uint32_t to, const void* from, int bytes) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
                 "l"(policy_)
                 : "memory");
  }

  const Arguments& a_;
  const Sm80Operands& operands_;
  uint32_t ring_;
  int lane_row_, vector_;  // of a copy of four rows
  int rows_, chunk_bytes_;
  uint64_t policy_;
};

// One output tile of a warp. `stage` and `next`: of the ring; kTiles: plan.mma_tiles.
template <typename T, int kTokenTiles, int kTiles>
__device__ void multiply_sm80(const Arguments& a, const Layout& layout, const Sm80Ring& ring, int& stage,
                              Sm80Position& next, unsigned char* shared) {
  const LinearPlan& plan = a.plan;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, w_vector = lane / 16, x_vector = lane / 8;
  const auto owns_squares = [](int) { return true; };
  using Two = typename Pair<T>::type;
  const Two factor = Pair<T>::from_floats(1.f / norm_weight_scale<T>(layout), 1.f / norm_weight_scale<T>(layout));
  Products<T, kTokenTiles, kTiles> products;
  products.clear();
  int offset[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int box = i >= plan.mma_tiles_per_box;
    offset[i] = (box * plan.box_rows + (i - box * plan.mma_tiles_per_box) * 16 + lane % 16) * 128;
  }
#pragma unroll 1
  for (int k_tile = warp; k_tile < plan.k_tiles; k_tile += kLinearSm80Warps) {
    cp_async_wait<kLinearSm80Stages - 1>();
    __syncwarp();
    uint32_t chunk = ring.stage(stage);
#pragma unroll 1
    for (int c = 0; c < plan.chunks; ++c, chunk += ring.chunk_bytes()) {
      const uint32_t x_lane = swizzled(chunk + ring.x_offset() + lane % 8 * 128, x_vector);
      const uint32_t norm_weight = chunk + ring.norm_weight_offset() + x_vector * 16;
      products.add_chunk([&](int i, int flip) { return swizzled(chunk + offset[i], w_vector) ^ flip; }, x_lane,
                         a.fold_norm, a.norm_offset,
                         [&](uint32_t(&scales)[4], int flip) {
                           load_matrices(scales, norm_weight + flip);
                           if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
                             for (uint32_t& scale : scales) {
                               const Two scaled = __hmul2(reinterpret_cast<const Two&>(scale), factor);
                               scale = reinterpret_cast<const uint32_t&>(scaled);
                             }
                           }
                         },
                         owns_squares);
    }
    __syncwarp();
    if (next.exists(plan)) ring.copy_weight(stage, next), ring.copy_x(stage, next);
    cp_async_commit();  // also when empty, so that cp_async_wait() counts stages
    next.advance(plan, warp);
    if (++stage == kLinearSm80Stages) stage = 0;
  }
  __syncthreads();  // the previous tile's partial sums have been read
  products.store(a, layout, warp, 0, shared, owns_squares);
}

template <typename T, int kTokenTiles>
__global__ void __launch_bounds__(32 * kLinearSm80Warps, 2)
    linear_sm80_kernel(const __grid_constant__ Sm80Operands operands, const __grid_constant__ Arguments a) {
  constexpr int kThreads = 32 * kLinearSm80Warps;
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPlan& plan = a.plan;
  const Layout layout(shared_address(shared), plan);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(shared + (layout.norm_weight_max - layout.full)) = 0;
  __syncthreads();
  pdl_launch_dependents();
  const Sm80Ring ring(a, operands, layout.ring + warp * kLinearSm80Stages * plan.stage_bytes);
  const Sm80Position first{static_cast<int>(blockIdx.x), warp};
  if (!a.prefetch_weights) pdl_wait();
  Sm80Position next = first;
  for (int s = 0; s < kLinearSm80Stages; ++s, next.advance(plan, warp)) {
    if (next.exists(plan)) ring.copy_weight(s, next);
  }
  if (a.fold_norm) find_norm_weight_max<T, kThreads>(a.norm_weight, a.k, layout, shared);
  pdl_wait();
  next = first;
  for (int s = 0; s < kLinearSm80Stages; ++s, next.advance(plan, warp)) {
    if (next.exists(plan)) ring.copy_x(s, next);
    cp_async_commit();
  }
  int stage = 0;
#pragma unroll 1
  for (int tile = first.tile; tile < plan.output_tiles; tile += static_cast<int>(gridDim.x)) {
    const auto multiply = [&](auto tiles) {
      multiply_sm80<T, kTokenTiles, decltype(tiles)::value>(a, layout, ring, stage, next, shared);
    };
    switch (plan.mma_tiles) {
      case 1: multiply(std::integral_constant<int, 1>()); break;
      case 2: multiply(std::integral_constant<int, 2>()); break;
      case 3: multiply(std::integral_constant<int, 3>()); break;
      default: multiply(std::integral_constant<int, 4>()); break;
    }
    __syncthreads();
    const int64_t column = static_cast<int64_t>(tile) * plan.tile_rows;
    if (a.vector) {
      epilogue<T, 4, kThreads, false>(a, layout, column, tile, 0);
    } else {
      epilogue<T, 1, kThreads, false>(a, layout, column, tile, 0);
    }
  }
}

inline cudaError_t launch_sm80(const Arguments& arguments, const Sm80Operands& operands, int blocks, Dtype dtype,
                               cudaStream_t stream) {
  const LaunchShape shape{blocks, dim3(32 * kLinearSm80Warps), arguments.plan.shared_bytes};
  return dispatch_int<1, 2>(linear_token_tiles(arguments.m), [&](auto tiles) {
    constexpr int kTokenTiles = decltype(tiles)::value;
    return dtype == Dtype::kFloat16
               ? launch(linear_sm80_kernel<__half, kTokenTiles>, shape, stream, operands, arguments)
               : launch(linear_sm80_kernel<__nv_bfloat16, kTokenTiles>, shape, stream, operands, arguments);
  });
}

}  // namespace llmk::kernels::few_tokens
