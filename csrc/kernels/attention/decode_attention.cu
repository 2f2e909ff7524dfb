// The launches of decode attention. The kernel is in decode_attention.cuh; which one takes a call, in route.h.
#include "decode_attention.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "decode_attention_any.h"
#include "flash_attention.h"
#include "kernels/recorder.h"
#include "kernels/tensor_map.h"
#include "launch_attention.h"

namespace llmk::kernels {

namespace {

cudaError_t kv_map(CUtensorMap& map, const DecodeAttentionParams& p, const void* data, int64_t page, int64_t token,
                   int64_t head, int box, Dtype dtype) {
  // The stride of a dimension of size 1 is not used, and may be out of range.
  const auto stride = [&](int64_t size, int64_t given) { return size == 1 ? p.head_dim : given; };
  const KvCache& c = p.cache;
  const TensorBox tensor{.dims = 4,
                         .sizes = {p.head_dim, c.page_size, p.kv_heads, c.pages},
                         .strides = {1, stride(c.page_size, token), stride(p.kv_heads, head), stride(c.pages, page)},
                         .box = {kChunkColumns, box, 1, 1}};
  return make_tensor_map(map, data, tensor, element_type(dtype));
}

// has_producer: a warp that copies by TMA.
cudaError_t launch_plan(const DecodeAttentionParams& params, const DecodePlan& plan, bool has_producer, Dtype dtype,
                        cudaStream_t stream) {
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

// The same as attention of a prompt, to as many keys of a cache as each sequence has.
FlashAttentionParams as_prompt(const DecodeAttentionParams& p) {
  const KvCache& c = p.cache;
  FlashAttentionParams prompt{};
  prompt.q = p.q, prompt.k = c.k, prompt.v = c.v, prompt.y = p.out;
  prompt.batch = p.batch, prompt.q_tokens = p.tokens, prompt.k_tokens = c.capacity;
  prompt.heads = p.heads, prompt.kv_heads = p.kv_heads, prompt.head_dim = p.head_dim;
  prompt.q_batch = p.q_batch, prompt.q_token = p.q_token, prompt.q_head = p.q_head;
  prompt.k_batch = c.k_page, prompt.k_token = c.k_token, prompt.k_head = c.k_head;
  prompt.v_batch = c.v_page, prompt.v_token = c.v_token, prompt.v_head = c.v_head;
  prompt.softmax_scale = p.softmax_scale, prompt.softcap = p.softcap;
  prompt.window_left = p.window_left, prompt.window_right = 0;
  prompt.k_begin = p.cache_leftpad, prompt.k_begin_batch = 1;
  prompt.k_seqlens = p.cache_seqlens;
  prompt.block_table = c.block_table, prompt.table_stride = c.table_stride;
  prompt.page_size = c.page_size, prompt.pages = c.pages;
  return prompt;
}

// Launches the whole batch, nearly always at once.
cudaError_t launch_route(const DecodeAttentionParams& params, const DecodeRoute& route, Dtype dtype,
                         cudaStream_t stream) {
  const bool by_tma = route.variant == DecodeVariant::kTma;
  if (params.batch <= route.sequences) return launch_plan(params, route.plan, by_tma, dtype, stream);
  for (int64_t begin = 0; begin < params.batch; begin += route.sequences) {
    const int64_t left = params.batch - begin;
    const DecodePlan& plan = left < route.sequences ? route.last : route.plan;
    const cudaError_t status =
        launch_plan(slice(params, begin, std::min(left, route.sequences)), plan, by_tma, dtype, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

std::atomic<int> min_prompt{0};  // see llmk_decode_attention_prompt

}  // namespace

DecodeRoute route_decode_attention(const DecodeAttentionParams& params, Dtype dtype) {
  DeviceInfo device{};  // of a device whose properties are not known: tensor cores find too little shared memory
  (void)device_info(device);
  return choose_decode_route(problem_of(params, dtype), device,
                             {.tensor_maps = has_tensor_maps(), .min_prompt = min_prompt});
}

cudaError_t decode_attention(const DecodeAttentionParams& params, Dtype dtype, cudaStream_t stream) {
  const auto launch = [=](const DecodeAttentionParams& p) {
    if (p.batch == 0 || p.tokens == 0 || p.heads == 0 || p.head_dim == 0) return cudaSuccess;
    const DecodeRoute route = route_decode_attention(p, dtype);
    if (route.variant == DecodeVariant::kNone) return cudaErrorInvalidValue;
    if (route.variant == DecodeVariant::kPrompt) return launch_flash_attention(as_prompt(p), dtype, stream);
    return route.is_fast() ? launch_route(p, route, dtype, stream) : decode_attention_any(p, dtype, stream);
  };
  return launch_movable(params, launch, [](DecodeAttentionParams& p, const Moves& moves) {
    moves(p.cache.k, p.cache.v, p.cache_seqlens, p.cache_leftpad, p.positions);
  });
}

}  // namespace llmk::kernels

// For tests, which call it through ctypes: from how many tokens of a sequence on the kernels of prompts take a call; 0:
// as the route says.
extern "C" __attribute__((visibility("default"))) void llmk_decode_attention_prompt(int tokens) {
  llmk::kernels::min_prompt = tokens;
}
