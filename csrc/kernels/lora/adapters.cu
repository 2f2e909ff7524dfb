// Low-rank adapters beside a product of few rows, as decode steps have them:
//
//   down   sums[row, r] = scaling (x A^T)[row, r]      a block: the dot products of some rows with some ranks
//   up     y[row, begin + n] += (sums B^T)[row, n]     a thread: a column of y in some rows
//
// Up to eight adapters of one product (q, k and v; gate and up) share the two launches: the blocks of the first adapter
// come first. All sums are in float32, in an order that depends on the shapes alone, and y is rounded once. A and B may
// be float32 beside activations of 16 bits, as PEFT has them; they are read once per kRows rows.
#include "lora.h"

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kDownThreads = 256, kUpThreads = 128;
constexpr int kRows = 8;   // of a block, where there are many
constexpr int kRanks = 4;  // of a block of kRows rows

// Which adapter a block works for, and on which part of it.
struct Part {
  int adapter;
  int64_t index, ranks_before;
};

// `size_of(adapter)`: how many parts it has.
template <typename SizeOf>
__device__ Part part_of(const LoraAdapters& p, int64_t block, const SizeOf& size_of) {
  Part part{0, block, 0};
  for (; part.adapter + 1 < p.count; ++part.adapter) {
    const LoraAdapter& adapter = p.adapters[part.adapter];
    const int64_t size = size_of(adapter);
    if (part.index < size) break;
    part.index -= size;
    part.ranks_before += adapter.rank;
  }
  return part;
}

template <typename SizeOf>
int64_t parts(const LoraAdapters& p, const SizeOf& size_of) {
  int64_t count = 0;
  for (int i = 0; i < p.count; ++i) count += size_of(p.adapters[i]);
  return count;
}

__host__ __device__ int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

__host__ __device__ int64_t ranks_of_all(const LoraAdapters& p) {
  int64_t ranks = 0;
  for (int i = 0; i < p.count; ++i) ranks += p.adapters[i].rank;
  return ranks;
}

// T: of x; F: of A; N: elements of a vector. Rows and ranks behind the last are those of the last, and not stored.
template <typename T, typename F, int N, int kTileRows, int kTileRanks>
__global__ void __launch_bounds__(kDownThreads) down_kernel(const LoraAdapters p, int64_t parts) {
  constexpr int kValues = kTileRows * kTileRanks, kWarps = kDownThreads / 32;
  __shared__ float partial[kWarps][kValues];
  pdl_launch_dependents();
  pdl_wait();
  const auto size_of = [](const LoraAdapter& adapter) { return tiles(adapter.rank, kTileRanks); };
  const Part part = part_of(p, blockIdx.x % parts, size_of);
  const LoraAdapter& adapter = p.adapters[part.adapter];
  const int64_t first_rank = part.index * kTileRanks, first_row = blockIdx.x / parts * kTileRows;
  const T* x[kTileRows];
  const F* a[kTileRanks];
#pragma unroll
  for (int m = 0; m < kTileRows; ++m) {
    x[m] = static_cast<const T*>(p.x) + min(first_row + m, p.rows - 1) * p.x_stride;
  }
#pragma unroll
  for (int r = 0; r < kTileRanks; ++r) {
    a[r] = static_cast<const F*>(adapter.a) + min(first_rank + r, adapter.rank - 1) * p.k;
  }
  float sums[kValues] = {};
  for (int64_t col = threadIdx.x * N; col < p.k; col += kDownThreads * N) {
    Vec<F, N> factors[kTileRanks];
#pragma unroll
    for (int r = 0; r < kTileRanks; ++r) factors[r] = Vec<F, N>::load(a[r] + col);
#pragma unroll
    for (int m = 0; m < kTileRows; ++m) {
      const Vec<T, N> values = Vec<T, N>::load(x[m] + col);
#pragma unroll
      for (int r = 0; r < kTileRanks; ++r) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[m * kTileRanks + r] = fmaf(values[i], factors[r][i], sums[m * kTileRanks + r]);
        }
      }
    }
  }
  warp_sum(sums, 32);
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) partial[threadIdx.x / 32][i] = sums[i];
  }
  __syncthreads();
  if (threadIdx.x >= kValues) return;
  const int64_t row = first_row + threadIdx.x / kTileRanks, rank = first_rank + threadIdx.x % kTileRanks;
  if (row >= p.rows || rank >= adapter.rank) return;
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][threadIdx.x];
  p.sums[row * ranks_of_all(p) + part.ranks_before + rank] = static_cast<float>(adapter.scaling) * sum;
}

// F: of B; N: elements of a vector of its rows.
template <typename T, typename F, int N>
__global__ void __launch_bounds__(kUpThreads) up_kernel(const LoraAdapters p, int64_t parts) {
  pdl_launch_dependents();
  pdl_wait();
  const auto size_of = [](const LoraAdapter& adapter) { return tiles(adapter.n, kUpThreads); };
  const Part part = part_of(p, blockIdx.x % parts, size_of);
  const LoraAdapter& adapter = p.adapters[part.adapter];
  const int64_t n = part.index * kUpThreads + threadIdx.x, first_row = blockIdx.x / parts * kRows;
  if (n >= adapter.n) return;
  const int rows = static_cast<int>(min(int64_t{kRows}, p.rows - first_row));
  const int64_t ranks = ranks_of_all(p);
  const F* const b = static_cast<const F*>(adapter.b) + n * adapter.rank;
  const float* const sums = p.sums + first_row * ranks + part.ranks_before;
  constexpr int kSums = N == 1 ? 1 : 4;  // of a vector: with N > 1 all ranks are multiples of N
  float added[kRows] = {};
  for (int64_t r = 0; r < adapter.rank; r += N) {
    const Vec<F, N> factors = Vec<F, N>::load(b + r);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
#pragma unroll
      for (int i = 0; i < N; i += kSums) {
        const auto values = Vec<float, kSums>::load(sums + m * ranks + r + i);
#pragma unroll
        for (int j = 0; j < kSums; ++j) added[m] = fmaf(values[j], factors[i + j], added[m]);
      }
    }
  }
  T* const y = static_cast<T*>(p.y) + first_row * p.y_stride + adapter.begin + n;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    if (m < rows) y[m * p.y_stride] = from_float<T>(to_float(y[m * p.y_stride]) + added[m]);
  }
}

template <typename T, typename F>
cudaError_t run(const LoraAdapters& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(F);
  bool down_by_vectors = rows_aligned(p.x, p.x_stride, p.rows, sizeof(T)) && p.k % kWide == 0, up_by_vectors = true;
  for (int i = 0; i < p.count; ++i) {
    const LoraAdapter& adapter = p.adapters[i];
    down_by_vectors = down_by_vectors && rows_aligned(adapter.a, p.k, adapter.rank, sizeof(F));
    up_by_vectors =
        up_by_vectors && adapter.rank % kWide == 0 && rows_aligned(adapter.b, adapter.rank, adapter.n, sizeof(F));
  }
  const bool few = p.rows <= 2;
  const int tile_rows = few ? 1 : kRows, tile_ranks = few ? 1 : kRanks;
  const auto down =
      few ? (down_by_vectors ? down_kernel<T, F, kWide, 1, 1> : down_kernel<T, F, 1, 1, 1>)
          : (down_by_vectors ? down_kernel<T, F, kWide, kRows, kRanks> : down_kernel<T, F, 1, kRows, kRanks>);
  const int64_t of_ranks = parts(p, [&](const LoraAdapter& adapter) { return tiles(adapter.rank, tile_ranks); });
  const LaunchShape down_shape{of_ranks * tiles(p.rows, tile_rows), dim3(kDownThreads)};
  if (const cudaError_t status = launch(down, down_shape, stream, p, of_ranks); status != cudaSuccess) return status;
  const auto up = up_by_vectors ? up_kernel<T, F, kWide> : up_kernel<T, F, 1>;
  const int64_t of_columns = parts(p, [&](const LoraAdapter& adapter) { return tiles(adapter.n, kUpThreads); });
  const LaunchShape up_shape{of_columns * tiles(p.rows, kRows), dim3(kUpThreads)};
  return launch(up, up_shape, stream, p, of_columns);
}

}  // namespace

cudaError_t lora_adapters(const LoraAdapters& params, Dtype dtype, cudaStream_t stream) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return params.factors == dtype ? run<T, T>(params, stream) : run<T, float>(params, stream);
  });
}

}  // namespace llmk::kernels
