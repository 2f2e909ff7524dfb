// How decode_attention_dense shares its work among blocks, and what a block has in shared memory; measured on one H200.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/launch.h"
#include "params/attention.h"
#include "plan.h"

namespace llmk::kernels {

// None of it depends on how long the sequences are: that the kernel reads on the device.
struct DensePlan {
  int kv_heads;
  int workers;    // warps per kv head: 1 or 2
  int log2_unit;  // keys of a unit: 16, or with two workers 16 or 32
  int copies;     // that bring the keys of a unit: 1, 2 or 4
  int slots;      // of the ring
  int blocks;
  int least, slack;  // see plan_quota()

  int warps() const { return kv_heads * workers; }
};

// Offsets in bytes; the ring is at 0. In a slot the keys (or values) lie as in memory, but that what copy i brings is
// moved on by i * 128 / copies bytes: keys of different copies meet different banks, see dense_tile.cuh.
struct DenseLayout {
  int row, slot;    // bytes of a key of all heads, and of a slot
  int fresh;        // of each warp: its head's new key, then the new value
  int exchange;     // of each warp: what it gives to the other one of its head
  int full, empty;  // barriers of the slots
  int bytes;

  __host__ __device__ DenseLayout(int head_dim, int kv_heads, int workers, int log2_unit, int slots)
      : row(kv_heads * head_dim * 2),
        slot((row << log2_unit) + 128),
        fresh(slots * slot),
        exchange(fresh + kv_heads * workers * 2 * head_dim * 2),
        full(exchange + (workers - 1) * kv_heads * workers * (head_dim / 32 + 1) * 512),
        empty(full + slots * 8),
        bytes(empty + slots * 8) {}
};

constexpr int kDenseHeads = 8;  // kv heads at most

// As many slots as fit into so many bytes. Fewer than two are no ring.
inline void plan_dense_ring(DensePlan& plan, int64_t head_dim, size_t bytes) {
  const DenseLayout fixed(static_cast<int>(head_dim), plan.kv_heads, plan.workers, plan.log2_unit, 0);
  const size_t used = static_cast<size_t>(fixed.bytes);
  plan.slots = used < bytes ? static_cast<int>(std::min<size_t>((bytes - used) / (fixed.slot + 16), 32)) : 0;
}

inline DensePlan plan_decode_attention_dense(const DecodeAttentionParams& params, const DeviceInfo& device) {
  DensePlan plan{};
  plan.kv_heads = static_cast<int>(params.kv_heads);
  plan.workers = plan.kv_heads < 4 ? 2 : 1;
  // A copy is to bring 4 KiB or more of contiguous memory, and a slot is not to be half of the ring.
  plan.log2_unit = plan.workers == 2 && plan.kv_heads * params.head_dim <= 256 ? 5 : 4;
  plan.copies = 4;
  plan.blocks = std::min(device.sm_count, kMaxClusters);
  plan.least = plan.slack = 8;
  plan_dense_ring(plan, params.head_dim, std::min(kHalfOfShared, device.shared_bytes));
  return plan;
}

}  // namespace llmk::kernels
