// Linear for one token: the formulas, dtypes and roundings of linear.cu with m = 1, by dot products in float32.
// Moves n k elements of W, once.
//
//   blocks   split the columns of y evenly; a column is a row of W, with a gate one of the gate and one of the up rows
//   groups   of warps split the columns of a block evenly
//   warps    split K within a group; each keeps its slice of x in registers
//   ring     one per warp: a stage holds the warp's slices of a few rows of W, filled by bulk copies. A warp is its own
//            producer and consumer, so it needs full barriers only, and waits for no other warp
//   end      the partial sums of a group's warps are added up in a fixed order
//
// A norm is folded as in prologue.cuh: its weight is multiplied into x, in float16 divided by a power of two (one for
// each warp), and the sums are multiplied by 1 / rms. Within a decode step (see linear.cu) the ring is filled before
// the previous kernel has ended.
//
// x may be a sum, addend + alpha norm(y), which every group computes and one of the grid writes. A token of OLMo-2-7B,
// with 64 such sums, takes 3543 us on an H200, with a launch for each 3571 to 3620: most of a launch is hidden, since
// weights are read meanwhile.
//
// The L2 cache does not help the linear behind: prefetching its first rows once a block has requested its own last ones
// took a token of Llama-3.1-8B, 3628 us on an H200, to 3624 (o, 32 KB by each block), 3650 (gate and up, 64 KB), 3660
// (down, 64 KB), 3670 and 3762 (q, k and v, 64 and 256 KB: attention waits for memory, too).
#include "gemv.h"

#include "device/reduce.cuh"
#include "device/tma.cuh"
#include "device/vec.cuh"
#include "finish.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"
#include "kernels/norm/forward_row.cuh"
#include "weight_element.cuh"

namespace llmk::kernels {
namespace {

// Shared memory in bytes: the full barriers, and from kSquares on a sum of squares per slice.
constexpr int kSquares = 8 * kGemvMaxWarps * kGemvMaxStages, kMaxPitch = gemv_pitch(kGemvMaxWarps);
static_assert(kSquares + 4 * kMaxPitch <= kGemvHeaderBytes && kSquares % 16 == 0 && kGemvHeaderBytes % 16 == 0);

struct Arguments {
  // What the first copies wait for, in as few lines of constant memory as possible.
  const void* weight;
  int64_t row_bytes;                            // between rows
  int64_t up_rows;                              // from the gate to the up projection
  int columns_per_block, blocks_with_one_more;  // columns of y
  int columns_per_group, groups_with_one_more;  // of a block without one more
  int k;
  int slices;  // see GemvPlan
  int stages;  // per warp
  int ring;    // its offset in shared memory
  bool glu, prefetch_weights, next_starts_at_once;

  bool add_residual, fold_norm, norm_offset;
  Activation activation;  // with glu
  const void *x, *norm_weight, *bias;
  void* y;
  float alpha;  // of what is added to the residual
  int pitch;    // of the partial sums
  float eps, inverse_k;
};

// sum += the dot product of eight elements; even and odd ones apart, for two shorter dependency chains.
template <typename Eight>
__device__ inline void dot(float (&sum)[2], const Eight& w, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    sum[0] = fmaf(w[i], x[i], sum[0]);
    sum[1] = fmaf(w[i + 1], x[i + 1], sum[1]);
  }
}

// The sum of `pitch` floats, a multiple of four; those beyond the slices are zero. In shared memory, 16-byte aligned.
__device__ inline float sum_over_slices(const float* from, int pitch) {
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxPitch; i += 4) {
    if (i < pitch) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      total = total + four.x + four.y + four.z + four.w;
    }
  }
  return total;
}

// Bias and residual of a column of y, and the scales of its rows of W.
template <typename T>
struct EpilogueOperands {
  using V = Vec<T, 1>;
  V bias, residual;
  float scale, up_scale = 1.f;

  template <typename Element>
  __device__ EpilogueOperands(const Arguments& a, const Element& element, int column) : scale(element.scale(column)) {
    if (a.glu) up_scale = element.scale(a.up_rows + column);
    if (a.bias) bias = V::load(static_cast<const T*>(a.bias) + column);
    if (a.add_residual) residual = V::load(static_cast<const T*>(a.y) + column);
  }
};

// Element: of W, see weight_element.cuh. kSum: x is the target of `sum`.
template <typename T, typename Element, int kVectors, bool kSum>
__global__ void __launch_bounds__(32 * (kVectors > 4 ? kGemvMaxSlices : kGemvMaxWarps), kVectors > 4 ? 1 : 2)
    gemv_kernel(const __grid_constant__ Arguments a, const __grid_constant__ NormParams sum,
                const __grid_constant__ Element element) {
#if __CUDA_ARCH__ >= 900
  using V = Vec<T, 8>;
  using Eight = typename Element::Eight;
  constexpr int kStageRows = kGemvStageRows<kVectors>, kSliceBytes = kVectors * 256 * Element::kBytes,
                kStageBytes = kStageRows * kSliceBytes;
  if (a.next_starts_at_once) pdl_launch_dependents();
  extern __shared__ __align__(128) unsigned char shared[];
  float* const squares = reinterpret_cast<float*>(shared + kSquares);
  float* const sums = reinterpret_cast<float*>(shared + kGemvHeaderBytes);
  const int lane = threadIdx.x % 32;
  // By shuffles, so that the compiler knows that they are uniform.
  const int slice = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = __shfl_sync(0xffffffffu, threadIdx.y, 0),
            warp = group * a.slices + slice;
  const int block = static_cast<int>(blockIdx.x), one_more = block < a.blocks_with_one_more,
            block_begin = block * a.columns_per_block + min(block, a.blocks_with_one_more),
            block_columns = a.columns_per_block + one_more;
  const int groups_with_one_more = a.groups_with_one_more + one_more,
            begin = group * a.columns_per_group + min(group, groups_with_one_more),
            columns = a.columns_per_group + (group < groups_with_one_more),
            rows = a.glu ? 2 * columns : columns;  // of this group, `begin` within the block
  const int first = slice * kVectors * 256;        // of this warp's columns of x
  const int slice_bytes = min(kSliceBytes, Element::kBytes * (a.k - first));
  unsigned char* const ring = shared + a.ring + warp * a.stages * kStageBytes;
  const uint32_t full = shared_address(shared) + 8 * warp * a.stages;

  // Fills a stage with this warp's slices of the group's next rows: all of the gate, then all of the up projection.
  const char* const gate =
      static_cast<const char*>(a.weight) + (block_begin + begin) * a.row_bytes + Element::kBytes * first;
  const char* const up = gate + (a.up_rows - columns) * a.row_bytes;
  int next = 0;
  const auto produce = [&](int stage) {
    const int count = min(kStageRows, rows - next);
    if (count > 0 && elect()) {
      const uint32_t barrier = full + 8 * stage, to = shared_address(ring) + stage * kStageBytes;
      barrier_arrive_expecting(barrier, count * slice_bytes);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int row = next + i;
        bulk_load(to + i * kSliceBytes, (row < columns ? gate : up) + row * a.row_bytes, slice_bytes, barrier,
                  kEvictFirst);
      }
    }
    next += kStageRows;
  };
  if (elect()) {
#pragma unroll 1
    for (int stage = 0; stage < a.stages; ++stage) barrier_init(full + 8 * stage, 1);
  }
  barrier_init_fence();
  __syncwarp();
  if (!a.prefetch_weights) pdl_wait();
#pragma unroll 1
  for (int stage = 0; stage < a.stages; ++stage) produce(stage);
  // The next kernel may start now. If it started later, its blocks would pile up on the SMs that are done first.
  if (!a.next_starts_at_once) pdl_launch_dependents();
  const int threads = static_cast<int>(blockDim.x * blockDim.y), thread = warp * 32 + lane;
  // Where K ends within a slice, x is zero. The bytes that no copy fills must be zero too: 0 * NaN is NaN.
#pragma unroll 1
  for (int at = slice_bytes + 16 * lane; at < kSliceBytes; at += 512) {
#pragma unroll 1
    for (int row = 0; row < a.stages * kStageRows; ++row) *reinterpret_cast<uint4*>(ring + row * kSliceBytes + at) = {};
  }
  __syncwarp();
  // The sums of a row are added in whole vectors, so those beyond the slices are zero.
  const int block_rows = a.glu ? 2 * block_columns : block_columns;
#pragma unroll 1
  for (int slice_beyond = a.slices; slice_beyond < a.pitch; ++slice_beyond) {
    if (thread == 0) squares[slice_beyond] = 0.f;
#pragma unroll 1
    for (int row = thread; row < block_rows; row += threads) sums[row * a.pitch + slice_beyond] = 0.f;
  }

  V x[kVectors], norm_weight[kVectors];
  const auto load_all = [&](V(&vectors)[kVectors], const void* from) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * 256 + lane * 8;
      uint4 bytes{};  // zeros as words: the compiler would move elements one by one
      if (column < a.k) bytes = *reinterpret_cast<const uint4*>(static_cast<const T*>(from) + column);
      vectors[v] = reinterpret_cast<const V&>(bytes);
    }
  };
  if (a.fold_norm) load_all(norm_weight, a.norm_weight);
  if constexpr (kSum) {
    __shared__ __align__(16) float squares_of_y[kMaxPitch];
    if (thread < kMaxPitch && thread >= a.slices) squares_of_y[thread] = 0.f;
    V y[kVectors], weight[kVectors];
    if (sum.weight) load_all(weight, sum.weight);
    pdl_wait();
    load_all(y, sum.x);
    load_all(x, sum.addend);
    float squared[1] = {0.f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) squared[0] = norm::sum_of_squares(y[v], squared[0]);
    warp_sum(squared, 32);
    if (lane == 0 && group == 0) squares_of_y[slice] = squared[0];
    __syncthreads();
    const float mean = sum_over_slices(squares_of_y, a.pitch) * a.inverse_k,
                rstd_of_y = rsqrtf(mean + static_cast<float>(sum.options.eps));
    const norm::Scale scale_of_y(sum);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v] = norm::add_scaled(x[v], scale_of_y(y[v], weight[v], rstd_of_y), static_cast<float>(sum.alpha));
      const int column = first + v * 256 + lane * 8;
      if (block == 0 && group == 0 && column < a.k) x[v].store(static_cast<T*>(sum.target) + column);
    }
  } else {
    pdl_wait();
    load_all(x, a.x);
  }
  EpilogueOperands<T> operands(a, element,
                               block_begin + min(thread, block_columns - 1));  // loads hidden by the main loop
  float scale = 1.f;  // the power of two that this warp's x is divided by
  if (a.fold_norm) {
    float sum[2] = {};  // even and odd elements, as in dot()
    const float offset = a.norm_offset ? 1.f : 0.f;
    const auto product = [&](int v, int e) { return x[v][e] * (offset + norm_weight[v][e]); };
    float factor = 1.f;
    if constexpr (std::is_same_v<T, __half>) {  // the products might overflow
      uint32_t largest = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = max(largest, __float_as_uint(fabsf(product(v, e))));
      }
      const int exponent = static_cast<int>(__reduce_max_sync(0xffffffffu, largest) >> 23);
      scale = __uint_as_float(min(max(exponent, 1), 250) << 23);
      factor = 1.f / scale;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e % 2] = fmaf(x[v][e], x[v][e], sum[e % 2]);
      x[v] = V::of([&](int e) { return product(v, e) * factor; });
    }
    float squared[1] = {sum[0] + sum[1]};
    warp_sum(squared, 32);
    if (lane == 0 && group == 0) squares[slice] = squared[0];
  }

  int stage = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int row = 0; row < rows; row += kStageRows) {
    float products[kStageRows][2] = {}, sum[kStageRows];
    barrier_wait(full + 8 * stage, phase);
    const Eight* const w = reinterpret_cast<const Eight*>(ring + stage * kStageBytes) + lane;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float wide[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) wide[e] = x[v][e];
#pragma unroll
      for (int r = 0; r < kStageRows; ++r) dot(products[r], Eight::load(w[(r * kVectors + v) * 32].data), wide);
    }
    __syncwarp();  // all lanes have read the stage
    produce(stage);
    if (++stage == a.stages) stage = 0, phase ^= 1;
#pragma unroll
    for (int r = 0; r < kStageRows; ++r) sum[r] = products[r][0] + products[r][1];
    constexpr int kLanes = 32 / kStageRows;  // that get the same sum
    const float mine = warp_sum_scatter(sum);
    const int at = row + lane / kLanes;
    if (lane % kLanes == 0 && at < rows) {  // the block's gates come before its ups
      sums[(begin + at + (at < columns ? 0 : block_columns - columns)) * a.pitch + slice] = mine * scale;
    }
  }
  __syncthreads();

  const float rstd = a.fold_norm ? rsqrtf(sum_over_slices(squares, a.pitch) * a.inverse_k + a.eps) : 1.f;
#pragma unroll 1
  for (int i = thread; i < block_columns; i += threads) {
    if (i >= threads) operands = EpilogueOperands<T>(a, element, block_begin + i);
    const float sum = sum_over_slices(sums + i * a.pitch, a.pitch) * rstd * operands.scale;
    Vec<T, 1> result;
    if (a.glu) {
      const float up_sum = sum_over_slices(sums + (block_columns + i) * a.pitch, a.pitch) * rstd * operands.up_scale;
      activation::dispatch_on_device(
          a.activation, [&](auto act) { result.data[0] = from_float<T>(glu_of_sums<decltype(act), T>(sum, up_sum)); });
    } else {
      result.data[0] = from_float<T>(a.bias ? sum + operands.bias[0] : sum);
      if (a.add_residual) result = add_to_residual(operands.residual, result, a.alpha);
    }
    static_cast<T*>(a.y)[block_begin + i] = result.data[0];  // assign_to() would take more instructions
  }
#endif
}

}  // namespace

cudaError_t gemv(const LinearParams& p, const GemvPlan& plan, Dtype dtype, cudaStream_t stream) {
  const int out = static_cast<int>(p.columns()), columns = out / plan.blocks;
  const Arguments arguments{.weight = p.weight.data,
                            .row_bytes = p.weight.row_bytes(),
                            .up_rows = out,
                            .columns_per_block = columns,
                            .blocks_with_one_more = out % plan.blocks,
                            .columns_per_group = columns / plan.groups,
                            .groups_with_one_more = columns % plan.groups,
                            .k = static_cast<int>(p.k()),
                            .slices = plan.slices,
                            .stages = plan.stages,
                            .ring = plan.ring,
                            .glu = p.epilogue.glu,
                            .prefetch_weights = p.in_step,
                            .next_starts_at_once = plan.next_starts_at_once,
                            .add_residual = p.epilogue.add_residual,
                            .fold_norm = p.normalize,
                            .norm_offset = p.norm.weight_offset != 0,
                            .activation = p.epilogue.activation,
                            .x = p.x,
                            .norm_weight = p.norm_weight,
                            .bias = p.epilogue.bias,
                            .y = p.epilogue.y,
                            .alpha = p.epilogue.alpha,
                            .pitch = gemv_pitch(plan.slices),
                            .eps = static_cast<float>(p.norm.eps),
                            .inverse_k = 1.f / static_cast<float>(p.k())};
  const LaunchShape shape{plan.blocks, dim3(32 * plan.slices, plan.groups), plan.shared_bytes};
  const auto launch_as = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_weight<T>(p.weight, [&](auto element) {
      using Element = decltype(element);
      if (p.sum) {
        return dispatch_int<2, 4>(plan.vectors, [&](auto count) {
          return launch(gemv_kernel<T, Element, decltype(count)::value, true>, shape, stream, arguments, *p.sum,
                        element);
        });
      }
      return dispatch_int<2, 4, 8>(plan.vectors, [&](auto count) {
        return launch(gemv_kernel<T, Element, decltype(count)::value, false>, shape, stream, arguments, NormParams{},
                      element);
      });
    });
  };
  return dtype == Dtype::kFloat16 ? launch_as(TypeTag<__half>{}) : launch_as(TypeTag<__nv_bfloat16>{});
}

}  // namespace llmk::kernels
