// Linear for up to 16 tokens without TMA: compute capability 8.0, and GPUs whose blocks have only 99 KB of shared
// memory. The formulas, roundings, fold of the norm and epilogue are those of linear.cu.
//
//   block     an output tile of up to 48 rows of W for all tokens, then the next: tiles blockIdx.x, + gridDim.x, ...
//   pairs     of warps split K: pair p takes k tiles p, p + 4, ... of each output tile; each of its warps has one half
//             of the MMA tiles
//   ring      of each pair, filled by cp.async. A pair is its own producer and consumer, so it waits for no other one.
//             Its copies go on through the output tiles, so that they are under way during an epilogue
//   stage     `chunks` chunks of 64 columns of K; a chunk has the rows of W, then those of x, then the norm's weight,
//             each of 128 bytes, swizzled as in main_loop_mma.cuh
//
// What these warps wait for is their own instructions, not memory. One H200, 3584 x 18944, one token: with one warp for
// each K group, and so one for each scheduler of an SM, 60 us; with fewer instructions for a copied row 53 us; cuBLAS
// takes 37.
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

// The copies of a pair: an output tile, and a k tile in it.
struct Sm80Position {
  int tile, k_tile;

  __device__ bool exists(const LinearPlan& plan) const { return tile < plan.output_tiles && k_tile < plan.k_tiles; }
  __device__ void advance(const LinearPlan& plan, int pair) {
    k_tile += kLinearSm80Pairs;
    if (k_tile >= plan.k_tiles) k_tile = pair, tile += static_cast<int>(gridDim.x);
  }
};

// The ring of a pair. Each of its 64 threads copies the vectors of every eighth row.
class Sm80Ring {
 public:
  __device__ Sm80Ring(const Arguments& a, const Sm80Operands& operands, uint32_t ring)
      : a_(a),
        operands_(operands),
        ring_(ring),
        row_(threadIdx.x % 64 / 8),
        vector_(threadIdx.x % 8),
        rows_(a.plan.boxes * a.plan.box_rows),
        chunk_bytes_(a.plan.stage_bytes / a.plan.chunks),
        policy_(l2_policy(false)) {}

  __device__ uint32_t stage(int index) const { return ring_ + index * a_.plan.stage_bytes; }
  __device__ int chunk_bytes() const { return chunk_bytes_; }
  __device__ int x_offset() const { return rows_ * 128; }
  __device__ int norm_weight_offset() const { return (rows_ + a_.m) * 128; }

  // Zeros beyond K. Rows beyond the weight are left as they are: nobody uses their sums.
  __device__ void copy_weight(int index, const Sm80Position& at) const {
    const LinearPlan& plan = a_.plan;
    const int64_t first = static_cast<int64_t>(at.tile) * plan.tile_rows, row_bytes = operands_.weight_row_bytes;
    const int rows = static_cast<int>(min(int64_t{plan.box_rows}, a_.out - first));
    for_each_chunk(index, at, [&](uint32_t chunk, int64_t column, bool inside) {
      const char* from = static_cast<const char*>(operands_.weight) + first * row_bytes + column * kHalfBytes;
      for (int box = 0; box < plan.boxes; ++box, from += a_.box_step * row_bytes)
        copy_rows(chunk + box * plan.box_rows * 128, from, row_bytes, rows, inside);
    });
  }
  // And the norm's weight.
  __device__ void copy_x(int index, const Sm80Position& at) const {
    for_each_chunk(index, at, [&](uint32_t chunk, int64_t column, bool inside) {
      copy_rows(chunk + x_offset(), static_cast<const char*>(operands_.x) + column * kHalfBytes, operands_.x_row_bytes,
                a_.m, inside);
      if (a_.fold_norm && row_ == 0) {
        const char* const from = static_cast<const char*>(a_.norm_weight) + column * kHalfBytes;
        copy(chunk + norm_weight_offset() + vector_ * 16, inside ? from : operands_.weight, inside ? 16 : 0);
      }
    });
  }

 private:
  template <typename Body>
  __device__ void for_each_chunk(int index, const Sm80Position& at, const Body& body) const {
    uint32_t chunk = stage(index);
    int column = at.k_tile * a_.plan.chunks * kLinearChunk + vector_ * 8;
    for (int c = 0; c < a_.plan.chunks; ++c, chunk += chunk_bytes_, column += kLinearChunk)
      body(chunk, column, column < a_.k);
  }
  // Eight rows further the swizzle is the same.
  __device__ void copy_rows(uint32_t to, const char* from, int64_t row_bytes, int rows, bool inside) const {
    uint32_t at = swizzled(to + row_ * 128, vector_);
    const int bytes = inside ? 16 : 0;
    const int64_t step = inside ? 8 * row_bytes : 0;
    from = inside ? from + row_ * row_bytes : static_cast<const char*>(operands_.weight);
    for (int r = row_; r < rows; r += 8, at += 1024, from += step) copy(at, from, bytes);
  }
  __device__ void copy(uint32_t to, const void* from, int bytes) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
                 "l"(policy_)
                 : "memory");
  }

  const Arguments& a_;
  const Sm80Operands& operands_;
  uint32_t ring_;
  int row_, vector_;  // of this thread's first copy
  int rows_, chunk_bytes_;
  uint64_t policy_;
};

// One output tile of a warp: kTiles of its MMA tiles from `first` on, or none where the other warp of the pair has the
// only one. `stage`: of the ring; `next`: what the pair copies next.
template <typename T, int kTokenTiles, int kTiles>
__device__ void multiply_sm80(const Arguments& a, const Layout& layout, const Sm80Ring& ring, int first, int& stage,
                              Sm80Position& next, unsigned char* shared) {
  const LinearPlan& plan = a.plan;
  const int lane = threadIdx.x % 32, pair = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
  const int w_vector = lane / 16, x_vector = lane / 8;
  const bool multiplies = first < plan.mma_tiles;
  const auto owns_squares = [&](int n) { return (plan.mma_tiles > 1 ? n : 0) == half; };
  using Two = typename Pair<T>::type;
  const Two factor = Pair<T>::from_floats(1.f / norm_weight_scale<T>(layout), 1.f / norm_weight_scale<T>(layout));
  Products<T, kTokenTiles, kTiles> products;
  products.clear();
  int offset[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int tile = first + i, box = tile >= plan.mma_tiles_per_box;
    offset[i] = (box * plan.box_rows + (tile - box * plan.mma_tiles_per_box) * 16 + lane % 16) * 128;
  }
#pragma unroll 1
  for (int k_tile = pair; k_tile < plan.k_tiles; k_tile += kLinearSm80Pairs) {
    cp_async_wait<kLinearSm80Stages - 2>();
    named_barrier(1 + pair, 64);  // the stage is there, and the one before has been read
    const int before = stage == 0 ? kLinearSm80Stages - 1 : stage - 1;
    if (next.exists(plan)) ring.copy_weight(before, next), ring.copy_x(before, next);
    cp_async_commit();  // also when empty, so that cp_async_wait() counts stages
    next.advance(plan, pair);
    uint32_t chunk = ring.stage(stage);
#pragma unroll 1
    for (int c = 0; c < (multiplies ? plan.chunks : 0); ++c, chunk += ring.chunk_bytes()) {
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
    if (++stage == kLinearSm80Stages) stage = 0;
  }
  __syncthreads();  // the previous tile's partial sums have been read
  if (multiplies) products.store(a, layout, pair, first, shared, owns_squares);
}

template <typename T, int kTokenTiles>
__global__ void __launch_bounds__(kLinearSm80Threads, 2)
    linear_sm80_kernel(const __grid_constant__ Sm80Operands operands, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPlan& plan = a.plan;
  const Layout layout(shared_address(shared), plan);
  const int pair = threadIdx.x / 64;
  if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(shared + (layout.norm_weight_max - layout.full)) = 0;
  __syncthreads();
  pdl_launch_dependents();
  const Sm80Ring ring(a, operands, layout.ring + pair * kLinearSm80Stages * plan.stage_bytes);
  const Sm80Position begin{static_cast<int>(blockIdx.x), pair};
  if (!a.prefetch_weights) pdl_wait();
  Sm80Position next = begin;
  for (int s = 0; s < kLinearSm80Stages - 1; ++s, next.advance(plan, pair)) {
    if (next.exists(plan)) ring.copy_weight(s, next);
  }
  if (a.fold_norm) find_norm_weight_max<T, kLinearSm80Threads>(a.norm_weight, a.k, layout, shared);
  pdl_wait();
  next = begin;
  for (int s = 0; s < kLinearSm80Stages - 1; ++s, next.advance(plan, pair)) {
    if (next.exists(plan)) ring.copy_x(s, next);
    cp_async_commit();
  }
  const int of_first = (plan.mma_tiles + 1) / 2;
  const bool is_first = threadIdx.x / 32 % 2 == 0;
  const int first = is_first ? 0 : of_first, tiles = is_first ? of_first : plan.mma_tiles - of_first;
  int stage = 0;
#pragma unroll 1
  for (int tile = begin.tile; tile < plan.output_tiles; tile += static_cast<int>(gridDim.x)) {
    if (tiles <= 1) {
      multiply_sm80<T, kTokenTiles, 1>(a, layout, ring, first, stage, next, shared);
    } else {
      multiply_sm80<T, kTokenTiles, 2>(a, layout, ring, first, stage, next, shared);
    }
    __syncthreads();
    const int64_t column = static_cast<int64_t>(tile) * plan.tile_rows;
    if (a.vector) {
      epilogue<T, 4, kLinearSm80Threads, false>(a, layout, column, tile, 0);
    } else {
      epilogue<T, 1, kLinearSm80Threads, false>(a, layout, column, tile, 0);
    }
  }
}

inline cudaError_t launch_sm80(const Arguments& arguments, const Sm80Operands& operands, int blocks, Dtype dtype,
                               cudaStream_t stream) {
  const LaunchShape shape{blocks, dim3(kLinearSm80Threads), arguments.plan.shared_bytes};
  return dispatch_int<1, 2>(linear_token_tiles(arguments.m), [&](auto tiles) {
    constexpr int kTokenTiles = decltype(tiles)::value;
    return dtype == Dtype::kFloat16
               ? launch(linear_sm80_kernel<__half, kTokenTiles>, shape, stream, operands, arguments)
               : launch(linear_sm80_kernel<__nv_bfloat16, kTokenTiles>, shape, stream, operands, arguments);
  });
}

}  // namespace llmk::kernels::few_tokens
