// The norms' forward (forward.cuh) for rows of any alignment without a sum, as forward_cover.cuh, from sm_90 on: rows
// come through a ring in shared memory (row_ring.cuh), and a group of threads takes kRingRows of them at a time. So
// their sums share shuffles and a barrier, their outputs a reading of the weights, and no thread waits for a load of
// its own. The result has the bits of forward_cover.cuh, whose threads have the same columns.
#pragma once
#include "forward_cover.cuh"
#include "row_ring.cuh"

namespace llmk::kernels::norm {

// Off until it is measured: written without a GPU, and run on the CPU alone, by tests/stub_cuda/norm.cpp.
constexpr bool kForwardRing = false;
constexpr int kRingRows = 2, kRingStages = 2, kRingThreads = 768, kMostRingGroups = 15;

// `vectors`: of each thread, of which all but the first and the last lie in the row. kAlike: y starts where x does.
template <typename T, bool kCentered, bool kAlike>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_ring_kernel(const NormParams params, float inverse_cols, int vectors, int row_vectors, bool keep_inputs) {
  constexpr int N = kVecWidth<T>, kValues = (kCentered ? 2 : 1) * kRingRows, kWarps = kRingThreads / 32;
  using V = Vec<T, N>;
  extern __shared__ int4 parameters[];  // of CutParameters, then rings
  __shared__ WarpSums<N> shared[2][kValues * kWarps];
  __shared__ uint64_t barriers[kWarps * kRingStages];
  const LooseGroup group{{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)}};
  const int64_t first = blockIdx.x % N;
  if (first >= params.rows) return;
  const int cols = static_cast<int>(params.cols);
  const Cover<T, 1, 1> cover(Row<T>(params, first).x, cols, group);
  const CutParameters<T, kCentered> cut(parameters, group, vectors);
  RowRing<T, kRingRows, kRingStages> ring(parameters + cut.size(vectors * group.threads), barriers, row_vectors, group);
  // Rows of the group: begin, begin + step, ... The groups of a block have rows far apart, so that all blocks have as
  // many of the last ones.
  const int64_t begin = first + (group.index * static_cast<int64_t>(gridDim.x / N) + blockIdx.x / N) * N;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t policy = l2_policy(keep_inputs);
  const auto row_of = [&](int64_t index) { return static_cast<const T*>(params.x) + index * params.x_stride; };
  // Whether all vectors of a row lie in the tensor, so that it is copied.
  const auto is_inner = [&](int64_t index) { return index > 0 && index + 1 < params.rows && params.x_stride >= N; };
  const auto fill = [&](int64_t index) {
    if (group.rank > 0 || index >= params.rows) return;
    ring.fill([&](int i, uint32_t to, uint32_t barrier) -> uint32_t {
      const int64_t row = index + i * step;
      if (!is_inner(row)) return 0;
      const uint32_t bytes = (cols + cover.shift + N - 1) / N * sizeof(int4);
      bulk_load(to, row_of(row) - cover.shift, bytes, barrier, policy);
      return bytes;
    });
  };
  for (int stage = 0; stage < kRingStages; ++stage, ring.next()) fill(begin + stage * kRingRows * step);
  if (group.index == 0) cut.put(params, cover);
  __syncthreads();
  const float eps = static_cast<float>(params.options.eps);
  const Scale scale(params);
  // Calls visit(v, is_end) for each vector of the thread that a lane of its warp has.
  const auto for_each = [&](const auto& visit) {
    visit(0, std::true_type{});
#pragma unroll 2
    for (int v = 1; v + 1 < vectors; ++v) visit(v, std::false_type{});
    if (vectors > 1 && cover.warp_has(vectors - 1)) visit(vectors - 1, std::true_type{});
  };
  int parity = 0;
  for (int64_t index = begin; index < params.rows; index += kRingRows * step) {
    ring.wait();
    T* elements[kRingRows];
#pragma unroll 1
    for (int i = 0; i < kRingRows; ++i) {  // those that are not copied
      const int64_t row = index + i * step;
      if (is_inner(row) || row >= params.rows) continue;
      for (int v = 0; v < vectors; ++v) {
        if (!cover.exists(v)) continue;
        load_aligned(row_of(row), cover.column(v), 0, cols)
            .assign_to(reinterpret_cast<T*>(ring.row(i) + group.rank + v * group.threads));
      }
      ring.fence();
      group_barrier(group);
    }
#pragma unroll
    for (int i = 0; i < kRingRows; ++i) elements[i] = reinterpret_cast<T*>(ring.row(i));
    const auto load = [&](int i, int v, auto is_end) {
      V s{};
      if (!decltype(is_end)::value || cover.exists(v)) s = V::load(elements[i] + (group.rank + v * group.threads) * N);
      forget_floats(s);
      return s;
    };
    float sums[kValues];
    const auto sums_of = [&](const float(&number)[kRingRows], int buffer) {
      float of_elements[kValues][N] = {};
      for_each([&](int v, auto is_end) {
#pragma unroll
        for (int i = 0; i < kRingRows; ++i) {
          const V s = load(i, v, is_end);
          float d[N];
#pragma unroll
          for (int k = 0; k < N; ++k) d[k] = kCentered ? s[k] - number[i] : s[k];
          if constexpr (decltype(is_end)::value) cover.clear(d, v, 0.f);
#pragma unroll
          for (int k = 0; k < N; ++k) {
            of_elements[i][k] = fmaf(d[k], d[k], of_elements[i][k]);
            if constexpr (kCentered) of_elements[kRingRows + i][k] += d[k];
          }
        }
      });
      sum_covering(of_elements, cover.shift, sums, group, shared[buffer]);
    };
    float number[kRingRows] = {};
    if constexpr (kCentered) {
#pragma unroll
      for (int i = 0; i < kRingRows; ++i) {
        number[i] = number_near<T>(Vec<T, 1>::load(elements[i] + cover.shift + threadIdx.x % 32));
      }
      if constexpr (sizeof(T) == 4) {
        sums_of(number, 0);
#pragma unroll
        for (int i = 0; i < kRingRows; ++i) number[i] = fmaf(sums[kRingRows + i], inverse_cols, number[i]);
        parity = 1;
      }
    }
    sums_of(number, parity);
    parity ^= 1;
    RowScale of_row[kRingRows];
#pragma unroll
    for (int i = 0; i < kRingRows; ++i) {
      if constexpr (kCentered) {
        of_row[i] = scale_of_sums(number[i], sums[kRingRows + i], sums[i], inverse_cols, eps);
      } else {
        of_row[i] = {0.f, rsqrtf(fmaf(sums[i], inverse_cols, eps))};
      }
    }
    for_each([&](int v, auto is_end) {
      const auto of_vector = cut.load(v);
#pragma unroll
      for (int i = 0; i < kRingRows; ++i) {
        const int64_t row = index + i * step;
        if (row >= params.rows) continue;
        const V y = of_vector.output(load(i, v, is_end), of_row[i], scale);
        T* const target = static_cast<T*>(params.y) + row * cols;
        if constexpr (kAlike && !decltype(is_end)::value) {
          y.store(target + cover.column(v));
        } else {
          store_covering<kAlike>(cover, y, target, v);
        }
      }
    });
    group_barrier(group);  // all have read the rows
    fill(index + kRingStages * kRingRows * step);
    ring.next();
  }
}

struct ForwardRingPlan {
  CoverPlan plan;  // no vectors: not for rows of this length
  int row_vectors;
  LaunchShape shape;
};

// As many groups as fit an SM, but no more than it takes to be done after as many turns. The grid is persistent. Few
// rows are left to forward_cover.cuh, which has the same bits.
template <typename T, bool kCentered>
ForwardRingPlan plan_forward_ring(const NormParams& params, const DeviceInfo& device) {
  constexpr int N = kVecWidth<T>;
  constexpr size_t kReductions = 2 * (kCentered ? 2 : 1) * kRingRows * sizeof(WarpSums<N>) * (kRingThreads / 32) + 2048;
  ForwardRingPlan result{
      plan_cover(params.cols, sizeof(T), kForwardCoverVectors, forward_cover_threads(Sum::kNone), 1, 1), {}, {}};
  CoverPlan& plan = result.plan;
  result.row_vectors = static_cast<int>(covering_vectors(params.cols, N));
  const size_t parameters = sizeof(int4) * CutParameters<T, kCentered>::size(plan.vectors * plan.threads) + kReductions;
  const size_t ring = sizeof(int4) * kRingStages * kRingRows * result.row_vectors;
  if (plan.vectors == 0 || device.compute_capability < 90 || parameters + ring > device.shared_bytes) {
    return plan.vectors = 0, result;
  }
  const int64_t most_blocks = std::max(device.sm_count / N, 1) * N, fit = (device.shared_bytes - parameters) / ring;
  const int64_t groups =
      std::min<int64_t>({fit, kRingThreads / plan.threads, plan.threads == 32 ? 32 : kMostRingGroups});
  const int64_t rows_per_block = (params.rows + most_blocks - 1) / most_blocks;  // in all
  if (rows_per_block < 2 * kRingRows) return plan.vectors = 0, result;
  const int64_t of_turn = groups * kRingRows, turns = (rows_per_block + of_turn - 1) / of_turn;
  plan.rows_per_block = static_cast<int>((rows_per_block + turns * kRingRows - 1) / (turns * kRingRows));
  // More than half of an SM's memory, so that two blocks cannot pile up on one that is free early.
  result.shape = {most_blocks, dim3(plan.threads, plan.rows_per_block),
                  std::max(parameters - kReductions + plan.rows_per_block * ring, device.shared_bytes / 2 + 1024)};
  return result;
}

}  // namespace llmk::kernels::norm
