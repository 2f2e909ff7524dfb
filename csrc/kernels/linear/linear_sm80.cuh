// Linear for up to 16 tokens without TMA, or with less shared memory than the rings of linear.cu take: compute
// capability 8.0 to 8.9, and 12.0. The formulas, roundings, fold of the norm and epilogue are those of linear.cu.
//
//   block   an output tile of W's rows for all tokens, then the next: tiles blockIdx.x, + gridDim.x, ...
//   warps   row_consumers divide the rows, k_consumers the columns of K
//   step    32 columns of K of a warp, or more where elements of W have fewer bytes than those of x: its rows of W, x,
//           and the norm's weight
//
// All of that goes from memory to registers, in the order in which mma.sync takes it. The sum over K may run in any
// order, if W and x have the same: with lane 4 g + t the 16 bytes of columns 8 t to 8 t + 7 of row g, one load gives a
// lane its elements of two products. So there is no ring in shared memory, nor an instruction that reads one. With
// smaller elements, 16 bytes of W are more columns, and more products. A lane holds the next steps, `depth` of them,
// whose loads are under way while it multiplies, through the output tiles and their epilogues.
//
// Blocks begin at different columns, so that they do not all read the same of x at the same time: 3 to 13 % faster with
// 16 tokens.
//
// One H200, us:
//
//   design                                       | 3584 x 18944, 1 and 16 tokens | 37888 x 3584, 1 and 16
//   ---------------------------------------------|-------------------------------|------------------------
//   this one                                     | 34.5                     38.1 | 65.3              69.4
//   the same, 8 warps, two blocks on each SM     | 34.7                     41.9 | 70.8              75.8
//   four warps, each with a ring of cp.async     | 53.8                     61.4 | 74.9              78.9
//   cuBLAS                                       | 40.7                     40.7 | 72.4              73.7
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

// 16 bytes, or zeros if not `valid`. kStreamed: the SM reads them once.
template <bool kStreamed>
__device__ inline uint4 load_16_or_zero(const void* global, bool valid) {
  uint4 v{};
  if constexpr (kStreamed) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %5, 0;\n"
        "@p ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(global), "r"(static_cast<int>(valid))
        : "memory");
  } else {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %5, 0;\n"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(global), "r"(static_cast<int>(valid))
        : "memory");
  }
  return v;
}

// What a lane holds of a step: rows g and g + 8 of each MMA tile, token g of each token tile.
template <typename Element, int kTokenTiles, int kTiles>
struct Sm80Step {
  static constexpr int kEights = kLinearSm80Eights<Element::kBytes>;

  uint4 weight[kTiles][2], x[kTokenTiles][kEights], norm_weight[kEights];
};

// A warp's place among those of the block.
struct Sm80Warp {
  int group, part, rows;  // its columns of K; its rows of the output tile, and how many it has in each box

  __device__ explicit Sm80Warp(const LinearPlan& plan) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    group = warp % plan.k_consumers, part = warp / plan.k_consumers, rows = plan.box_rows / plan.row_consumers;
  }
};

// Where a lane loads from. It has few registers: what it can compute from the arguments it does not keep.
template <typename Element>
class Sm80Cursor {
 public:
  __device__ Sm80Cursor(const Arguments& a, const Sm80Operands& operands)
      : a_(a), operands_(operands), lane_row_(threadIdx.x % 32 / 4), tile_(static_cast<int>(blockIdx.x)) {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    column_ = Sm80Warp(a.plan).group * kStep + static_cast<int>(threadIdx.x) % 4 * (8 * kEights) +
              block * a.plan.k_tiles / blocks * stride();
    enter();
  }

  __device__ int tile() const { return tile_; }

  __device__ void next_column() {
    column_ += stride();
    const int end = a_.plan.k_tiles * stride();
    if (column_ >= end) column_ -= end;
  }
  __device__ void next_tile() {
    tile_ += static_cast<int>(gridDim.x);
    enter();
  }

  // Zeros beyond the weight, and beyond K.
  template <int kTokenTiles, int kTiles>
  __device__ void load_weight(Sm80Step<Element, kTokenTiles, kTiles>& step) const {
    const bool one_box = a_.plan.boxes == 1;
    const int left = column_ < a_.k ? rows_left_ : 0, tile_rows = one_box ? 16 : 0;
    const int64_t row_bytes = operands_.weight_row_bytes, box_step = (one_box ? 16 : a_.box_step) * row_bytes;
    const char* from = row_ + int64_t{column_} * Element::kBytes;
#pragma unroll
    for (int i = 0; i < kTiles; ++i, from += box_step) {
      step.weight[i][0] = load_16_or_zero<true>(from, left > i * tile_rows);
      step.weight[i][1] = load_16_or_zero<true>(from + 8 * row_bytes, left > i * tile_rows + 8);
    }
  }
  // And the norm's weight.
  template <int kTokenTiles, int kTiles>
  __device__ void load_x(Sm80Step<Element, kTokenTiles, kTiles>& step) const {
    const bool exists = column_ < a_.k;
    const int64_t bytes = int64_t{column_} * kHalfBytes;
    const char* from = static_cast<const char*>(operands_.x) + lane_row_ * operands_.x_row_bytes + bytes;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n, from += 8 * operands_.x_row_bytes) {
#pragma unroll
      for (int v = 0; v < kEights; ++v)
        step.x[n][v] = load_16_or_zero<false>(from + 16 * v, exists && lane_row_ + 8 * n < a_.m);
    }
    if (!a_.fold_norm) return;
#pragma unroll
    for (int v = 0; v < kEights; ++v) {
      step.norm_weight[v] = load_16_or_zero<false>(static_cast<const char*>(a_.norm_weight) + bytes + 16 * v, exists);
    }
  }

 private:
  static constexpr int kEights = kLinearSm80Eights<Element::kBytes>, kStep = 32 * kEights;

  __device__ int stride() const { return a_.plan.k_consumers * kStep; }
  __device__ void enter() {
    const Sm80Warp warp(a_.plan);
    const int64_t first = static_cast<int64_t>(tile_) * a_.plan.tile_rows + warp.part * warp.rows;
    rows_left_ = static_cast<int>(min(int64_t{warp.rows}, a_.out - first)) - lane_row_;
    row_ = static_cast<const char*>(operands_.weight) + (first + lane_row_) * operands_.weight_row_bytes;
  }

  const Arguments& a_;
  const Sm80Operands& operands_;
  int lane_row_, tile_, column_;
  int rows_left_;    // of the warp, from the lane's first on
  const char* row_;  // that one
};

template <typename T, typename Element, int kTokenTiles, int kTiles>
__device__ void multiply(Products<T, kTokenTiles, kTiles>& products, const Sm80Step<Element, kTokenTiles, kTiles>& step,
                         const Arguments& a, typename Pair<T>::type norm_weight_factor) {
  using Two = typename Pair<T>::type;
  using Eight = typename Element::Eight;
#pragma unroll
  for (int v = 0; v < step.kEights; ++v) {
    uint32_t low[kTiles][4], high[kTiles][4];  // rows g and g + 8
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      Element::template to_pairs<T>(reinterpret_cast<const Eight*>(&step.weight[i][0])[v], low[i]);
      Element::template to_pairs<T>(reinterpret_cast<const Eight*>(&step.weight[i][1])[v], high[i]);
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      uint32_t x[4] = {step.x[n][v].x, step.x[n][v].y, step.x[n][v].z, step.x[n][v].w};
      if (a.fold_norm) {
        mma_squares<T>(products.squares[n], x[0], x[1]);
        mma_squares<T>(products.squares[n], x[2], x[3]);
        const uint4& weight = step.norm_weight[v];
        uint32_t scales[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (std::is_same_v<T, __half>) {
            const Two scaled = __hmul2(reinterpret_cast<const Two&>(scales[i]), norm_weight_factor);
            scales[i] = reinterpret_cast<const uint32_t&>(scaled);
          }
          x[i] = apply_norm_weight<T>(x[i], scales[i], a.norm_offset);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        mma_16x8x16<T>(products.sums[i][n], {low[i][0], high[i][0], low[i][1], high[i][1]}, x[0], x[1]);
        mma_16x8x16<T>(products.sums[i][n], {low[i][2], high[i][2], low[i][3], high[i][3]}, x[2], x[3]);
      }
    }
  }
}

// Element: of W, see weight_element.cuh. kTiles: plan.mma_tiles.
template <typename T, typename Element, int kTokenTiles, int kTiles>
__global__ void __launch_bounds__(32 * kLinearSm80Warps<kTiles, Element::kBytes>, 1)
    linear_sm80_kernel(const __grid_constant__ Sm80Operands operands, const __grid_constant__ Arguments a,
                       const __grid_constant__ Element element) {
  constexpr int kThreads = 32 * kLinearSm80Warps<kTiles, Element::kBytes>;
  constexpr int kDepth = kLinearSm80Depth<kTiles, kTokenTiles, Element::kBytes>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPlan& plan = a.plan;
  const Layout layout(shared_address(shared), plan);
  if (threadIdx.x == 0) *reinterpret_cast<uint32_t*>(shared + (layout.norm_weight_max - layout.full)) = 0;
  __syncthreads();
  pdl_launch_dependents();
  Sm80Step<Element, kTokenTiles, kTiles> steps[kDepth];
  Sm80Cursor<Element> next(a, operands);
  if (!a.prefetch_weights) pdl_wait();
  Sm80Cursor<Element> cursor = next;
#pragma unroll
  for (int d = 0; d < kDepth; ++d, cursor.next_column()) cursor.load_weight(steps[d]);
  if (a.fold_norm) find_norm_weight_max<T, kThreads>(a.norm_weight, a.k, layout, shared);
  pdl_wait();
#pragma unroll
  for (int d = 0; d < kDepth; ++d, next.next_column()) next.load_x(steps[d]);
  const float factor = 1.f / norm_weight_scale<T>(layout);
#pragma unroll 1
  for (int tile = next.tile(); tile < plan.output_tiles; tile = next.tile()) {
    Products<T, kTokenTiles, kTiles> products;
    products.clear();
#pragma unroll 1
    for (int k_tile = kDepth; k_tile <= plan.k_tiles; k_tile += kDepth) {
      if (k_tile == plan.k_tiles) next.next_tile();
#pragma unroll
      for (int d = 0; d < kDepth; ++d, next.next_column()) {
        multiply(products, steps[d], a, Pair<T>::from_floats(factor, factor));
        next.load_weight(steps[d]);
        next.load_x(steps[d]);
      }
    }
    const Sm80Warp warp(plan);
    const auto at = [&](int i, int row) {
      row += plan.boxes == 1 ? i * 16 : 0;
      return row < warp.rows ? warp.part * warp.rows + row + (plan.boxes == 1 ? 0 : i * plan.box_pitch) : -1;
    };
    __syncthreads();  // the previous tile's partial sums have been read
    products.store(a, layout, warp.group, shared, at, [&](int) { return warp.part == 0; });
    __syncthreads();
    const int64_t column = static_cast<int64_t>(tile) * plan.tile_rows;
    if (a.vector) {
      epilogue<T, 4, kThreads, false>(a, layout, column, tile, 0, element);
    } else {
      epilogue<T, 1, kThreads, false>(a, layout, column, tile, 0, element);
    }
  }
}

inline cudaError_t launch_sm80(const Arguments& arguments, const Sm80Operands& operands, const Weight& weight,
                               int blocks, Dtype dtype, cudaStream_t stream) {
  const LinearPlan& plan = arguments.plan;
  const LaunchShape shape{blocks, dim3(32 * linear_sm80_warps(plan.mma_tiles, static_cast<int>(weight.bytes(1)))),
                          plan.shared_bytes};
  const auto launch_as = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_weight<T>(weight, [&](auto element) {
      return dispatch_int<1, 2>(linear_token_tiles(arguments.m), [&](auto token_tiles) {
        return dispatch_int<1, 2, 3>(plan.mma_tiles, [&](auto tiles) {
          constexpr int kTokenTiles = decltype(token_tiles)::value, kTiles = decltype(tiles)::value;
          return launch(linear_sm80_kernel<T, decltype(element), kTokenTiles, kTiles>, shape, stream, operands,
                        arguments, element);
        });
      });
    });
  };
  return dtype == Dtype::kFloat16 ? launch_as(TypeTag<__half>{}) : launch_as(TypeTag<__nv_bfloat16>{});
}

}  // namespace llmk::kernels::few_tokens
