// Vec<T, N>: N elements, loaded or stored by one instruction of up to 16 bytes. Arithmetic is in float.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"

namespace llmk {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// The word of kBytes bytes that a vector is loaded and stored as.
template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// Two neighbours of a 16-bit type, which the hardware computes on and converts together.
template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using type = __half2;
  __device__ static __half2 from_floats(float a, float b) { return __floats2half2_rn(a, b); }
};
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  __device__ static __nv_bfloat162 from_floats(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  using Raw = typename Word<sizeof(T) * N>::type;
  static constexpr bool kPaired = sizeof(T) == 2 && N % 2 == 0;

  T data[N];

  __device__ float operator[](int i) const {
    if constexpr (kPaired && std::is_same_v<T, __nv_bfloat16>) {  // one instruction; of the upper half nvcc makes two
      const uint32_t both = reinterpret_cast<const uint32_t*>(data)[i / 2];
      return __uint_as_float(i % 2 ? both & 0xffff0000u : both << 16);
    } else {
      return to_float(data[i]);
    }
  }

  // The vector of value(0), value(1), ..., each rounded to T.
  template <typename Value>
  __device__ static Vec of(const Value& value) {
    Vec result;
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < N; i += 2) result.pair(i) = Pair<T>::from_floats(value(i), value(i + 1));
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) result.data[i] = from_float<T>(value(i));
    }
    return result;
  }

  // Elements i and i + 1, i even.
  __device__ auto& pair(int i) { return *reinterpret_cast<typename Pair<T>::type*>(&data[i]); }
  __device__ const auto& pair(int i) const { return *reinterpret_cast<const typename Pair<T>::type*>(&data[i]); }

  __device__ static Vec load(const T* source) { return from_raw(*reinterpret_cast<const Raw*>(source)); }
  // The same with an L2 policy, see l2_policy(); narrower accesses than 16 bytes do without.
  __device__ static Vec load(const T* source, uint64_t policy) {
    if constexpr (sizeof(Raw) == 16) {
      return from_raw(load_16(source, policy));
    } else {
      return load(source);
    }
  }
  // An intrinsic, since the compiler may split a plain assignment into stores of one or two halves.
  __device__ void store(T* target) const {
    __stwb(reinterpret_cast<Raw*>(target), *reinterpret_cast<const Raw*>(this));
  }
  // A plain assignment, which lets the compiler hoist the branch in front of it out of a loop. Only where the compiler
  // leaves the vector whole:
  //
  //   value       | case     | result
  //   ------------|----------|------------
  //   assign_to() | rms_norm | 2 % faster than store()
  __device__ void assign_to(T* target) const { *reinterpret_cast<Raw*>(target) = *reinterpret_cast<const Raw*>(this); }

 private:
  __device__ static Vec from_raw(const Raw& raw) { return *reinterpret_cast<const Vec*>(&raw); }
};

// Products and sums, each rounded to T: what eager PyTorch computes in one kernel each. The packed instructions round
// once, as float arithmetic followed by a conversion does, and are never contracted.
template <typename T, int N>
__device__ Vec<T, N> mul(const Vec<T, N>& a, const Vec<T, N>& b) {
  if constexpr (Vec<T, N>::kPaired) {
    Vec<T, N> product;
#pragma unroll
    for (int i = 0; i < N; i += 2) product.pair(i) = __hmul2_rn(a.pair(i), b.pair(i));
    return product;
  } else {
    return Vec<T, N>::of([&](int i) { return __fmul_rn(a[i], b[i]); });
  }
}

template <typename T, int N>
__device__ Vec<T, N> add(const Vec<T, N>& a, const Vec<T, N>& b) {
  if constexpr (Vec<T, N>::kPaired) {
    Vec<T, N> sum;
#pragma unroll
    for (int i = 0; i < N; i += 2) sum.pair(i) = __hadd2_rn(a.pair(i), b.pair(i));
    return sum;
  } else {
    return Vec<T, N>::of([&](int i) { return __fadd_rn(a[i], b[i]); });
  }
}

// Has the elements converted to float once more where they are used next. Else the compiler keeps them as they are and
// as floats, in three times the registers.
template <typename T, int N>
__device__ void forget_floats(Vec<T, N>& s) {
  if constexpr (Vec<T, N>::kPaired) {
#pragma unroll
    for (int i = 0; i < N; i += 2) asm volatile("" : "+r"(reinterpret_cast<unsigned&>(s.data[i])));
  }
}

// An address in global memory that is computed once. Else the compiler computes it anew for each access, in 64 bits,
// from what it is the sum of.
template <typename T>
__device__ T* computed_once(T* address) {
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
  return address;
}

// The widest vector of T: one 16-byte access.
template <typename T>
constexpr int kVecWidth = 16 / sizeof(T);

}  // namespace llmk
