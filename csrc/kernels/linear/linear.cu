// Linear for few tokens:  y = x W^T (+ bias),  silu(x Wg^T) * (x Wu^T),  or  residual += x W^T (+ bias)
//
// x [m <= 64, k], W [n, k], float16 or bfloat16; products summed in float32 and rounded once (for SwiGLU: gate and up
// rounded, silu rounded, product rounded, as eager PyTorch; for the residual: the sum, then the addition).
// Moves n k elements of W, once, and that is its time: everything else is arranged around never letting the memory
// rest.
//
// One warp copies boxes of W (and of x, which stays in the L2 cache) into a ring in shared memory, always as far ahead
// as there is room; W does not depend on the kernel before this one, so its first boxes are under way while that still
// runs. Six warps multiply with mma.sync, W as the 16-row operand, so that 8 tokens cost no more than one. Since the
// order of k does not matter where both operands agree, a lane takes 16 contiguous bytes as its part of two
// instructions; boxes are swizzled (16-byte units exclusive-or row), and lane t of a row takes the units 2t and 2t + 1,
// which touches every bank once.
// K is split over warps and over the blocks of a cluster (see plan.h); the partial sums meet in shared memory and are
// added in a fixed order. One token may be normalized on the way into shared memory, several by a launch before.
#include "linear.h"

#include "device/tma.cuh"
#include "device/vec.cuh"
#include "gemv.h"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/tensor_map.h"

namespace llmk::kernels {
namespace {

constexpr int kWarps = kLinearWarps, kThreads = 32 * kWarps;
constexpr int kMaxFoldedTokens = 16;  // beyond, a launch of its own costs less than every block scaling all of x
[[maybe_unused]] constexpr int kConsumers = 1;  // the named barrier of the warps that compute

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
  bool fold;         // normalize x here
  bool norm_offset;  // add 1 to the norm's weight
  float eps;
  LinearPlan plan;
};

#if __CUDA_ARCH__ >= 900

// Four 8x8 matrices of 16-bit elements; lane 8 i + r names row r of matrix i, lane 4 r + t gets its elements 2t, 2t
// + 1.
__device__ inline uint4 load_matrices(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
__device__ inline float shared_load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ inline float4 shared_load_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

// d += a b for a 16x16 and b 16x8.
template <typename T>
__device__ inline void mma(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  }
}

// The diagonal of the upper half of x x^T: the sums of the squares of 8 tokens, of which this lane gets two elements
// of its row.
template <typename T>
__device__ inline void mma_squares(float (&d)[2], uint32_t low, uint32_t high) {
  float all[4] = {d[0], d[1], 0.f, 0.f};
  mma<T>(all, {low, 0, high, 0}, low, high);
  d[0] = all[0], d[1] = all[1];
}

// Where things are in shared memory.
struct Layout {
  uint32_t full, empty, drained, squares, rstd, ring, norm_weight, partials;

  __device__ Layout(uint32_t base, const LinearPlan& plan) {
    full = base;
    empty = base + 8 * plan.stages;
    drained = base + 16 * plan.stages;
    squares = base + kLinearBarrierBytes;
    rstd = squares + kLinearWarps * kLinearMaxTokens * sizeof(float);
    ring = base + kLinearHeaderBytes;
    norm_weight = ring + plan.stages * plan.stage_bytes;
    partials = plan.alias ? ring : norm_weight + plan.norm_weight_bytes;
  }
};

// The part of K that this block sums up, in stages.
struct Slice {
  int begin, end;

  __device__ Slice(const LinearPlan& plan, int rank)
      : begin(plan.k_stages * rank / plan.cluster), end(plan.k_stages * (rank + 1) / plan.cluster) {}
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
  // The weights of the first round of the ring need not wait for the kernel before this one; x does.
  for (int s = 0; s < ahead; ++s) {
    copy_weight(s, first_column + s * column_step, tiles.first * plan.tile_rows, first_depth + s * depth_step);
  }
  pdl_wait();
  for (int s = 0; s < ahead; ++s) copy_x(s, first_column + s * column_step, first_depth + s * depth_step);
  int slot = ahead % plan.stages, begin = ahead;
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

// Puts the norm's weight where the warps read it; beyond K zeros, as the copies of x are filled in.
template <typename T>
__device__ void stage_norm_weight(const Arguments& a, T* target) {
  using V = Vec<T, 8>;
  const int count = a.k / 8, padded = a.plan.k_stages * a.plan.chunks * (kLinearChunk / 8);
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    V w = V::of([](int) { return 0.f; });
    if (i < count) w = V::load(static_cast<const T*>(a.norm_weight) + i * 8);
    *reinterpret_cast<V*>(target + i * 8) = w;
  }
  named_barrier(kConsumers, kThreads);
}

// Eight elements of x times the norm's weight (plus its offset, which is 0 or 1), rounded once.
template <typename T>
__device__ inline uint4 scale(const uint4& x, const uint4& weight, bool offset) {
  using V = Vec<T, 8>;
  const V &a = reinterpret_cast<const V&>(x), &w = reinterpret_cast<const V&>(weight);
  V result;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    result.pair(i) = offset ? __hfma2(a.pair(i), w.pair(i), a.pair(i)) : __hmul2_rn(a.pair(i), w.pair(i));
  }
  return reinterpret_cast<const uint4&>(result);
}

// One of the warps that compute: which part of a tile is its own, and where it stands in the ring.
struct Worker {
  int group;              // along K: it takes the stages group, group + k_warps, ...
  int first_tile, tiles;  // of 16 rows
  int row_warp;
  int slot;
  uint32_t phase = 0;
  int stage;  // counted from the first tile on

  __device__ explicit Worker(const LinearPlan& plan) {
    const int warp = threadIdx.x / 32, row_tiles = plan.boxes * plan.tiles_per_box;
    row_warp = warp / plan.k_warps;
    group = slot = stage = warp % plan.k_warps;
    first_tile = row_tiles * row_warp / plan.row_warps;
    tiles = row_tiles * (row_warp + 1) / plan.row_warps - first_tile;
  }
};

// Sums up the stages of this warp up to `end`, counted from the first tile on, and writes the partial sums of the tile.
// `begin` is where the tile began; kTiles: worker.tiles.
template <typename T, int kTokenTiles, int kTiles>
__device__ void multiply(const Arguments& a, const Layout& layout, const Slice& slice, Worker& worker, int begin,
                         int end, unsigned char* shared) {
  constexpr int kBatch = kTokenTiles < 4 ? kTokenTiles : 4;  // independent instructions hide each other's latency
  const LinearPlan& plan = a.plan;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, m = a.m, chunks = plan.chunks;
  const uint32_t chunk_bytes = plan.box_rows * 128, odd = (plan.box_rows & 4) * 16;
  // Of the 16 rows of W and two units of 8 elements that make an operand, and of the 8 tokens and four units that make
  // two.
  const uint32_t w_lane = lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  const int x_unit = lane / 8;
  const bool fold = a.fold;
  uint32_t offset[kTiles];
  float sums[kTiles][kTokenTiles][4], squares[kTokenTiles][2];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) squares[n][0] = squares[n][1] = 0.f;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int tile = worker.first_tile + i, box = tile >= plan.tiles_per_box;
    offset[i] = box * plan.box_bytes + (tile - box * plan.tiles_per_box) * 2048;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) sums[i][n][0] = sums[i][n][1] = sums[i][n][2] = sums[i][n][3] = 0.f;
  }
  for (; worker.stage < end; worker.stage += plan.k_warps) {
    uint32_t w = layout.ring + worker.slot * plan.stage_bytes;
    const uint32_t x = w + plan.boxes * plan.box_bytes;
    uint32_t norm_weight = layout.norm_weight + (slice.begin + worker.stage - begin) * chunks * 128 + x_unit * 16;
    int row = lane % 8;  // of x: one for each chunk and token
    uint32_t flip = 0;
    barrier_wait(layout.full + 8 * worker.slot, worker.phase);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, w += chunk_bytes, row += m, flip ^= odd, norm_weight += 128) {
      const uint32_t x_row = x + row * 128 + (x_unit ^ (row % 8)) * 16;
#pragma unroll(kTokenTiles <= 2 ? 2 : 1)
      for (int half = 0; half < 128; half += 64) {
        uint4 rows[2][kTiles], scales;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          rows[0][i] = load_matrices(w + offset[i] + (w_lane ^ flip ^ half));
          rows[1][i] = load_matrices(w + offset[i] + (w_lane ^ flip ^ half ^ 32));
        }
        if (fold) scales = load_matrices(norm_weight + half);
#pragma unroll
        for (int first = 0; first < kTokenTiles; first += kBatch) {
          uint4 b[kBatch];
#pragma unroll
          for (int n = 0; n < kBatch; ++n) b[n] = load_matrices((x_row ^ half) + (first + n) * 1024);
          if (fold) {
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
              if (kTokenTiles > 1 ? (first + n) % plan.row_warps == worker.row_warp : worker.row_warp == 0) {
                mma_squares<T>(squares[first + n], b[n].x, b[n].y);
                mma_squares<T>(squares[first + n], b[n].z, b[n].w);
              }
              b[n] = scale<T>(b[n], scales, a.norm_offset);
            }
          }
#pragma unroll
          for (int n = 0; n < kBatch; ++n) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i) mma<T>(sums[i][first + n], rows[0][i], b[n].x, b[n].y);
          }
#pragma unroll
          for (int n = 0; n < kBatch; ++n) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i) mma<T>(sums[i][first + n], rows[1][i], b[n].z, b[n].w);
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(layout.empty + 8 * worker.slot);
    worker.slot += plan.k_warps;
    if (worker.slot >= plan.stages) {
      worker.slot -= plan.stages;
      worker.phase ^= 1;
    }
  }
  // Others may still read the tile before this one, or the ring where the partial sums go.
  named_barrier(kConsumers, kThreads);
  const uint32_t base = layout.full;
  float* const partials = reinterpret_cast<float*>(shared + (layout.partials - base)) + worker.group * m * plan.pitch;
  float* const squares_of =
      reinterpret_cast<float*>(shared + (layout.squares - base)) + worker.group * kLinearMaxTokens;
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    if (fold && n % plan.row_warps == worker.row_warp && t == g / 2)
      squares_of[n * 8 + g] = g % 2 ? squares[n][1] : squares[n][0];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = n * 8 + 2 * t + e % 2, at = (worker.first_tile + i) * 16 + g + e / 2 * 8;
        if (token < m) partials[token * plan.pitch + at] = sums[i][n][e];
      }
    }
  }
}

// The sum of what lies `step` bytes apart from `from` on, once for each group, and that over the blocks of the cluster.
template <int kWidth>
__device__ void gather(float (&sums)[kWidth], const LinearPlan& plan, uint32_t from, int step) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i] = 0.f;
  const auto add = [&](uint32_t address, auto load, auto load4) {
    if constexpr (kWidth == 4) {
      const float4 v = load4(address);
      sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
    } else {
      sums[0] += load(address);
    }
  };
  if (plan.cluster == 1) {
#pragma unroll
    for (int group = 0; group < kWarps; ++group) {
      if (group < plan.k_warps) add(from + group * step, shared_load_float, shared_load_float4);
    }
    return;
  }
  for (int group = 0; group < plan.k_warps; ++group) {
#pragma unroll 4
    for (int rank = 0; rank < plan.cluster; ++rank) {
      add(cluster_address(from + group * step, rank), cluster_load, cluster_load4);
    }
  }
}

// Turns the partial sums into the columns [first, first + rows of the tile) of y.
template <typename T, int kWidth>
__device__ void finish(const Arguments& a, const Layout& layout, int64_t first, int rank) {
  using V = Vec<T, kWidth>;
  const LinearPlan& plan = a.plan;
  const int rows = plan.tile_rows, per_token = rows / kWidth;
  for (int i = rank * kThreads + threadIdx.x; i < a.m * per_token; i += plan.cluster * kThreads) {
    const int token = i / per_token, row = i % per_token * kWidth;
    const int64_t column = first + row;
    if (column >= a.out) continue;
    const int box = !a.swiglu && row >= plan.box_rows;
    float sums[kWidth];
    const auto gather_row = [&](int at) {
      gather(sums, plan, layout.partials + 4 * (token * plan.pitch + at), 4 * a.m * plan.pitch);
      if (a.fold) {
        const float rstd = shared_load_float(layout.rstd + 4 * token);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sums[e] *= rstd;
      }
    };
    gather_row(box * plan.tiles_per_box * 16 + row - box * plan.box_rows);
    if (a.bias) {
      const V bias = V::load(static_cast<const T*>(a.bias) + column);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] += bias[e];
    }
    V result = V::of([&](int e) { return sums[e]; });
    T* const y = static_cast<T*>(a.y) + token * a.y_stride + column;
    if (a.swiglu) {
      const V silu = V::of([&](int e) { return result[e] / (1.f + __expf(-result[e])); });
      gather_row(plan.tiles_per_box * 16 + row);
      result = mul(silu, V::of([&](int e) { return sums[e]; }));
    }
    if (a.add) result = add(V::load(y), result);
    result.store(y);
  }
}

#endif

// kTokenTiles is a template parameter because the sums are in registers.
template <typename T, int kTokenTiles>
__global__ void __launch_bounds__(kThreads + 32, kTokenTiles <= 1   ? 2
                                                 : kTokenTiles <= 4 ? 2
                                                                    : 1)
    linear_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                  const __grid_constant__ Arguments arguments) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char shared[];
  const LinearPlan& plan = arguments.plan;
  const uint32_t base = shared_address(shared);
  const Layout layout(base, plan);
  const bool producer = threadIdx.x >= kThreads;
  if (threadIdx.x == kThreads) {
    tensor_map_prefetch(weight);
    tensor_map_prefetch(x);
    for (int i = 0; i < plan.stages; ++i) {
      barrier_init(layout.full + 8 * i, 1);
      barrier_init(layout.empty + 8 * i, plan.row_warps);
    }
    barrier_init(layout.drained, kWarps);
    barrier_init_fence();
  }
  __syncthreads();
  pdl_launch_dependents();
  const int rank = plan.cluster > 1 ? cluster_rank() : 0;
  const Slice slice(plan, rank);
  const Tiles tiles{static_cast<int>(blockIdx.x) / plan.cluster, static_cast<int>(gridDim.x) / plan.cluster,
                    plan.tiles};
  if (producer) {
    if (threadIdx.x == kThreads) copy(arguments, weight, x, layout, slice, tiles);
    if (plan.cluster > 1) {  // of which there is but one tile
      __syncwarp();
      cluster_barrier();
      cluster_barrier();
    }
    return;
  }
  if (arguments.fold) stage_norm_weight(arguments, reinterpret_cast<T*>(shared + (layout.norm_weight - base)));
  pdl_wait();
  Worker worker(plan);
  int begin = 0;
  for (int tile = tiles.first; tile < tiles.end; tile += tiles.step, begin += slice.stages()) {
    const int end = begin + slice.stages();
    switch (worker.tiles) {
      case 1: multiply<T, kTokenTiles, 1>(arguments, layout, slice, worker, begin, end, shared); break;
      case 2: multiply<T, kTokenTiles, 2>(arguments, layout, slice, worker, begin, end, shared); break;
      default: multiply<T, kTokenTiles, 3>(arguments, layout, slice, worker, begin, end, shared); break;
    }
    named_barrier(kConsumers, kThreads);
    if (plan.cluster > 1) cluster_barrier();
    if (arguments.fold) {
      if (threadIdx.x < arguments.m) {
        float sum[1];
        gather(sum, plan, layout.squares + 4 * threadIdx.x, 4 * kLinearMaxTokens);
        float* const rstd = reinterpret_cast<float*>(shared + (layout.rstd - base));
        rstd[threadIdx.x] = rsqrtf(sum[0] * (1.f / static_cast<float>(arguments.k)) + arguments.eps);
      }
      named_barrier(kConsumers, kThreads);
    }
    const int64_t first = static_cast<int64_t>(tile) * plan.tile_rows;
    if (arguments.vector) {
      finish<T, 4>(arguments, layout, first, rank);
    } else {
      finish<T, 1>(arguments, layout, first, rank);
    }
    if (plan.cluster > 1) cluster_barrier();
    if (plan.alias) {
      async_proxy_fence();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(layout.drained);
    }
  }
#endif
}

// Boxes of `chunks` chunks by `box_rows` rows, swizzled; beyond the tensor they are filled with zeros. Where chunks
// divide K they are a dimension of their own, so that one copy takes several; else they lie along the columns.
cudaError_t tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t cols, int64_t stride, int box_rows,
                       int chunks, Dtype dtype) {
  if (rows == 1) stride = cols;  // of no meaning, and perhaps out of range
  const bool whole = cols % kLinearChunk == 0;
  const TensorBox tensor{3,
                         {whole ? kLinearChunk : cols, rows, whole ? cols / kLinearChunk : 1},
                         {1, stride, kLinearChunk},
                         {kLinearChunk, box_rows, chunks}};
  return make_tensor_map(map, data, tensor, dtype);
}

// Whether the norm is part of the kernel. It multiplies x by the norm's weight and the sums by 1 / rms, which saves a
// rounding and all waiting, but in float16 x times the weight may be out of range.
bool folds_norm(const LinearParams& p, Dtype dtype) {
  const double offset = p.norm.weight_offset;
  return p.normalize && dtype == Dtype::kBFloat16 && p.norm_weight && (offset == 0 || offset == 1) && p.k <= 16384 &&
         p.m <= kMaxFoldedTokens;
}

bool is_vector(const LinearParams& p) {
  const int64_t out = p.epilogue == LinearEpilogue::kSwiglu ? p.n / 2 : p.n;
  return out % 4 == 0 && (p.m == 1 || p.y_stride % 4 == 0) && is_aligned(p.residual ? p.residual : p.y, 8) &&
         is_aligned(p.bias, 8);
}

}  // namespace

bool linear_supported(const LinearParams& p, Dtype dtype) {
  DeviceInfo device;
  return (dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16) && p.m <= kLinearMaxTokens && p.k > 0 &&
         p.k % 8 == 0 && (p.m == 1 || p.x_stride >= p.k) && (p.n == 1 || p.weight_stride >= p.k) && p.k < (1 << 30) &&
         p.n < (1 << 30) && p.weight_stride < (int64_t{1} << 38) && rows_aligned(p.x, p.x_stride, p.m, 2) &&
         rows_aligned(p.weight, p.weight_stride, p.n, 2) && is_aligned(p.norm_weight, 16) &&
         device_info(device) == cudaSuccess && device.compute_capability >= 90 && device.shared_bytes >= 200 * 1024 &&
         has_tensor_maps();
}

bool linear_pays(const LinearParams& p, Dtype) { return p.m <= 16; }

size_t linear_workspace_bytes(const LinearParams& p, Dtype dtype) {
  return p.normalize && !folds_norm(p, dtype) ? static_cast<size_t>(p.m) * p.k * 2 : 0;
}

cudaError_t linear_by_plan(const LinearParams& p, const LinearPlan& plan, Dtype dtype, cudaStream_t stream) {
  CUtensorMap weight{}, x{};
  if (const cudaError_t status =
          tensor_map(weight, p.weight, p.n, p.k, p.weight_stride, plan.box_rows, plan.chunks, dtype);
      status != cudaSuccess) {
    return status;
  }
  if (const cudaError_t status = tensor_map(x, p.x, p.m, p.k, p.x_stride, static_cast<int>(p.m), plan.chunks, dtype);
      status != cudaSuccess) {
    return status;
  }
  const bool swiglu = p.epilogue == LinearEpilogue::kSwiglu;
  const Arguments arguments{p.x,
                            p.norm_weight,
                            p.bias,
                            p.residual ? p.residual : p.y,
                            p.residual != nullptr,
                            swiglu,
                            is_vector(p),
                            static_cast<int>(p.m),
                            static_cast<int>(p.k),
                            swiglu ? p.n / 2 : p.n,
                            swiglu ? static_cast<int>(p.n / 2) : plan.box_rows,
                            p.k % kLinearChunk ? kLinearChunk : 0,
                            p.k % kLinearChunk ? 0 : 1,
                            p.y_stride,
                            p.normalize,
                            p.norm.weight_offset != 0,
                            static_cast<float>(p.norm.eps),
                            plan};
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const int64_t clusters = std::min<int64_t>(plan.tiles, device.sm_count / plan.cluster);
  LaunchShape shape{clusters * plan.cluster, dim3(kThreads + 32), plan.shared_bytes};
  shape.cluster = plan.cluster;
  const auto launch_as = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_int<1, 2, 4, 8>(linear_token_tiles(p.m), [&](auto tiles) {
      return launch(linear_kernel<T, decltype(tiles)::value>, shape, stream, weight, x, arguments);
    });
  };
  return dtype == Dtype::kFloat16 ? launch_as(TypeTag<__half>{}) : launch_as(TypeTag<__nv_bfloat16>{});
}

cudaError_t linear(const LinearParams& params, Dtype dtype, cudaStream_t stream) {
  if (params.m == 0 || params.n == 0) return cudaSuccess;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  LinearParams p = params;
  if (p.normalize && !folds_norm(p, dtype)) {
    const RmsNormParams norm{p.x, nullptr, p.norm_weight, p.workspace, nullptr, p.m, p.k, p.x_stride, 0, p.norm};
    if (const cudaError_t status = rms_norm(norm, dtype, stream); status != cudaSuccess) return status;
    p.x = p.workspace;
    p.x_stride = p.k;
    p.normalize = false;
  }
  if (p.m == 1 && p.k <= kGemvMaxColumns) return gemv(p, dtype, stream);
  const LinearShape shape{p.m, p.n, p.k, p.epilogue == LinearEpilogue::kSwiglu, p.normalize};
  return linear_by_plan(p, plan_linear(shape, device.sm_count, choose_tuning(shape)), dtype, stream);
}

}  // namespace llmk::kernels
