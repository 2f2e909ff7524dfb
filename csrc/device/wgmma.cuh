// wgmma: matrix instructions of a warpgroup (four warps, the first of which has a number divisible by four), with the
// second operand in shared memory, and the first one there or in registers. One instruction per function. Only code for
// sm_90a has them; else this header is empty.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace llmk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The matrix descriptor of a K-major operand in 128-byte swizzle: rows of 64 elements, one after the other. `shared` is
// a multiple of 1024 (8 rows), plus 32 for every step of 16 elements.
__device__ inline uint64_t wgmma_operand(uint32_t shared) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;  // the other stride: a swizzled row is as wide as the swizzle
  return kSwizzle128 | kEightRows | kUnused | (shared & 0x3ffff) / 16;
}

// The same of an operand of the second factor whose rows are the 16 elements that are summed over: rows of 64 columns,
// the next 64 columns `box_bytes` behind. An advance by 16 rows adds 2048 bytes.
__device__ inline uint64_t wgmma_rows(uint32_t shared, uint32_t box_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{box_bytes / 16} << 16 | (shared & 0x3ffff) / 16;
}

// The descriptor of what lies `bytes` behind an operand, a multiple of 16. One addition, where each from its address
// would take four instructions that wait for each other.
__device__ inline uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) {
  return (operand >> 32 << 32) | (static_cast<uint32_t>(operand) + bytes / 16);
}

// The number of a thread's warpgroup in its block. By a shuffle, which tells the compiler that it is one for all lanes:
// what depends on it stays in uniform registers, from where instructions take descriptors.
__device__ inline int warpgroup_number() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0); }

// Moves registers between the warpgroups of a block. All warps of the warpgroup call it.
template <int kCount>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Orders accesses to registers and shared memory before the instructions that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending of the newest groups are still under way.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to the accumulators across this point: wgmma writes them asynchronously.
template <int kCount>
__device__ inline void wgmma_pin(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// d += a b^T for a of 64 rows, b of 2 kCount rows, 16 elements each. With g = lane / 4 and i = 2 (lane % 4), warp w of
// the warpgroup holds in d[4 j], d[4 j + 1] row 16 w + g, columns 8 j + i and the next; in d[4 j + 2], d[4 j + 3] row
// 16 w + g + 8.
template <typename T, int kCount>
__device__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b);

#define LLMK_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LLMK_16(i) LLMK_4(i), LLMK_4(i + 4), LLMK_4(i + 8), LLMK_4(i + 12)
#define LLMK_WGMMA_AS(T, type, columns, registers, operands, ...)                                             \
  template <>                                                                                                 \
  __device__ inline void wgmma<T, columns / 2>(float(&d)[columns / 2], uint64_t a, uint64_t b) {              \
    asm volatile(                                                                                             \
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type " {" registers "}, " operands \
        ", add, 1, 1, 0, 0;\n}"                                                                               \
        : __VA_ARGS__                                                                                         \
        : "l"(a), "l"(b));                                                                                    \
  }
#define LLMK_WGMMA(columns, registers, operands, ...)                   \
  LLMK_WGMMA_AS(__half, f16, columns, registers, operands, __VA_ARGS__) \
  LLMK_WGMMA_AS(__nv_bfloat16, bf16, columns, registers, operands, __VA_ARGS__)
LLMK_WGMMA(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16, %17", LLMK_16(0))
LLMK_WGMMA(48,
           "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
           "%16, %17, %18, %19, %20, %21, %22, %23",
           "%24, %25", LLMK_16(0), LLMK_4(16), LLMK_4(20))
LLMK_WGMMA(64,
           "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
           "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
           "%32, %33", LLMK_16(0), LLMK_16(16))
#undef LLMK_WGMMA
#undef LLMK_WGMMA_AS

// The same, or d = a b^T where not `add`.
template <typename T, int kCount>
__device__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool add);
// d += a b for a in registers, as the results of wgmma above are distributed (in each of them two columns), and b of 16
// rows and 2 kCount columns (wgmma_rows).
template <typename T, int kCount>
__device__ void wgmma_rows_of(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b);

#define LLMK_64 LLMK_16(0), LLMK_16(16), LLMK_16(32), LLMK_16(48)
#define LLMK_40 LLMK_16(0), LLMK_16(16), LLMK_4(32), LLMK_4(36)
#define LLMK_72 LLMK_64, LLMK_4(64), LLMK_4(68)
#define LLMK_96 LLMK_64, LLMK_16(64), LLMK_16(80)
#define LLMK_112 LLMK_96, LLMK_16(96)
#define LLMK_128 LLMK_112, LLMK_16(112)
#define LLMK_WGMMA_OR_SET(T, type, columns, registers, operands, add, ...)                                             \
  template <>                                                                                                          \
  __device__ inline void wgmma<T, columns / 2>(float(&d)[columns / 2], uint64_t a, uint64_t b, bool adds) {            \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add                                                           \
                 ", 0;\n"                                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type " {" registers "}, " operands \
                 ", add, 1, 1, 0, 0;\n}"                                                                               \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a), "l"(b), "r"(int{adds}));                                                                    \
  }
#define LLMK_WGMMA_ROWS(T, type, columns, registers, operands, ...)                                                 \
  template <>                                                                                                       \
  __device__ inline void wgmma_rows_of<T, columns / 2>(float(&d)[columns / 2], const uint32_t(&a)[4], uint64_t b) { \
    asm volatile(                                                                                                   \
        "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                                                              \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type " {" registers "}, " operands       \
        ", add, 1, 1, 1;\n}"                                                                                        \
        : __VA_ARGS__                                                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                      \
  }
#define LLMK_REGISTERS_32                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LLMK_REGISTERS_40 LLMK_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LLMK_REGISTERS_64                                                              \
  LLMK_REGISTERS_32                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LLMK_REGISTERS_72 LLMK_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LLMK_REGISTERS_96                                                              \
  LLMK_REGISTERS_64                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LLMK_REGISTERS_112 \
  LLMK_REGISTERS_96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define LLMK_REGISTERS_128 \
  LLMK_REGISTERS_112       \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
LLMK_WGMMA_OR_SET(__half, f16, 64, LLMK_REGISTERS_32, "%32, %33", "%34", LLMK_16(0), LLMK_16(16))
LLMK_WGMMA_OR_SET(__nv_bfloat16, bf16, 64, LLMK_REGISTERS_32, "%32, %33", "%34", LLMK_16(0), LLMK_16(16))
LLMK_WGMMA_OR_SET(__half, f16, 80, LLMK_REGISTERS_40, "%40, %41", "%42", LLMK_40)
LLMK_WGMMA_OR_SET(__nv_bfloat16, bf16, 80, LLMK_REGISTERS_40, "%40, %41", "%42", LLMK_40)
LLMK_WGMMA_OR_SET(__half, f16, 128, LLMK_REGISTERS_64, "%64, %65", "%66", LLMK_64)
LLMK_WGMMA_OR_SET(__nv_bfloat16, bf16, 128, LLMK_REGISTERS_64, "%64, %65", "%66", LLMK_64)
LLMK_WGMMA_OR_SET(__half, f16, 144, LLMK_REGISTERS_72, "%72, %73", "%74", LLMK_72)
LLMK_WGMMA_OR_SET(__nv_bfloat16, bf16, 144, LLMK_REGISTERS_72, "%72, %73", "%74", LLMK_72)
LLMK_WGMMA_OR_SET(__half, f16, 192, LLMK_REGISTERS_96, "%96, %97", "%98", LLMK_96)
LLMK_WGMMA_OR_SET(__nv_bfloat16, bf16, 192, LLMK_REGISTERS_96, "%96, %97", "%98", LLMK_96)
LLMK_WGMMA_OR_SET(__half, f16, 224, LLMK_REGISTERS_112, "%112, %113", "%114", LLMK_112)
LLMK_WGMMA_OR_SET(__nv_bfloat16, bf16, 224, LLMK_REGISTERS_112, "%112, %113", "%114", LLMK_112)
LLMK_WGMMA_OR_SET(__half, f16, 256, LLMK_REGISTERS_128, "%128, %129", "%130", LLMK_128)
LLMK_WGMMA_OR_SET(__nv_bfloat16, bf16, 256, LLMK_REGISTERS_128, "%128, %129", "%130", LLMK_128)
LLMK_WGMMA_ROWS(__half, f16, 64, LLMK_REGISTERS_32, "{%32, %33, %34, %35}, %36", LLMK_16(0), LLMK_16(16))
LLMK_WGMMA_ROWS(__nv_bfloat16, bf16, 64, LLMK_REGISTERS_32, "{%32, %33, %34, %35}, %36", LLMK_16(0), LLMK_16(16))
LLMK_WGMMA_ROWS(__half, f16, 128, LLMK_REGISTERS_64, "{%64, %65, %66, %67}, %68", LLMK_64)
LLMK_WGMMA_ROWS(__nv_bfloat16, bf16, 128, LLMK_REGISTERS_64, "{%64, %65, %66, %67}, %68", LLMK_64)
#undef LLMK_REGISTERS_128
#undef LLMK_REGISTERS_112
#undef LLMK_REGISTERS_96
#undef LLMK_REGISTERS_72
#undef LLMK_REGISTERS_64
#undef LLMK_REGISTERS_40
#undef LLMK_REGISTERS_32
#undef LLMK_WGMMA_ROWS
#undef LLMK_WGMMA_OR_SET
#undef LLMK_128
#undef LLMK_112
#undef LLMK_96
#undef LLMK_72
#undef LLMK_64
#undef LLMK_40
#undef LLMK_16
#undef LLMK_4

#endif

}  // namespace llmk
