// A list of tensors as one launch: a table in the kernel's parameters has each tensor's pointers and size, and a block
// processes one chunk of one tensor.
//
//   tensor         0               1       2
//   elements   [-------------]  [----]  [--------]
//   chunks      0   1   2   3    4  5    6  7  8      chunk c is block c, first_block = {0, 4, 6}
//
// A table of many tensors takes almost all of the 32,764 bytes that parameters may have from CUDA 12.1 on; that of a
// few fits the 4 KiB that are always there, and costs the host less per launch. Longer lists take several launches.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "device/vec.cuh"
#include "kernels/launch.h"

namespace llmk::kernels {

constexpr int kListThreads = 256;
constexpr size_t kFewBytes = 4096, kManyBytes = CUDART_VERSION >= 12010 ? 32764 : kFewBytes;

// Which tensor this block belongs to: the last one whose first block is not behind it. Tensors without elements have no
// block, and the same first block as the one that follows.
template <int kTensors>
__device__ int tensor_of_block(const int (&first_block)[kTensors], int count) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_block[middle] <= static_cast<int>(blockIdx.x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The elements of one tensor that this block processes.
struct Chunk {
  int64_t begin, end;
};

__device__ inline Chunk chunk_of_block(int first_block, int64_t chunk, int64_t size) {
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) - first_block) * chunk;
  return {begin, begin + chunk < size ? begin + chunk : size};
}

// N neighbouring elements in registers, of a type that may take two accesses of 16 bytes. They are kept as words: kept
// as elements over the iterations of a loop, those of 16 bits would take a register each.
template <typename T, int N>
struct Elements {
  static constexpr int kWidth = N < kVecWidth<T> ? N : kVecWidth<T>;
  using V = Vec<T, kWidth>;
  typename V::Raw words[N / kWidth];

  __device__ float operator[](int i) const {
    V part;
    *reinterpret_cast<typename V::Raw*>(&part) = words[i / kWidth];
    return part[i % kWidth];
  }

  __device__ void load(const T* source) {
#pragma unroll
    for (int i = 0; i < N / kWidth; ++i) {
      words[i] = *reinterpret_cast<const typename V::Raw*>(source + i * kWidth);
    }
  }
  __device__ static void store(const float (&values)[N], T* target) {
#pragma unroll
    for (int i = 0; i < N / kWidth; ++i) {
      V::of([&](int j) { return values[i * kWidth + j]; }).store(target + i * kWidth);
    }
  }
};

// The first element of the chunk that vectors of N do not reach; `aligned`: whether there are vectors.
template <int N>
__device__ int64_t end_of_vectors(const Chunk& chunk, bool aligned) {
  return aligned ? chunk.end - (chunk.end - chunk.begin) % N : chunk.begin;
}

// Elements per block: a power of two, so that the list has up to kListBlocks blocks; larger lists have more blocks of
// kMaxChunk elements. It depends on the sizes alone, and so does the order of sums.
constexpr int64_t kMinChunk = 1024, kMaxChunk = 16384, kListBlocks = 8192;

template <typename Tensors>
int64_t chunk_for(const Tensors* tensors, int64_t count) {
  int64_t total = 0, chunk = kMinChunk;
  for (int64_t i = 0; i < count; ++i) total += tensors[i].size;
  while (chunk < kMaxChunk && total / chunk > kListBlocks) chunk *= 2;
  return chunk;
}

inline int64_t chunks(int64_t size, int64_t chunk) { return (size + chunk - 1) / chunk; }

// Whether the driver takes parameters of kManyBytes.
inline bool takes_many_bytes() {
  static const bool takes = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  return takes;
}

// Calls body(table, first, end, blocks) for launches of tensors [first, end); set(table, i, tensor) fills entry i of a
// table. Few and Many are the two kinds of tables.
template <typename Few, typename Many, typename Tensors, typename Set, typename Body>
cudaError_t for_tables(const Tensors* tensors, int64_t count, int64_t chunk, const Set& set, const Body& body) {
  const auto fill_and_run = [&](auto table, int64_t first) -> std::pair<cudaError_t, int64_t> {
    constexpr int64_t kTensors = decltype(table)::kTensors;
    int64_t blocks = 0, i = first;
    for (; i < count && i - first < kTensors; ++i) {
      const int64_t more = chunks(tensors[i].size, chunk);
      if (i > first && blocks + more > 0x7fffffff) break;
      table.first_block[i - first] = static_cast<int>(blocks);
      table.size[i - first] = tensors[i].size;
      set(table, static_cast<int>(i - first), tensors[i]);
      blocks += more;
    }
    return {body(table, first, i, blocks), i};
  };
  for (int64_t first = 0; first < count;) {
    const auto [status, end] =
        count - first > Few::kTensors && takes_many_bytes() ? fill_and_run(Many{}, first) : fill_and_run(Few{}, first);
    if (status != cudaSuccess) return status;
    first = end;
  }
  return cudaSuccess;
}

}  // namespace llmk::kernels
