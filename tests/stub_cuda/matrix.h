// Matrices of bfloat16 beside pages that no one may touch, and what is expected of them.
#pragma once
#include <random>

#include "cuda_bf16.h"
#include "gpu.h"

struct Matrix {
  gpu::Guarded memory;
  int64_t rows, cols, stride;

  Matrix(int64_t rows, int64_t cols, int64_t stride, bool at_end)
      : memory(((rows - 1) * stride + cols) * sizeof(__nv_bfloat16), at_end, sizeof(__nv_bfloat16)),
        rows(rows),
        cols(cols),
        stride(stride) {}

  void* data() const { return memory.data(); }
  __nv_bfloat16& operator()(int64_t r, int64_t c) { return static_cast<__nv_bfloat16*>(data())[r * stride + c]; }
  double value(int64_t r, int64_t c) { return __bfloat162float((*this)(r, c)); }
  // Random numbers, the same in each row that is_equal() if `equal`.
  void fill(bool equal = false) {
    static std::mt19937 random(0);
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < rows; ++r) {
      const bool is_copy = equal && r > 0 && is_equal(r);
      for (int64_t c = 0; c < cols; ++c) (*this)(r, c) = is_copy ? (*this)(0, c) : __float2bfloat16_rn(normal(random));
    }
  }
  // The others come before and after them.
  static bool is_equal(int64_t row) { return row % 5 != 1; }
};

inline int failures = 0;

// Whether `value` is within a rounding or two of what is expected, of numbers as large as `scale`.
inline void check(double value, double expected, double scale, const char* what, int64_t rows, int64_t cols) {
  if (std::fabs(value - expected) <= 0.01 * scale) return;
  std::printf("%s, %d x %d: %g instead of %g\n", what, static_cast<int>(rows), static_cast<int>(cols), value, expected);
  if (++failures > 20) gpu::fail();
}

// What lies between the rows of a result is as it was.
inline void check_gaps(Matrix& m, const char* what) {
  for (int64_t r = 0; r + 1 < m.rows; ++r) {
    for (int64_t c = m.cols; c < m.stride; ++c) check(m(r, c).bits, 0xffff, 1, what, m.rows, m.cols);
  }
}

// All rows that were filled alike have the same bits.
inline void check_equal_rows(Matrix& m, const char* what) {
  for (int64_t r = 1; r < m.rows; ++r) {
    if (!Matrix::is_equal(r)) continue;
    for (int64_t c = 0; c < m.cols; ++c) check(m(r, c).bits, m(0, c).bits, 0, what, m.rows, m.cols);
  }
}
