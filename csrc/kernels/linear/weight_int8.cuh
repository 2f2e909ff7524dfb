// Elements of a weight in int8, each row with a scale in float32: W[n][k] = scales[n] q[n][k].
//
// All of int8 is exact in float16 and bfloat16, so products are those of float32 sums of q x; the row's scale
// multiplies the sum. Conversion instructions run at a quarter of the rate of others. Instead bytes are put into the
// mantissa of a number that is known, which is subtracted again:
//
//   float     2^23 + (q + 128)              less 2^23 + 128
//   float16   1024 + (q + 128)              less 1024 + 128
//   bfloat16  128 + q's lower seven bits    less 128, or 256 where q is negative: its mantissa has but seven bits
//
// The technique is that of FasterTransformer's mixed-type GEMM (Kim et al. 2022, "Who Says Elephants Can't Run").
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace llmk::kernels {

struct Int8 {
  static constexpr int kBytes = 1;

  const float* scales;  // of the rows

  struct alignas(8) Eight {
    uint32_t data[2];

    __device__ static Eight load(const uint32_t* source) {
      const uint2 words = *reinterpret_cast<const uint2*>(source);
      return {words.x, words.y};
    }
    __device__ float operator[](int i) const {
      const uint32_t bits = __byte_perm(data[i / 4] ^ kSigns, 0x4b000000, 0x7650 + i % 4);
      return __uint_as_float(bits) - 8388736.f;
    }
  };

  template <typename T>
  __device__ static void to_pairs(const Eight& eight, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t four = eight.data[i / 2];
      if constexpr (std::is_same_v<T, __half>) {
        pairs[i] = subtract(__half2{}, with_high_byte(four ^ kSigns, 0x64, i), 0x64806480);
      } else {
        const uint32_t low = with_high_byte(four & ~kSigns, 0x43, i), sign = with_high_byte(four & kSigns, 0x43, i);
        pairs[i] = subtract(__nv_bfloat162{}, low, sign);
      }
    }
  }

  __device__ float scale(int64_t row) const { return scales[row]; }

 private:
  static constexpr uint32_t kSigns = 0x80808080;

  // Pair i of four bytes, or of the next four, each below a byte that is `high`.
  __device__ static uint32_t with_high_byte(uint32_t four, uint32_t high, int i) {
    return __byte_perm(four, high, i % 2 ? 0x4342 : 0x4140);
  }
  template <typename Two>
  __device__ static uint32_t subtract(Two, uint32_t a, uint32_t b) {
    const Two difference = __hsub2(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
    return reinterpret_cast<const uint32_t&>(difference);
  }
};

}  // namespace llmk::kernels
