// mma.sync on 16-bit types, and the loads of its operands from shared memory. One instruction per function.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace llmk {

// c += a b: a 16 x 16 by rows, b 16 x 8 by columns, c 16 x 8. With g = lane / 4 and i = 2 (lane % 4), a lane holds
//   a[0]: row g, columns i, i + 1;   a[1]: row g + 8;   a[2], a[3]: the same, columns + 8
//   b[0]: column g, rows i, i + 1;   b[1]: rows + 8
//   c[0], c[1]: row g, columns i, i + 1;   c[2], c[3]: row g + 8
template <typename T>
__device__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma_16x8x16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma_16x8x16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements. Lane l gives the shared address of row l % 8 of matrix l / 8, and gets of
// each matrix the elements 2 (l % 4) and the next of row l / 4; transposed: of column l / 4.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// The transpose of an 8 x 8 matrix distributed over the lanes as above.
__device__ inline uint32_t transpose_matrix(uint32_t m) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(m));
  return result;
}

// Asynchronous copy of 16 bytes from global to shared memory, or 16 zero bytes when not `valid`.
__device__ inline void cp_async_16_or_zero(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// 2^x to about one unit in the last place; subnormals count as zero.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace llmk
