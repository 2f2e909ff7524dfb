// The norms' forward (forward.cuh) for rows of any alignment in registers, by the vectors that cover them
// (row_cover.cuh), on a persistent grid.
//
// Rows that lie kVecWidth rows apart start at the same place of a vector, whatever their stride. A block takes such
// rows only, so that it cuts weights and biases out once, and has them in shared memory as its rows lie in memory.
// There is little to do for a byte: what counts are instructions. So a thread has many vectors, and a row few warps,
// since what a warp does once for a row takes as long as three vectors do. An H200, bfloat16, us; cut: the row's own
// vectors, cut out of what neighbouring lanes have loaded; words: by words that warps have copied to shared memory:
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
// A LayerNorm's weights and biases as floats: 42.1 instead of 45.0. What was slower, of the cases above, times as long:
//
//   what                                                        | result
//   ------------------------------------------------------------|----------------
//   the next row by cp.async, while this one is worked on       | 1.23 (the last)
//   the next row in registers, 256 or 320 threads of a block    | 1.10 to 1.47
//   rows that TMA copies to shared memory, one or two at a time | 1.17 to 1.29
//   9 vectors of a thread, so that a warp has a row of 2050     | 1.03 to 1.12
//   512 threads of a block, with more than 4 vectors            | 1.00 to 1.25
#pragma once
#include "device/ptx.cuh"
#include "forward_row.cuh"
#include "kernels/row_cover.cuh"
#include "number_near.cuh"

namespace llmk::kernels::norm {

constexpr int kForwardCoverVectors = 6, kForwardCoverBlocks = 2;  // of a thread, at most; blocks of an SM
constexpr size_t kForwardCoverMargin = 4096;                      // of shared memory: the reductions need some
// Threads of a block: as leave a thread 80 registers, or 96 with a second operand; of an RMSNorm with few vectors 64,
// since the more rows wait for their loads at a time, the better.
__host__ __device__ constexpr int forward_cover_threads(Sum sum, bool centered, int vectors = kForwardCoverVectors) {
  return sum != Sum::kNone ? 320 : centered || vectors > 4 ? 384 : 512;
}

// Weights and biases of the rows of a block, cut out as the vectors of the rows lie in memory: of an RMSNorm the
// weights, of a LayerNorm both, as floats. In shared memory.
template <typename T, bool kCentered>
class CutParameters {
  static constexpr int N = kVecWidth<T>, kPlanes = N / 4;
  using V = Vec<T, N>;

 public:
  // In units of 16 bytes, for a row of `vectors` vectors.
  __host__ __device__ static constexpr int size(int vectors) { return vectors * (kCentered ? 2 * kPlanes : 1); }

  // `vectors`: of each thread.
  __device__ CutParameters(int4* memory, const Group& group, int vectors)
      : memory_(memory + group.rank), threads_(group.threads), vectors_(vectors) {}

  // Of the threads of one group.
  template <int kVectors>
  __device__ void put(const NormParams& params, const Cover<T, kVectors, 1>& cover) const {
    const float offset = weight_offset_of(params);
#pragma unroll 1
    for (int v = 0; v < vectors_; ++v) {
      const auto cut = [&](const void* values, float otherwise) {
        return values ? load_shifted(static_cast<const T*>(values), cover.column(v), 0, cover.cols)
                      : V::of([=](int) { return otherwise; });
      };
      const V weight = cut(params.weight, 1.f);
      if constexpr (kCentered) {
        const auto put_floats = [&](const V& values, int number) {
#pragma unroll
          for (int i = 0; i < kPlanes; ++i) {
            *plane(number * kPlanes + i, v) =
                make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
          }
        };
        put_floats(with_offset(weight, offset), 0);
        put_floats(cut(params.bias, 0.f), 1);
      } else {
        *reinterpret_cast<V*>(memory_ + v * threads_) = weight;
      }
    }
  }

  // Those of vector v of this thread.
  struct OfVector {
    V weight;                                          // of an RMSNorm
    float w[kCentered ? N : 1], b[kCentered ? N : 1];  // of a LayerNorm

    // What the norm makes of a vector.
    __device__ V output(const V& s, const RowScale& of_row, const Scale& scale) const {
      if constexpr (kCentered) {
        const Centered<T, N> centered(s, of_row.mean);
        return V::of([&](int i) { return fmaf(__fmul_rn(centered.d[i], of_row.rstd), w[i], b[i]); });
      } else {
        return scale(s, weight, of_row.rstd);
      }
    }
  };
  __device__ OfVector load(int v) const {
    OfVector result;
    if constexpr (kCentered) {
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) {
        reinterpret_cast<float4&>(result.w[4 * i]) = *plane(i, v);
        reinterpret_cast<float4&>(result.b[4 * i]) = *plane(kPlanes + i, v);
      }
    } else {
      result.weight = V::load(reinterpret_cast<const T*>(memory_ + v * threads_));
    }
    return result;
  }

 private:
  __device__ float4* plane(int number, int v) const {
    return reinterpret_cast<float4*>(memory_ + (number * vectors_ + v) * threads_);
  }

  int4* memory_;
  int threads_, vectors_;
};

// Groups of threads, a row each. Block b takes rows b % N, b % N + N, ..., which it shares with blocks b + N, ...
// kAlike: see rows_alike().
template <typename T, int kVectors, bool kCentered, Sum kSum, bool kAlike>
__global__ void __launch_bounds__(forward_cover_threads(kSum, kCentered, kVectors), kForwardCoverBlocks)
    norm_cover_kernel(const NormParams params, const Extent<T> extent, const Extent<T> other_extent, float inverse_cols,
                      int64_t least_stride, bool keep_inputs) {
  constexpr int N = kVecWidth<T>, kValues = kCentered ? 2 : 1;
  constexpr int kWarps = forward_cover_threads(kSum, kCentered, kVectors) / 32;
  constexpr bool kResidual = kSum == Sum::kBefore;
  using V = Vec<T, N>;
  extern __shared__ int4 parameters[];  // of CutParameters
  __shared__ WarpSums<N> shared[2][kValues * kWarps];
  const LooseGroup group{{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)}};
  const int64_t first = blockIdx.x % N;
  if (first >= params.rows) return;
  const Cover<T, kVectors, 1> cover(Row<T>(params, first).x, static_cast<int>(params.cols), group);
  const CutParameters<T, kCentered> cut(parameters, group, kVectors);
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t policy = l2_policy(keep_inputs);
  if (group.index == 0) cut.put(params, cover);
  __syncthreads();
  const float eps = static_cast<float>(params.options.eps);
  const Scale scale(params);
  const int64_t begin = first + (blockIdx.x / N * static_cast<int64_t>(blockDim.y) + group.index) * N;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  Row<T> row(params, begin);
  int parity = 0;
  for (int64_t index = begin; index < params.rows; index += step, row.advance(params, step)) {
    V s[kVectors];
    [[maybe_unused]] V r[kVectors];
    [[maybe_unused]] const T* const other = kResidual ? row.residual : row.addend;
    const bool is_inner = index > 0 && index + 1 < params.rows && least_stride >= N;
    if (is_inner && (kAlike || kSum == Sum::kNone)) {
      cover.load_inner(row.x, s, policy);
      if constexpr (kSum != Sum::kNone) cover.load_inner(other, r, policy);
    } else {
      cover.load(row.x, extent, s, policy);
      if constexpr (kSum != Sum::kNone) load_beside<kAlike>(cover, other, other_extent, r, policy);
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
      float number = number_near(row.template load<1>(kResidual, threadIdx.x % 32));
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
    T* const target = kSum == Sum::kAfter ? row.target : row.y;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!cover.warp_has(v)) continue;
      forget_floats(s[v]);
      V y = cut.load(v).output(s[v], of_row, scale);
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
  LaunchShape shape;
};

template <typename T>
ForwardCoverShape plan_forward_cover(const NormParams& params, Sum sum, bool centered, const DeviceInfo& device) {
  constexpr int N = kVecWidth<T>;
  ForwardCoverShape result{
      plan_cover(params.cols, sizeof(T), kForwardCoverVectors, forward_cover_threads(sum, centered), 1, 1), {}};
  CoverPlan& plan = result.plan;
  const int most_threads = forward_cover_threads(sum, centered, plan.vectors);
  const size_t bytes = sizeof(int4) * plan.vectors * plan.threads * (centered ? 2 * N / 4 : 1);
  if (bytes + kForwardCoverMargin > device.shared_bytes) plan.vectors = 0;
  if (plan.vectors == 0) return result;
  const int blocks_per_sm = 2 * (bytes + kForwardCoverMargin) > device.shared_bytes ? 1 : kForwardCoverBlocks;
  const int64_t rows = (params.rows + N - 1) / N, most_blocks = std::max(blocks_per_sm * device.sm_count / N, 1);
  const int64_t wanted = (rows + most_blocks - 1) / most_blocks;
  plan.rows_per_block = static_cast<int>(std::min<int64_t>(most_threads / plan.threads, wanted));
  const int64_t blocks = std::min(most_blocks, (rows + plan.rows_per_block - 1) / plan.rows_per_block) * N;
  result.shape = {blocks, dim3(plan.threads, plan.rows_per_block), bytes};
  return result;
}

}  // namespace llmk::kernels::norm
