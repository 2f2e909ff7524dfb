// Linear for one token: linear.cu's formulas with m = 1, by dot products.
//
// The columns of y are dealt out evenly to the blocks, a column being a row of W, or for SwiGLU one of the gate and one
// of the up projection; the columns of x to the warps of a block. A warp keeps its part of x in registers. Its part of
// W comes by a ring of its own in shared memory, a few rows at a time, each contiguous in memory; the first ones, if
// the weights are settled (see linear.cu), before the kernel in front of this one has ended. So no warp waits for
// another, and all have the same to do whatever the number of rows is, until the sums of the warps are added up, in a
// fixed order. The norm's weight is multiplied into x, in float16 but for a power of two; 1 / rms joins at the end.
#include "gemv.h"

#include <algorithm>

#include "device/reduce.cuh"
#include "device/swiglu.cuh"
#include "device/tma.cuh"
#include "device/vec.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {
namespace {

constexpr int kMostSlots = 8;  // of a warp
// Of shared memory, in bytes: a barrier per slot; a sum of squares per warp.
constexpr int kSquares = 8 * kGemvWarps * kMostSlots, kHeaderBytes = 768;
static_assert(kSquares + 4 * kGemvWarps <= kHeaderBytes);

constexpr int kSlotVectors = 10;  // of eight elements of W, that a lane finds in a slot at most: 5 KiB

struct Arguments {
  const void *x, *norm_weight, *weight, *bias;
  void* y;
  bool add, swiglu, fold, norm_offset, settled;
  int k;
  int share, rest;    // columns of y for each block; how many blocks have one more
  int slots;          // of a warp
  int pitch;          // floats between the sums of two warps
  int ring;           // where it begins in shared memory
  int64_t second;     // rows from the gate to the up projection
  int64_t row_bytes;  // between rows
  float eps;
};

// sum += the dot product of eight elements; even and odd ones apart, for two shorter chains.
template <typename T>
__device__ inline void dot(float (&sum)[2], const Vec<T, 8>& w, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    sum[0] = fmaf(w[i], x[i], sum[0]);
    sum[1] = fmaf(w[i + 1], x[i + 1], sum[1]);
  }
}

// What a column of y takes from memory beside its sums.
template <typename T>
struct Addends {
  T bias, before;

  __device__ Addends(const Arguments& a, int column) {
    if (a.bias) bias = static_cast<const T*>(a.bias)[column];
    if (a.add) before = static_cast<const T*>(a.y)[column];
  }
};

template <typename T, int kVectors>
__global__ void __launch_bounds__(32 * kGemvWarps, kVectors > 4 ? 1 : 2)
    gemv_kernel(const __grid_constant__ Arguments a) {
#if __CUDA_ARCH__ >= 900
  using V = Vec<T, 8>;
  constexpr int kRows = kSlotVectors / kVectors, kPieceBytes = kVectors * 512, kSlotBytes = kRows * kPieceBytes;
  extern __shared__ __align__(128) unsigned char shared[];
  float* const squares = reinterpret_cast<float*>(shared + kSquares);
  float* const sums = reinterpret_cast<float*>(shared + kHeaderBytes);
  const int warps = static_cast<int>(blockDim.x) / 32, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // which tells the compiler: the same for all lanes
  const int block = static_cast<int>(blockIdx.x), begin = block * a.share + min(block, a.rest);
  const int columns = a.share + (block < a.rest), rows = a.swiglu ? 2 * columns : columns;
  const int first = warp * kVectors * 256;  // of this warp's columns of x
  const int piece_bytes = min(kPieceBytes, 2 * (a.k - first));
  unsigned char* const ring = shared + a.ring + warp * a.slots * kSlotBytes;
  const uint32_t full = shared_address(shared) + 8 * warp * a.slots;

  // Requests this warp's pieces of the block's next rows: all of the gate, then all of the up projection.
  const char* const gate = static_cast<const char*>(a.weight) + begin * a.row_bytes + 2 * first;
  const char* const up = gate + (a.second - columns) * a.row_bytes;
  int next = 0;
  const auto request = [&](int slot) {
    const int count = min(kRows, rows - next);
    if (count > 0 && elect()) {
      const uint32_t barrier = full + 8 * slot, to = shared_address(ring) + slot * kSlotBytes;
      barrier_arrive_expecting(barrier, count * piece_bytes);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int row = next + i;
        bulk_load(to + i * kPieceBytes, (row < columns ? gate : up) + row * a.row_bytes, piece_bytes, barrier,
                  kEvictFirst);
      }
    }
    next += kRows;
  };
  if (lane < a.slots) barrier_init(full + 8 * lane, 1);
  barrier_init_fence();
  __syncwarp();
  if (!a.settled) pdl_wait();
#pragma unroll 1
  for (int slot = 0; slot < a.slots; ++slot) request(slot);
  // At once: later, blocks of the next kernel would crowd onto the SMs that are done first.
  pdl_launch_dependents();
  // Where K ends within a piece, x is zero; so is what no copy fills, or it might be no number.
#pragma unroll 1
  for (int at = piece_bytes + 16 * lane; at < kPieceBytes; at += 512) {
#pragma unroll 1
    for (int row = 0; row < a.slots * kRows; ++row) *reinterpret_cast<uint4*>(ring + row * kPieceBytes + at) = {};
  }
  __syncwarp();

  V x[kVectors], norm_weight[kVectors];
  const auto load_all = [&](V(&vectors)[kVectors], const void* from) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = first + v * 256 + lane * 8;
      vectors[v] = column < a.k ? V::load(static_cast<const T*>(from) + column) : V::of([](int) { return 0.f; });
    }
  };
  if (a.fold) load_all(norm_weight, a.norm_weight);
  pdl_wait();
  load_all(x, a.x);
  Addends<T> addends(a, begin + min(static_cast<int>(threadIdx.x), columns - 1));  // long before they are needed
  float taken_out = 1.f;  // a power of two, of what this warp has of x
  if (a.fold) {
    float sum[1] = {0.f};
    const float offset = a.norm_offset ? 1.f : 0.f;
    const auto product = [&](int v, int e) { return x[v][e] * (offset + norm_weight[v][e]); };
    float factor = 1.f;
    if constexpr (std::is_same_v<T, __half>) {  // which might not hold the products
      uint32_t largest = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = max(largest, __float_as_uint(fabsf(product(v, e))));
      }
      const int exponent = static_cast<int>(__reduce_max_sync(0xffffffffu, largest) >> 23);
      taken_out = __uint_as_float(min(max(exponent, 1), 250) << 23);
      factor = 1.f / taken_out;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[0] += x[v][e] * x[v][e];
      x[v] = V::of([&](int e) { return product(v, e) * factor; });
    }
    warp_sum(sum, 32);
    if (lane == 0) squares[warp] = sum[0];
  }

  int slot = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int row = 0; row < rows; row += kRows) {
    float products[kRows][2] = {}, sum[kRows];
    barrier_wait(full + 8 * slot, phase);
    const V* const w = reinterpret_cast<const V*>(ring + slot * kSlotBytes) + lane;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float wide[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) wide[e] = x[v][e];
#pragma unroll
      for (int r = 0; r < kRows; ++r) dot(products[r], V::load(w[(r * kVectors + v) * 32].data), wide);
    }
    __syncwarp();  // all have read it
    request(slot);
    if (++slot == a.slots) slot = 0, phase ^= 1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = products[r][0] + products[r][1];
    warp_sum(sum, 32);
    float mine = 0.f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) mine = lane == r ? sum[r] : mine;
    if (lane < min(kRows, rows - row)) sums[warp * a.pitch + row + lane] = mine * taken_out;
  }
  __syncthreads();

  const auto add_up = [&](const float* from, int pitch) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kGemvWarps; ++i) {
      if (i < warps) total += from[i * pitch];
    }
    return total;
  };
  const float rstd = a.fold ? rsqrtf(add_up(squares, 1) * (1.f / static_cast<float>(a.k)) + a.eps) : 1.f;
#pragma unroll 1
  for (int i = threadIdx.x; i < columns; i += static_cast<int>(blockDim.x)) {
    if (i >= static_cast<int>(blockDim.x)) addends = Addends<T>(a, begin + i);
    const float sum = add_up(sums + i, a.pitch) * rstd;
    T result;
    if (a.swiglu) {
      result = from_float<T>(swiglu<T>(sum, add_up(sums + columns + i, a.pitch) * rstd));
    } else {
      result = from_float<T>(a.bias ? sum + to_float(addends.bias) : sum);
      if (a.add) result = from_float<T>(to_float(addends.before) + to_float(result));
    }
    static_cast<T*>(a.y)[begin + i] = result;
  }
#endif
}

}  // namespace

cudaError_t gemv(const LinearParams& p, Dtype dtype, cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const auto divide_up = [](int a, int b) { return (a + b - 1) / b; };
  const bool swiglu = p.epilogue == LinearEpilogue::kSwiglu;
  const int k = static_cast<int>(p.k), out = static_cast<int>(swiglu ? p.n / 2 : p.n);
  const int blocks = std::min(device.sm_count, out), rows = divide_up(out, blocks) * (swiglu ? 2 : 1);
  int vectors = 1;
  while (k > vectors * 256 * kGemvWarps) vectors *= 2;
  const int warps = divide_up(k, vectors * 256), slot_rows = kSlotVectors / vectors;
  const int slot_bytes = warps * slot_rows * vectors * 512;
  const int ring = (kHeaderBytes + warps * rows * 4 + 127) / 128 * 128;
  // Two blocks fit an SM where it has few weights to read. With more, a deep ring is worth more than an early start.
  const bool few = int64_t{rows} * k * 2 <= 150 * 1024;
  const int room = few ? 112 * 1024 - ring : 144 * 1024;
  const int slots = std::min({room / slot_bytes, divide_up(rows, slot_rows), kMostSlots});
  const Arguments arguments{p.x,
                            p.norm_weight,
                            p.weight,
                            p.bias,
                            p.residual ? p.residual : p.y,
                            p.residual != nullptr,
                            swiglu,
                            p.normalize,
                            p.norm.weight_offset != 0,
                            p.settled,
                            k,
                            out / blocks,
                            out % blocks,
                            slots,
                            rows,
                            ring,
                            out,
                            p.weight_stride * 2,
                            static_cast<float>(p.norm.eps)};
  const LaunchShape shape{blocks, dim3(32 * warps),
                          static_cast<size_t>(ring) + static_cast<size_t>(slots) * slot_bytes};
  const auto launch_as = [&](auto tag) {
    using T = typename decltype(tag)::type;
    return dispatch_int<1, 2, 4, 8>(
        vectors, [&](auto count) { return launch(gemv_kernel<T, decltype(count)::value>, shape, stream, arguments); });
  };
  return dtype == Dtype::kFloat16 ? launch_as(TypeTag<__half>{}) : launch_as(TypeTag<__nv_bfloat16>{});
}

}  // namespace llmk::kernels
