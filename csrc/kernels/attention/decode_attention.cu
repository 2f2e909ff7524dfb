// Host code of decode attention: which kernel takes a call, and its launch. The kernel is in decode_attention.cuh.
#include "decode_attention.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "decode_attention_any.h"
#include "kernels/recorder.h"
#include "kernels/tensor_map.h"
#include "launch_attention.h"
#include "plan.h"

namespace llmk::kernels {

namespace {

// Whether a tensor map can have a dimension of this size and stride.
bool can_map(int64_t size, int64_t stride) {
  return size == 1 || (size > 1 && stride > 0 && stride < int64_t{1} << 39);
}

cudaError_t kv_map(CUtensorMap& map, const DecodeAttentionParams& p, const void* data, int64_t page, int64_t token,
                   int64_t head, int box, Dtype dtype) {
  // The stride of a dimension of size 1 is not used, and may be out of range.
  const auto stride = [&](int64_t size, int64_t given) { return size == 1 ? p.head_dim : given; };
  const KvCache& c = p.cache;
  const TensorBox tensor{.dims = 4,
                         .sizes = {p.head_dim, c.page_size, p.kv_heads, c.pages},
                         .strides = {1, stride(c.page_size, token), stride(p.kv_heads, head), stride(c.pages, page)},
                         .box = {kChunkColumns, box, 1, 1}};
  return make_tensor_map(map, data, tensor, dtype);
}

cudaError_t launch_plan(const DecodeAttentionParams& params, const DecodePlan& plan, const DeviceInfo& device,
                        Dtype dtype, cudaStream_t stream) {
  const bool has_producer = device.compute_capability >= 90;  // a warp that copies by TMA
  const KvCache& c = params.cache;
  KvMaps maps{};
  if (has_producer) {
    cudaError_t status = kv_map(maps.k, params, c.k, c.k_page, c.k_token, c.k_head, plan.box_keys, dtype);
    if (status == cudaSuccess)
      status = kv_map(maps.v, params, c.v, c.v_page, c.v_token, c.v_head, plan.box_keys, dtype);
    if (status != cudaSuccess) return status;
  }
  LaunchShape shape{int64_t{plan.cluster} * plan.clusters, dim3(kThreads + 32 * has_producer),
                    static_cast<size_t>(plan.layout(params.head_dim).bytes)};
  shape.cluster = plan.cluster;
  const bool norm = params.norm.q_weight || params.norm.k_weight;
  const auto launch_fp16 = norm ? launch_decode_attention<__half, true> : launch_decode_attention<__half, false>;
  const auto launch_bf16 =
      norm ? launch_decode_attention<__nv_bfloat16, true> : launch_decode_attention<__nv_bfloat16, false>;
  return (dtype == Dtype::kFloat16 ? launch_fp16 : launch_bf16)(params, plan, maps, shape, stream);
}

// The sequences from `begin` on.
DecodeAttentionParams slice(const DecodeAttentionParams& params, int64_t begin, int64_t count) {
  DecodeAttentionParams part = params;
  const auto advance = [&](auto& pointer, int64_t elements) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    if (pointer) pointer = reinterpret_cast<Pointer>(reinterpret_cast<uintptr_t>(pointer) + elements * 2);
  };
  part.batch = count;
  advance(part.q, begin * params.q_batch);
  advance(part.out, begin * params.tokens * params.heads * params.head_dim);
  advance(part.new_k, begin * params.new_k_batch);
  advance(part.new_v, begin * params.new_v_batch);
  part.cache_seqlens += begin;
  if (part.cache_leftpad) part.cache_leftpad += begin;
  if (part.positions) part.positions += begin;
  if (part.cache.block_table) {
    part.cache.block_table += begin * params.cache.table_stride;
  } else {
    advance(part.cache.k, begin * params.cache.k_page);
    advance(part.cache.v, begin * params.cache.v_page);
    part.cache.pages = count;
  }
  return part;
}

// Calls body(part) for the sequences of each launch: nearly always one launch for the whole batch.
template <typename Body>
cudaError_t for_each_launch(const DecodeAttentionParams& params, const Body& body) {
  const int64_t max_batch = sequences_per_launch(params);
  if (params.batch <= max_batch) return body(params);
  for (int64_t begin = 0; begin < params.batch; begin += max_batch) {
    const cudaError_t status = body(slice(params, begin, std::min(max_batch, params.batch - begin)));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace

bool decode_attention_is_fast(const DecodeAttentionParams& p, Dtype dtype) {
  const auto multiples = [](std::initializer_list<int64_t> strides) {
    return std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % 8 == 0; });
  };
  const bool head_dim = p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256;
  if ((dtype != Dtype::kFloat16 && dtype != Dtype::kBFloat16) || !head_dim) return false;
  if (p.cache.capacity > 0x3fffffff || p.batch > 0xffff || p.kv_heads > 0xffff) return false;
  for (const void* pointer :
       {p.q, static_cast<const void*>(p.cache.k), static_cast<const void*>(p.cache.v), static_cast<const void*>(p.out),
        p.new_k, p.new_v, p.rope.cos, p.rope.sin, p.norm.q_weight, p.norm.k_weight}) {
    if (!is_aligned(pointer, 16)) return false;
  }
  const KvCache& c = p.cache;
  if (c.block_table && c.page_size % kMmaKeys != 0) return false;
  if (sequences_per_launch(p) < 1) return false;
  DeviceInfo device;
  if (device_info(device) != cudaSuccess) return false;
  const DecodePlan plan = plan_decode_attention(p, device);
  if (plan.stages < 2 || static_cast<size_t>(plan.layout(p.head_dim).bytes) > device.shared_bytes) return false;
  if (device.compute_capability >= 90) {
    if (!has_tensor_maps() || c.pages > INT32_MAX || !can_map(c.page_size, c.k_token) ||
        !can_map(c.page_size, c.v_token) || !can_map(p.kv_heads, c.k_head) || !can_map(p.kv_heads, c.v_head) ||
        !can_map(c.pages, c.k_page) || !can_map(c.pages, c.v_page)) {
      return false;
    }
  } else if (c.k_token > (1 << 26) || c.v_token > (1 << 26)) {
    return false;  // the kernel computes offsets within a tile in 32 bits
  }
  return multiples({p.q_batch, p.q_token, p.q_head, c.k_page, c.k_token, c.k_head, c.v_page, c.v_token, c.v_head,
                    p.new_k_batch, p.new_k_head, p.new_v_batch, p.new_v_head, p.rope.cos_row, p.rope.sin_row});
}

cudaError_t decode_attention_workspace_bytes(const DecodeAttentionParams& params, size_t& bytes) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  bytes = 0;
  return for_each_launch(params, [&](const DecodeAttentionParams& part) {
    const DecodePlan plan = plan_decode_attention(part, device);
    bytes =
        std::max(bytes, static_cast<size_t>(plan.clusters) * 2 * 8 * plan.query_mma_tiles * (part.head_dim + 2) * 4);
    return cudaSuccess;
  });
}

cudaError_t decode_attention(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  const auto launch = [=](const DecodeAttentionParams& p) {
    if (p.batch == 0 || p.tokens == 0 || p.heads == 0 || p.head_dim == 0) return cudaSuccess;
    if (!decode_attention_is_fast(p, dtype)) return decode_attention_any(p, dtype, stream);
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    return for_each_launch(p, [&](const DecodeAttentionParams& part) {
      return launch_plan(part, plan_decode_attention(part, device), device, dtype, stream);
    });
  };
  return launch_movable(params, launch, [](DecodeAttentionParams& p, const Moves& moves) {
    moves(p.cache.k, p.cache.v, p.cache_seqlens, p.cache_leftpad, p.positions);
  });
}

}  // namespace llmk::kernels
