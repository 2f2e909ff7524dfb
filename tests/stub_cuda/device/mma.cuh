// What csrc/device/mma.cuh does by tensor cores, lane by lane, for kernels that run on the CPU (gpu.h).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>

#include "device/ptx.cuh"

namespace llmk {

inline float mma_element(__half x) { return __half2float(x); }
inline float mma_element(__nv_bfloat16 x) { return __bfloat162float(x); }

// What each lane has.
template <typename Value>
std::array<Value, 32> of_all_lanes(Value mine) {
  std::array<Value, 32> all;
  const auto& brought = gpu::bring(mine);
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &brought[i], sizeof(Value));
  return all;
}

template <typename T>
void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Two {
    T of[2];
  };
  std::array<std::array<Two, 32>, 4> rows;
  for (int i = 0; i < 4; ++i) rows[i] = of_all_lanes(std::bit_cast<Two>(a[i]));
  const std::array<std::array<Two, 32>, 2> columns{of_all_lanes(std::bit_cast<Two>(b0)),
                                                   of_all_lanes(std::bit_cast<Two>(b1))};
  const int lane = gpu::fiber->lane;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, lower = i / 2, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2;
      c[i] += mma_element(rows[lower + k / 8 * 2][row * 4 + holder].of[k % 2]) *
              mma_element(columns[k / 8][column * 4 + holder].of[k % 2]);
    }
  }
}

// Elements 2 (l % 4) and the next of row l / 4 of an 8 x 8 matrix whose element is at(row, column); transposed: of
// column l / 4.
template <bool kTransposed, typename At>
uint32_t two_elements(const At& at) {
  const int line = gpu::fiber->lane / 4, first = gpu::fiber->lane % 4 * 2;
  const auto element = [&](int i) -> uint32_t { return kTransposed ? at(first + i, line) : at(line, first + i); };
  return element(0) | element(1) << 16;
}
template <bool kTransposed>
void load_four_matrices(uint32_t (&m)[4], uint32_t row) {
  const auto rows = of_all_lanes(row);
  for (int i = 0; i < 4; ++i) {
    m[i] = two_elements<kTransposed>([&](int r, int column) {
      return static_cast<const uint16_t*>(__cvta_shared_to_generic(rows[i * 8 + r]))[column];
    });
  }
  __syncwarp();
}
inline void load_matrices(uint32_t (&m)[4], uint32_t row) { load_four_matrices<false>(m, row); }
inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t row) { load_four_matrices<true>(m, row); }
inline uint32_t transpose_matrix(uint32_t m) {
  const auto all = of_all_lanes(m);
  return two_elements<true>(
      [&](int r, int column) -> uint16_t { return static_cast<uint16_t>(all[r * 4 + column / 2] >> column % 2 * 16); });
}

inline void cp_async_16_or_zero(uint32_t shared, const void* global, bool valid) {
  cp_async_16(__cvta_shared_to_generic(shared), global, valid ? 16 : 0, 0);
}

inline float exp2_approximate(float x) { return std::exp2(x); }

}  // namespace llmk
