// Tiles of 16-bit rows in shared memory, and their products by mma.sync, of attention over prompts. A warp has whole
// rows of a product: 16 kRowTiles of them. So the result of the first product is the first operand of the second one
// without leaving the registers.
#pragma once
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/vec.cuh"

namespace llmk::kernels::flash {

// Rows of kDim elements in shared memory, for a block of kThreads. The vectors of eight rows at the same column lie in
// different banks.
template <typename T, int kDim, int kThreads>
struct Rows {
  static constexpr int kChunks = kDim / 8;  // vectors of a row

  T* data;

  __device__ T* vector(int row, int chunk) const { return data + row * kDim + (chunk ^ (row & 7)) * 8; }
  __device__ uint32_t address(int row, int chunk) const { return shared_address(vector(row, chunk)); }

  // Begins to copy rows [first, first + count) of `source`; zeros for those outside of [begin, end).
  __device__ void copy(const T* source, int64_t stride, int head_dim, int first, int count, int begin, int end) const {
    copy_rows(source, head_dim, first, count, begin, end, [&](int row) { return source + row * stride; });
  }

  // The same, where row_at(row) is the address of a row, or null for zeros.
  template <typename RowAt>
  __device__ void copy_rows(const T* readable, int head_dim, int first, int count, int begin, int end,
                            const RowAt& row_at) const {
#pragma unroll
    for (int v = threadIdx.x; v < count * kChunks; v += kThreads) {
      const int row = v / kChunks, chunk = v % kChunks, of_source = first + row;
      const T* const source =
          of_source >= begin && of_source < end && chunk * 8 < head_dim ? row_at(of_source) : nullptr;
      cp_async_16_or_zero(address(row, chunk), source ? source + chunk * 8 : readable, source != nullptr);
    }
  }

  // Writes rows [first_row, first_row + count), by one warp, to the rows from first_row + `first` on of `target`, of
  // which there are `end`.
  __device__ void store(T* target, int64_t stride, int head_dim, int first, int first_row, int count, int end) const {
    for (int i = threadIdx.x % 32; i < count * kChunks; i += 32) {
      const int row = first_row + i / kChunks, chunk = i % kChunks;
      if (first + row < end && chunk * 8 < head_dim) {
        Vec<T, 8>::load(vector(row, chunk)).store(target + static_cast<int64_t>(first + row) * stride + chunk * 8);
      }
    }
  }
};

template <typename T>
__device__ uint32_t pack(float low, float high) {
  const auto pair = Pair<T>::from_floats(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <int kRowTiles, int kTiles>
__device__ void set_zero(float (&x)[kRowTiles][kTiles][4]) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) x[r][n][0] = x[r][n][1] = x[r][n][2] = x[r][n][3] = 0.f;
  }
}

// s = a b^T, of the warp's rows of a from `first_row` on and all 8 kTiles rows of b.
template <typename T, int kDim, int kThreads, int kRowTiles, int kTiles>
__device__ void multiply(float (&s)[kRowTiles][kTiles][4], const Rows<T, kDim, kThreads>& a_rows, int first_row,
                         const Rows<T, kDim, kThreads>& b_rows) {
  const int lane = threadIdx.x % 32;
  set_zero(s);
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      load_matrices(a[r], a_rows.address(first_row + r * 16 + lane % 16, 2 * d + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      uint32_t m[4];
      load_matrices(m, b_rows.address(n * 16 + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma_16x8x16<T>(s[r][2 * n], a[r], m[0], m[1]);
        mma_16x8x16<T>(s[r][2 * n + 1], a[r], m[2], m[3]);
      }
    }
  }
}

// sum += s b, of s rounded to T and all 8 kTiles rows of b.
template <typename T, int kDim, int kThreads, int kRowTiles, int kTiles>
__device__ void multiply_add(float (&sum)[kRowTiles][kDim / 8][4], const float (&s)[kRowTiles][kTiles][4],
                             const Rows<T, kDim, kThreads>& b_rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kTiles / 2; ++n) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      a[r][0] = pack<T>(s[r][2 * n][0], s[r][2 * n][1]);
      a[r][1] = pack<T>(s[r][2 * n][2], s[r][2 * n][3]);
      a[r][2] = pack<T>(s[r][2 * n + 1][0], s[r][2 * n + 1][1]);
      a[r][3] = pack<T>(s[r][2 * n + 1][2], s[r][2 * n + 1][3]);
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t m[4];
      load_matrices_transposed(m, b_rows.address(n * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma_16x8x16<T>(sum[r][2 * d], a[r], m[0], m[1]);
        mma_16x8x16<T>(sum[r][2 * d + 1], a[r], m[2], m[3]);
      }
    }
  }
}

}  // namespace llmk::kernels::flash
