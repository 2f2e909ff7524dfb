// Low-rank adapters beside a product, of few rows, as decode steps have them, or of a prompt:
//
//   down   sums[row, r] = scaling (x A^T)[row, r]      a block: the dot products of some rows with some ranks
//   up     y[row, begin + n] += (sums B^T)[row, n]     a thread: a column of y in some rows
//
// Up to eight adapters of one product (q, k and v; gate and up) share the two launches: the blocks of the first adapter
// come first. All sums are in float32, in an order that depends on the shapes alone, and y is rounded once. A and B may
// be float32 beside activations of 16 bits, as PEFT has them; B is read once per kUpRows rows.
#include "lora.h"

#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kUpThreads = 128, kUpRows = 8;

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

// How a launch of down is cut: rows and ranks of a block, which are its sums, and its threads. Larger tiles read less,
// x once per kRanks and A once per kRows; smaller ones reach more SMs.
template <int kTileRows, int kTileRanks, int kTileThreads>
struct Tile {
  static constexpr int kRows = kTileRows, kRanks = kTileRanks, kThreads = kTileThreads;
};
using OneSum = Tile<1, 1, 256>;   // for up to 2 rows
using FewRows = Tile<8, 4, 256>;  // up to 64
using ManyRows = Tile<16, 8, 64>;

// T: of x; F: of A; N: elements of a vector. Rows and ranks behind the last are those of the last, and not stored.
template <typename T, typename F, int N, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) lora_down_kernel(const LoraAdapters p, int64_t parts) {
  constexpr int kRows = Tile::kRows, kRanks = Tile::kRanks, kValues = kRows * kRanks, kWarps = Tile::kThreads / 32;
  __shared__ float partial[kWarps][kValues];
  pdl_launch_dependents();
  pdl_wait();
  const auto size_of = [](const LoraAdapter& adapter) { return tiles(adapter.rank, kRanks); };
  const Part part = part_of(p, blockIdx.x % parts, size_of);
  const LoraAdapter& adapter = p.adapters[part.adapter];
  const int64_t first_rank = part.index * kRanks, first_row = blockIdx.x / parts * kRows;
  const T* x[kRows];
  const F* a[kRanks];
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    x[m] = static_cast<const T*>(p.x) + min(first_row + m, p.rows - 1) * p.x_stride;
  }
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    a[r] = static_cast<const F*>(adapter.a) + min(first_rank + r, adapter.rank - 1) * p.k;
  }
  float sums[kValues] = {};
  for (int64_t col = threadIdx.x * N; col < p.k; col += Tile::kThreads * N) {
    Vec<F, N> factors[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) factors[r] = Vec<F, N>::load(a[r] + col);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const Vec<T, N> values = Vec<T, N>::load(x[m] + col);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[m * kRanks + r] = fmaf(values[i], factors[r][i], sums[m * kRanks + r]);
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
  const int64_t ranks = ranks_of_all(p);
  for (int i = threadIdx.x; i < kValues; i += Tile::kThreads) {
    const int64_t row = first_row + i / kRanks, rank = first_rank + i % kRanks;
    if (row >= p.rows || rank >= adapter.rank) continue;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][i];
    p.sums[row * ranks + part.ranks_before + rank] = static_cast<float>(adapter.scaling) * sum;
  }
}

// F: of B; N: elements of a vector of its rows.
template <typename T, typename F, int N>
__global__ void __launch_bounds__(kUpThreads) lora_up_kernel(const LoraAdapters p, int64_t parts) {
  pdl_launch_dependents();
  pdl_wait();
  const auto size_of = [](const LoraAdapter& adapter) { return tiles(adapter.n, kUpThreads); };
  const Part part = part_of(p, blockIdx.x % parts, size_of);
  const LoraAdapter& adapter = p.adapters[part.adapter];
  const int64_t n = part.index * kUpThreads + threadIdx.x, first_row = blockIdx.x / parts * kUpRows;
  if (n >= adapter.n) return;
  const int rows = static_cast<int>(min(int64_t{kUpRows}, p.rows - first_row));
  const int64_t ranks = ranks_of_all(p);
  const F* const b = static_cast<const F*>(adapter.b) + n * adapter.rank;
  const float* const sums = p.sums + first_row * ranks + part.ranks_before;
  constexpr int kSums = N == 1 ? 1 : 4;  // of a vector: with N > 1 all ranks are multiples of N
  float added[kUpRows] = {};
  for (int64_t r = 0; r < adapter.rank; r += N) {
    const Vec<F, N> factors = Vec<F, N>::load(b + r);
#pragma unroll
    for (int m = 0; m < kUpRows; ++m) {
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
  for (int m = 0; m < kUpRows; ++m) {
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
  const auto run_down = [&](auto tile) {
    using Tile = decltype(tile);
    const auto down = down_by_vectors ? lora_down_kernel<T, F, kWide, Tile> : lora_down_kernel<T, F, 1, Tile>;
    const int64_t of_ranks = parts(p, [](const LoraAdapter& adapter) { return tiles(adapter.rank, Tile::kRanks); });
    const LaunchShape shape{of_ranks * tiles(p.rows, Tile::kRows), dim3(Tile::kThreads)};
    return launch(down, shape, stream, p, of_ranks);
  };
  const cudaError_t status = p.rows <= 2    ? run_down(OneSum{})
                             : p.rows <= 64 ? run_down(FewRows{})
                                            : run_down(ManyRows{});
  if (status != cudaSuccess) return status;
  const auto up = up_by_vectors ? lora_up_kernel<T, F, kWide> : lora_up_kernel<T, F, 1>;
  const int64_t of_columns = parts(p, [&](const LoraAdapter& adapter) { return tiles(adapter.n, kUpThreads); });
  const LaunchShape up_shape{of_columns * tiles(p.rows, kUpRows), dim3(kUpThreads)};
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
