// Bulk and tensor copies (TMA), mbarriers, and distributed shared memory: sm_90 and later. One instruction per
// function; below sm_90 this header is empty.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "device/cluster.cuh"
#include "device/ptx.cuh"

namespace llmk {

#if __CUDA_ARCH__ >= 900

constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // L2 policies: for data that is read once, and the default
constexpr uint64_t kEvictNormal = 0x1000000000000000;

// An mbarrier: a phase completes after `arrivals` arrivals, and when all expected bytes have arrived.
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the TMA unit and to the cluster.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has completed. The caller must be at most one phase behind.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Invalidates a barrier, as barrier_init() requires before it is initialised again. No thread may wait there.
__device__ inline void barrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies contiguous bytes, a multiple of 16, between addresses that are multiples of 16.
__device__ inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The same from this block's shared memory to another block's, by their cluster_address().
__device__ inline void bulk_send(uint32_t to, uint32_t shared, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(shared), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline void tensor_map_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies the box of a three-dimensional tensor that begins at (column, row, depth).
__device__ inline void tensor_load(uint32_t shared, const CUtensorMap& map, int column, int row, int depth,
                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(depth), "r"(barrier)
      : "memory");
}
__device__ inline void tensor_load(uint32_t shared, const CUtensorMap& map, int column, int row, int depth,
                                   uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(depth), "r"(barrier), "l"(policy)
      : "memory");
}
// The same to all blocks of the cluster whose bits are in `blocks`: to the same place in each, and to its barrier.
__device__ inline void tensor_load_multicast(uint32_t shared, const CUtensorMap& map, int column, int row, int depth,
                                             uint32_t barrier, uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_"
      "hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(depth), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}
// The same of a four-dimensional tensor.
__device__ inline void tensor_load(uint32_t shared, const CUtensorMap& map, const int (&at)[4], uint32_t barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(barrier), "l"(policy)
      : "memory");
}
// Prefetches the box to the L2 cache.
__device__ inline void tensor_prefetch_l2(const CUtensorMap& map, const int (&at)[4]) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(at[0]),
               "r"(at[1]), "r"(at[2]), "r"(at[3])
               : "memory");
}
// True for one lane of a converged warp. The compiler knows that it is one, and so issues a copy with uniform operands
// as one instruction; after `lane == 0` it would be a loop over the lanes.
__device__ inline bool elect() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}"
      : "=r"(elected));
  return elected;
}
// Orders ordinary accesses to shared memory before TMA copies that are issued later.
__device__ inline void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// cluster_sync() without memory ordering.
__device__ inline void cluster_barrier_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The address in block `rank` of the cluster that corresponds to `shared` in this block.
__device__ inline uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
// Stores to another block's shared memory and counts the bytes at a barrier there, as a copy does: who waits there
// needs no arrival of the writer, whose ordering would be a fence of the GPU. Both by their cluster_address().
__device__ inline void cluster_store(uint32_t address, const float2& v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(v.x), "f"(v.y), "r"(barrier)
               : "memory");
}
__device__ inline void cluster_store(uint32_t address, const float4& v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
// Arrives at another block's barrier, by its cluster_address(): memory there has been read, and may be filled again.
// Makes no writes visible to that block. An arrival that did is a fence of the GPU, some 1 us; see cluster_store().
__device__ inline void barrier_arrive_cluster(uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ inline float cluster_load(uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ inline float4 cluster_load4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

#endif

}  // namespace llmk
