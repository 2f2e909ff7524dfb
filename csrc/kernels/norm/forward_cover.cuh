// The norms' forward (forward.cuh) for rows of any alignment in registers, by the vectors that cover them
// (row_cover.cuh), on a persistent grid.
//
// Rows that lie kVecWidth rows apart start at the same place of a vector, whatever their stride. A block takes such
// rows only, so that it cuts weights and biases out once, and has them in shared memory as its rows lie in memory.
// A thread has many vectors, and a row few warps, since what a warp does once for a row takes as long as three vectors
// do. By ncu, at 8192x4097 instructions are issued in 55 % of the cycles, and warps wait for their loads most. An H200,
// bfloat16, us; cut: the row's own vectors, cut out of what neighbouring lanes have loaded; words: by words that warps
// have copied to shared memory:
//
//   case                 | cut  | words | this | aligned neighbour
//   ---------------------|------|-------|------|------------------
//   rms_norm 8192x1001   | 11.8 | 13.4  | 12.9 | 10.0
//   rms_norm 8192x2050   | 22.4 | 21.7  | 22.9 | 16.9
//   rms_norm 8192x4097   | 40.9 | 41.6  | 38.6 | 32.5
//   layer_norm 8192x1001 | 14.6 | 15.1  | 14.9 | 12.0
//   layer_norm 8192x2050 | 30.9 | 28.4  | 26.0 | 19.3
//   layer_norm 8192x4097 | 54.8 | 53.9  | 42.1 | 34.1
//
// (The next row by cp.async, while this one is worked on, took 51.9 us for the last: more instructions. A LayerNorm's
// weights and biases as floats: 42.1 instead of 45.0.)
#pragma once
#include "device/ptx.cuh"
#include "forward_row.cuh"
#include "kernels/row_cover.cuh"
#include "row_ring.cuh"

namespace llmk::kernels::norm {

constexpr int kForwardCoverVectors = 6, kForwardCoverBlocks = 2;  // of a thread, at most; blocks of an SM
constexpr size_t kForwardCoverMargin = 4096;                      // of shared memory: the reductions need some
// Threads of a block: as leave a thread 80 registers, or 96 with a second operand.
__host__ __device__ constexpr int forward_cover_threads(Sum sum) { return sum == Sum::kNone ? 384 : 320; }

// Whether rows come through a ring in shared memory (row_ring.cuh) where all operands start at the same place of a
// vector and the device has TMA. Off until it is measured: written without a GPU, and run on the CPU alone.
constexpr bool kForwardRing = false;

// A number near all of a row, which is subtracted before the mean is known: the mean of the row's first 32 elements.
// That of k elements is at most sqrt(elements / k) standard deviations from the mean. So, of 16 bits, what cancels
// costs the variance of the longest row no more digits than scale_of_row() does. (The mean of 32 equal numbers is
// exact.) In float32 it would show, and there is a second reduction, of the differences to the mean.
template <typename T>
__device__ float number_near(const Vec<T, 1>& element_of_lane) {
  return warp_sum(element_of_lane[0] * (1.f / 32), 32);
}

// Groups of threads, a row each. Block b takes rows b % N, b % N + N, ..., which it shares with blocks b + N, ...
// kAlike: see rows_alike().
template <typename T, int kVectors, bool kCentered, Sum kSum, bool kAlike, bool kRing>
__global__ void __launch_bounds__(forward_cover_threads(kSum), kForwardCoverBlocks)
    norm_cover_kernel(const NormParams params, const Extent<T> extent, const Extent<T> other_extent, float inverse_cols,
                      int64_t least_stride, bool keep_inputs, const RowRingPlan ring_plan) {
  constexpr int N = kVecWidth<T>, kValues = kCentered ? 2 : 1, kWarps = forward_cover_threads(kSum) / 32;
  constexpr bool kResidual = kSum == Sum::kBefore;
  using V = Vec<T, N>;
  constexpr int kPlanes = N / 4;
  extern __shared__ int4 parameters[];  // of each vector of the row: weights; or, as floats, weights and biases
  __shared__ WarpSums<N> shared[2][kValues * kWarps];
  __shared__ uint64_t barriers[kRing ? kWarps * kMostRingStages : 1];
  const LooseGroup group{{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)}};
  const int64_t first = blockIdx.x % N;
  if (first >= params.rows) return;
  const Cover<T, kVectors, 1> cover(Row<T>(params, first).x, static_cast<int>(params.cols), group);
  const int row_size = kVectors * group.threads;
  V* const weights = reinterpret_cast<V*>(parameters) + group.rank;
  float4* const floats = reinterpret_cast<float4*>(parameters) + group.rank;
  // A group has rows begin, begin + step, ... In a ring's grid a block's groups have rows far apart: then all blocks
  // have as many of the last ones.
  const int64_t blocks = gridDim.x / N, place = kRing ? group.index * blocks + blockIdx.x / N
                                                      : blockIdx.x / N * static_cast<int64_t>(blockDim.y) + group.index;
  const int64_t begin = first + place * N, step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  // Whether all vectors of a row lie in the tensors.
  const auto is_inner = [&](int64_t index) { return index > 0 && index + 1 < params.rows && least_stride >= N; };
  [[maybe_unused]] RowRing<T, kSum == Sum::kNone ? 1 : 2> ring(parameters + row_size * (kCentered ? 2 * kPlanes : 1),
                                                               barriers, ring_plan, group);
  if constexpr (kRing) ring.init();
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t policy = l2_policy(keep_inputs);
  // Has row `index`, which lies `ahead` rows ahead of `from`, copied to the stage.
  [[maybe_unused]] const auto fill = [&](int stage, const Row<T>& from, int64_t index, int64_t ahead) {
    if (group.rank > 0 || index >= params.rows) return;
    const int count = is_inner(index) ? (cover.cols + cover.shift + N - 1) / N : 0;
    const T* const x = from.x + ahead * params.x_stride - cover.shift;
    if constexpr (kSum == Sum::kNone) {
      ring.fill(stage, {x}, count, policy);
    } else {
      const T* const other =
          kResidual ? from.residual + ahead * params.residual_stride : from.addend + ahead * params.addend_stride;
      ring.fill(stage, {x, other - cover.shift}, count, policy);
    }
  };
  if constexpr (kRing) {
    const Row<T> row(params, begin);
    for (int stage = 0; stage < ring_plan.stages; ++stage) fill(stage, row, begin + stage * step, stage * step);
  }
  if (group.index == 0) {
    const Row<T> row(params, first);
    [[maybe_unused]] const float offset = weight_offset_of(params);
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const auto cut = [&](const T* values, float otherwise) {
        return values ? load_shifted(values, cover.column(v), 0, cover.cols) : V::of([=](int) { return otherwise; });
      };
      const V weight = cut(row.weight, 1.f);
      if constexpr (kCentered) {
        const auto put = [&](const V& values, int number) {
#pragma unroll
          for (int i = 0; i < kPlanes; ++i) {
            floats[(number * kPlanes + i) * row_size + v * group.threads] =
                make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
          }
        };
        put(with_offset(weight, offset), 0);
        put(cut(row.bias, 0.f), 1);
      } else {
        weights[v * group.threads] = weight;
      }
    }
  }
  __syncthreads();
  const float eps = static_cast<float>(params.options.eps);
  const Scale scale(params);
  Row<T> row(params, begin);
  int parity = 0;
  for (int64_t index = begin; index < params.rows; index += step, row.advance(params, step)) {
    V s[kVectors];
    [[maybe_unused]] V r[kVectors];
    [[maybe_unused]] const T* const other = kResidual ? row.residual : row.addend;
    [[maybe_unused]] const int lane = threadIdx.x % 32;
    [[maybe_unused]] Vec<T, 1> element;  // of the lane, of the first ones
    const bool inner = is_inner(index);
    if constexpr (kRing) ring.wait();
    if (kRing && inner) {
      const auto load = [&](const T* elements, V(&vectors)[kVectors]) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (cover.exists(v)) vectors[v] = V::load(elements + (group.rank + v * group.threads) * N);
        }
        return Vec<T, 1>::load(elements + cover.shift + lane);
      };
      element = load(ring.elements(0), s);
      if constexpr (kSum != Sum::kNone) {
        const Vec<T, 1> other_element = load(ring.elements(1), r);
        if constexpr (kResidual) element = add(element, other_element);
      }
    } else if (inner && (kAlike || kSum == Sum::kNone)) {
      cover.load_inner(row.x, s, policy);
      if constexpr (kSum != Sum::kNone) cover.load_inner(other, r, policy);
    } else {
      cover.load(row.x, extent, s, policy);
      if constexpr (kSum != Sum::kNone) load_beside<kAlike>(cover, other, other_extent, r, policy);
    }
    if constexpr (kCentered) {
      if (!kRing || !inner) element = row.template load<1>(kResidual, lane);
    }
    if constexpr (kResidual) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!cover.warp_has(v)) continue;
        s[v] = add(s[v], r[v]);
        store_covering<kAlike>(cover, s[v], row.sum, v);
      }
    }
    RowScale of_row{};
    const auto sums_of = [&](float number, float(&sums)[kValues], int buffer) {
      float of_elements[kValues][N] = {};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!cover.warp_has(v)) continue;
        forget_floats(s[v]);
        float d[N];
#pragma unroll
        for (int i = 0; i < N; ++i) d[i] = kCentered ? s[v][i] - number : s[v][i];
        cover.clear(d, v, 0.f);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          of_elements[0][i] = fmaf(d[i], d[i], of_elements[0][i]);
          if constexpr (kCentered) of_elements[1][i] += d[i];
        }
      }
      sum_covering(of_elements, cover.shift, sums, group, shared[buffer]);
    };
    float sums[kValues];
    if constexpr (kCentered) {
      float number = number_near(element);
      if constexpr (sizeof(T) == 4) {
        sums_of(number, sums, 0);
        number = fmaf(sums[1], inverse_cols, number);
        parity = 1;
      }
      sums_of(number, sums, parity);
      of_row = scale_of_sums(number, sums[1], sums[0], inverse_cols, eps);
    } else {
      sums_of(0.f, sums, parity);
      of_row.rstd = rsqrtf(fmaf(sums[0], inverse_cols, eps));
    }
    parity ^= 1;
    if constexpr (kRing) {
      __syncwarp();  // all of a group have read the stage: those of several warps have met at a barrier for the sums
      const int64_t ahead = ring_plan.stages * step;
      fill(ring.stage(), row, index + ahead, ahead);
      ring.next();
    }
    T* const target = kSum == Sum::kAfter ? row.target : row.y;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!cover.warp_has(v)) continue;
      forget_floats(s[v]);
      V y;
      if constexpr (kCentered) {
        float w[N], b[N];
#pragma unroll
        for (int i = 0; i < kPlanes; ++i) {
          reinterpret_cast<float4&>(w[4 * i]) = floats[i * row_size + v * group.threads];
          reinterpret_cast<float4&>(b[4 * i]) = floats[(kPlanes + i) * row_size + v * group.threads];
        }
        const Centered<T, N> centered(s[v], of_row.mean);
        y = V::of([&](int i) { return fmaf(__fmul_rn(centered.d[i], of_row.rstd), w[i], b[i]); });
      } else {
        y = scale(s[v], V::load(reinterpret_cast<const T*>(weights + v * group.threads)), of_row.rstd);
      }
      if constexpr (kSum == Sum::kAfter) y = add_scaled(r[v], y, static_cast<float>(params.alpha));
      store_covering<kAlike>(cover, y, target, v);
    }
  }
}

// The groups of a block are at most as many as there are rows for it; blocks are a multiple of N. The grid is
// persistent, but may start early: of blocks with as many registers as most have, no more fit an SM than there are for
// each.
struct ForwardCoverShape {
  CoverPlan plan;
  RowRingPlan ring;
  LaunchShape shape;
};

template <typename T>
ForwardCoverShape plan_forward_cover(const NormParams& params, Sum sum, bool centered, bool alike,
                                     const DeviceInfo& device) {
  constexpr int N = kVecWidth<T>;
  const int most_threads = forward_cover_threads(sum), operands = sum == Sum::kNone ? 1 : 2;
  ForwardCoverShape result{plan_cover(params.cols, sizeof(T), kForwardCoverVectors, most_threads, 1, 1), {}, {}};
  CoverPlan& plan = result.plan;
  size_t bytes = sizeof(int4) * plan.vectors * plan.threads * (centered ? 2 * N / 4 : 1);
  if (bytes + kForwardCoverMargin > device.shared_bytes) plan.vectors = 0;
  if (plan.vectors == 0) return result;
  const int blocks_per_sm = 2 * (bytes + kForwardCoverMargin) > device.shared_bytes ? 1 : kForwardCoverBlocks;
  const int64_t rows = (params.rows + N - 1) / N, most_blocks = std::max(blocks_per_sm * device.sm_count / N, 1);
  const int64_t wanted = (rows + most_blocks - 1) / most_blocks;
  plan.rows_per_block = static_cast<int>(std::min<int64_t>(most_threads / plan.threads, wanted));
  const int64_t blocks = std::min(most_blocks, (rows + plan.rows_per_block - 1) / plan.rows_per_block) * N;
  if (kForwardRing && has_row_ring(device) && alike) {
    RowRingPlan& ring = result.ring;
    ring.operand_vectors = static_cast<int>(covering_vectors(params.cols, N));
    const size_t stage_bytes = sizeof(int4) * operands * ring.operand_vectors * plan.rows_per_block;
    const size_t room = device.shared_bytes / blocks_per_sm - kForwardCoverMargin - bytes;
    ring.stages = static_cast<int>(std::min<size_t>(room / stage_bytes, kMostRingStages));
    if (ring.stages < 2) ring.stages = 0;
    bytes += ring.stages * stage_bytes;
  }
  result.shape = {blocks, dim3(plan.threads, plan.rows_per_block), bytes};
  return result;
}

}  // namespace llmk::kernels::norm
