// PTX instructions as functions of one line.
#pragma once
#include <cstdint>

namespace llmk {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Accesses by an address in shared memory.
__device__ inline uint32_t shared_load_int(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ inline float shared_load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ inline float4 shared_load_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
__device__ inline void shared_store_float2(uint32_t address, const float2& v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
__device__ inline void shared_store_float(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// 1 / x to about one unit in the last place; subnormals count as zero.
__device__ inline float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// e^x, off by up to 2 + 1.25 |x| units in the last place, since x log2(e) is rounded: by 60 near x = -87. Of the terms
// of a softmax those with |x| below log(columns) matter, about 12. 0 where the result would be subnormal.
__device__ inline float exp_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
}

// The smaller one; NaN if either is.
__device__ inline float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The larger one; NaN if either is.
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// An L2 cache policy for loads: evict_last with `keep`, else evict_normal. To be created once per thread; Vec::load()
// and cp_async_16() take it.
__device__ inline uint64_t l2_policy(bool keep) {
  uint64_t last, normal;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return keep ? last : normal;
}

__device__ inline uint4 load_16(const void* global, uint64_t policy) {
  uint4 value;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(global), "l"(policy)
               : "memory");
  return value;
}

// What is there if it is wanted, else zeros. There is no branch, at whose end the compiler would wait for the load.
__device__ inline void load_if(bool wanted, const void* global, uint4& value) {
  value = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
               : "l"(global), "r"(static_cast<unsigned>(wanted))
               : "memory");
}

// Prefetches the line of an address to the L2 cache.
__device__ inline void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Asynchronous copy of 16 bytes from global to shared memory, bypassing L1. Only the first `bytes` are read (none: the
// address may be any), and the rest is filled with zeros.
__device__ inline void cp_async_16(void* shared, const void* global, int bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "l"(policy)
               : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's newest groups are still under way.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Barrier `id` of the block, 0 to 15, for `threads` threads: whole warps. Barrier 0 is that of __syncthreads().
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at it without waiting.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds to a counter in global memory and returns the old value. Used by one thread of a block between two barriers:
// what the block wrote before is visible to every block that finds the counter changed, after its second barrier.
__device__ inline int atomic_add_acq_rel(int* counter, int value) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

// The same for a block that goes on meanwhile: what it has read before is read before any block that finds the counter
// changed, and calls __threadfence() thereafter, writes.
__device__ inline int atomic_add_release(int* counter, int value) {
  int before;
  asm volatile("atom.add.release.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

// Programmatic dependent launch (sm_90 and later; nothing before).
//
//   pdl_wait()               waits for the end of the previous kernel in the stream. A kernel launched by
//                            kernels::launch() may start before that, so some thread of every block calls it before
//                            the block touches global memory, apart from what is read early.
//   pdl_launch_dependents()  lets the next kernel start once all blocks of this one have called it or ended. It may be
//                            called at any time, since the next kernel waits for the end of this one by pdl_wait(),
//                            but not by a kernel that writes what others read early.
//
// What is read early, before pdl_wait(): in a launch with `in_step` the weights, in one with `prefetch_cache` the keys
// and values of earlier tokens, their lengths and tables, and the weights (params/). At that time the previous kernel
// may still run, and so may the one before it, and so on: back to the last kernel that has not called
// pdl_launch_dependents(). What lies behind it starts after its end and sees all that it wrote. So
//
//   a kernel that writes weights never calls pdl_launch_dependents(), nor does one that writes lengths.
//
//   writes                                        | calls it | because
//   ----------------------------------------------|----------|---------------------------------------------------
//   parameters: adam                              | never    | a linear may read them early
//   weights, lengths: PyTorch's kernels           | never    | linears and attention may read them early
//   keys, values: rope_kv_write, decode_attention | yes      | they are read early only once the lengths have grown:
//                                                 |          | a kernel of PyTorch writes those, behind this kernel
//   gradients, states, residuals, logits, x, q,   | yes      | they are never read early
//   workspaces, results of ops                    |          |
//
// The result of an op may be used as a weight, but not by the next launches with `in_step`. tests/test_early_start.py
// has the table for each op that writes an argument.
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace llmk
