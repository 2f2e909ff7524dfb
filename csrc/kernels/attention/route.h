// The routes of attention: which kernel runs decode_attention, which run attention over prompts and its backward, by
// which plan, and why. All of that is decided here: bindings and launchers ask, and obey. Plain host code.
//
//   decode_attention   GPU                             kernel
//   ----------------   -----------------------------   ---------------------------------------------------------
//   tma                9.0 on                          decode_attention.cuh, keys and values by TMA
//   cp_async           8.0 on                          decode_attention.cuh, by cp.async
//   prompt             8.0 on                          for many tokens of a sequence: as attention, below
//   plain              any                             decode_attention_any.cu, for what these do not take
//
//   attention          GPU                             kernel                       backward
//   ----------------   -----------------------------   --------------------------   ----------------------------------
//   wgmma              9.0, of a build for sm_90a      flash_attention_sm90.cuh     flash_attention_backward_sm90.cuh
//   mma                8.0 on                          flash_attention.cuh          flash_attention_backward.cuh
//   plain              any                             flash_attention_any.cu       flash_attention_backward_any.cu
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "dtype.h"
#include "kernels/device_info.h"
#include "kernels/verdict.h"
#include "limits.h"
#include "params/attention.h"
#include "params/flash_attention.h"
#include "plan.h"
#include "tiles.h"

namespace llmk::kernels {

// What routes depend on beside the problem and the device: the driver, and the switch of tests.
struct AttentionOptions {
  bool tensor_maps = true;  // the driver has them
  bool portable = false;    // see llmk_flash_attention_portable
  int min_prompt = 0;       // see llmk_decode_attention_prompt
};

namespace routing {

inline bool all_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) { return is_aligned(pointer, 16); });
}
// Of 16-bit elements.
inline bool all_multiples(std::initializer_list<int64_t> strides) {
  return std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride % 8 == 0; });
}

}  // namespace routing

// ---- what routes of decode_attention are

enum class DecodeVariant { kNone, kPlain, kCpAsync, kTma, kPrompt };  // kNone: nothing to do, or no kernel

struct DecodeRoute {
  DecodeVariant variant = DecodeVariant::kNone;
  const char* reason = "";
  // Of kCpAsync and kTma. The batch goes in launches of so many sequences, and the rest in a last one.
  int64_t sequences = 0;
  DecodePlan plan{}, last{};
  size_t shared_bytes = 0;     // of a block of `plan`
  int blocks_per_sm = 0;       // as registers and shared memory allow
  size_t workspace_bytes = 0;  // of the largest launch

  bool is_fast() const { return variant == DecodeVariant::kCpAsync || variant == DecodeVariant::kTma; }
};

inline DecodeProblem problem_of(const DecodeAttentionParams& p, Dtype dtype) {
  const KvCache& c = p.cache;
  return {.batch = p.batch,
          .tokens = p.tokens,
          .heads = p.heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .capacity = c.capacity,
          .page_size = c.page_size,
          .pages = c.pages,
          .paged = c.block_table != nullptr,
          .k = {c.k_page, c.k_token, c.k_head},
          .v = {c.v_page, c.v_token, c.v_head},
          .dtype = dtype,
          .fused = p.new_k != nullptr,
          .max_seqlen = p.max_seqlen,
          .aligned = p.rope.rotary_dim % 16 == 0 &&
                     routing::all_aligned({p.q, c.k, c.v, p.out, p.new_k, p.new_v, p.rope.cos, p.rope.sin,
                                           p.norm.q_weight, p.norm.k_weight}) &&
                     routing::all_multiples({p.q_batch, p.q_token, p.q_head, c.k_page, c.k_token, c.k_head, c.v_page,
                                             c.v_token, c.v_head, p.new_k_batch, p.new_k_head, p.new_v_batch,
                                             p.new_v_head, p.rope.cos_row, p.rope.sin_row})};
}

namespace routing {

// Whether a tensor map can have the strides of a cache. That of a dimension of size 1 is not used.
inline bool can_map(const DecodeProblem& p, const KvStrides& strides) {
  const auto fits = [](int64_t size, int64_t stride) {
    return size == 1 || (size > 1 && stride > 0 && stride < int64_t{1} << 39);
  };
  return fits(p.page_size, strides.token) && fits(p.kv_heads, strides.head) && fits(p.pages, strides.page);
}

// Whether tensor cores take it, by whatever copies.
inline Verdict decode_supported(const DecodeProblem& p) {
  if (p.dtype == Dtype::kFloat32) return refuse("float32: tensor cores take float16 and bfloat16");
  if (p.head_dim != 64 && p.head_dim != 96 && p.head_dim != 128 && p.head_dim != 256) {
    return refuse("head_dim is not 64, 96, 128 or 256");
  }
  if (p.capacity > 0x3fffffff) return refuse("a sequence may have 2^30 keys or more");
  if (p.batch > 0xffff || p.kv_heads > 0xffff) return refuse("more than 65535 sequences or kv heads");
  if (!p.aligned) return refuse("a head is not aligned to 16 bytes");
  if (p.paged && p.page_size % kMmaKeys != 0) return refuse("pages are no multiple of 16 keys");
  if (sequences_per_launch(p) < 1) return refuse("a sequence may have too many KV tiles to count in 32 bits");
  return take("");
}

inline Verdict decode_fits(const DecodeProblem& p, const DecodePlan& plan, const DeviceInfo& device) {
  if (plan.stages < 2 || static_cast<size_t>(plan.layout(p.head_dim).bytes) > device.shared_bytes) {
    return refuse("a block has too little shared memory");
  }
  if (device.compute_capability >= 90) return take("compute capability 9.0 and later");
  // The kernel computes offsets within a tile in 32 bits.
  if (p.k.token > (1 << 26) || p.v.token > (1 << 26)) return refuse("keys are more than 2^26 elements apart");
  return take("a GPU before compute capability 9.0");
}

inline Verdict decode_maps(const DecodeProblem& p, const AttentionOptions& options) {
  if (!options.tensor_maps) return refuse("the driver has no tensor maps");
  if (p.pages > INT32_MAX) return refuse("a tensor map takes less than 2^31 pages");
  if (!can_map(p, p.k) || !can_map(p, p.v)) return refuse("the cache has a size or a stride that no tensor map takes");
  return take("");
}

inline size_t workspace_of(const DecodePlan& plan, int64_t head_dim) {
  return static_cast<size_t>(plan.clusters) * 2 * 8 * plan.query_mma_tiles * (head_dim + 2) * 4;
}

}  // namespace routing

// ---- attention over prompts, and its backward

// Elements between sequences, tokens and heads.
struct HeadStrides {
  int64_t batch, token, head;
};

struct AttentionProblem {
  int64_t batch, q_tokens, k_tokens, heads, kv_heads, head_dim;
  HeadStrides q, k, v, grad_y;  // y is contiguous
  Dtype dtype;
  bool aligned = true, grad_y_aligned = true;  // q, k, v and y, and grad_y begin at multiples of 16 bytes
  bool biased = false;                         // a mask or slopes
  int64_t page_size = 0, pages = 0;            // of a paged cache, whose strides k and v have
};

enum class AttentionVariant { kNone, kPlain, kMma, kWgmma };  // kNone: nothing to do, or no kernel

// How attention is tiled, or the larger of the two kernels of its backward. Zeros for kPlain.
struct AttentionPlan {
  int head_columns;   // of the kernel: those behind head_dim are zeros
  int queries, keys;  // of a tile. In the backward both are those of the kernel for keys.
  int64_t blocks;
  size_t shared_bytes;
};

struct AttentionRoute {
  AttentionVariant forward = AttentionVariant::kNone, backward = AttentionVariant::kNone;
  const char *reason = "", *backward_reason = "";
  AttentionPlan plan{}, backward_plan{};
  // Of the backward by wgmma: into how many parts the query heads of a key head are divided, each the work of a block.
  int splits = 0;
};

inline AttentionProblem problem_of(const FlashAttentionParams& p, Dtype dtype) {
  return {.batch = p.batch,
          .q_tokens = p.q_tokens,
          .k_tokens = p.k_tokens,
          .heads = p.heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .q = {p.q_batch, p.q_token, p.q_head},
          .k = {p.k_batch, p.k_token, p.k_head},
          .v = {p.v_batch, p.v_token, p.v_head},
          .grad_y = {p.q_tokens * p.heads * p.head_dim, p.heads * p.head_dim, p.head_dim},
          .dtype = dtype,
          .aligned = routing::all_aligned({p.q, p.k, p.v, p.y}),
          .biased = static_cast<bool>(p.bias),
          .page_size = p.block_table ? p.page_size : 0,
          .pages = p.block_table ? p.pages : 0};
}
inline AttentionProblem problem_of(const FlashAttentionBackwardParams& p, Dtype dtype) {
  AttentionProblem problem = problem_of(static_cast<const FlashAttentionParams&>(p), dtype);
  problem.grad_y = {p.grad_y_batch, p.grad_y_token, p.grad_y_head};
  problem.grad_y_aligned = is_aligned(p.grad_y, 16);
  return problem;
}

namespace routing {

// What no kernel takes.
inline Verdict attention_supported(const AttentionProblem& p) {
  if (p.dtype == Dtype::kFloat64) return refuse("float64: on the CPU only");
  if (p.head_dim > kMaxFlashHeadDim) return refuse("head_dim is above 256");
  if (p.q_tokens > kMaxFlashTokens || p.k_tokens > kMaxFlashTokens) return refuse("more than 2^30 tokens");
  return take("");
}

inline bool multiples(const HeadStrides& s) { return all_multiples({s.batch, s.token, s.head}); }

// Whether tensor cores take it, by whatever instructions.
inline Verdict attention_is_fast(const AttentionProblem& p) {
  if (p.dtype == Dtype::kFloat32) return refuse("float32: tensor cores take float16 and bfloat16");
  if (p.head_dim % 8 != 0) return refuse("head_dim is no multiple of 8");
  if (!p.aligned || !multiples(p.q) || !multiples(p.k) || !multiples(p.v)) {
    return refuse("a head is not aligned to 16 bytes");
  }
  return take("");
}

// Whether a tensor map can have these strides. Heads and sequences that share their memory, by a stride of 0, are one
// in the map; tokens cannot.
inline bool can_map(const HeadStrides& s, int64_t tokens) {
  const auto fits = [](int64_t stride) { return stride >= 0 && stride < int64_t{1} << 39; };
  return fits(s.batch) && fits(s.head) && (tokens == 1 || (s.token > 0 && fits(s.token)));
}

inline Verdict attention_by_wgmma(const AttentionProblem& p, const DeviceInfo& device,
                                  const AttentionOptions& options) {
  if (options.portable) return refuse("a test's switch");
  if (!device.has_wgmma) return refuse("wgmma takes compute capability 9.0, and a build for sm_90a");
  if (!options.tensor_maps) return refuse("the driver has no tensor maps");
  const int64_t tile = p.head_dim <= 128 ? flash::Sm90Tile<128>::kKeys : flash::Sm90Tile<256>::kKeys;
  if (p.page_size % 8 != 0 || (p.page_size > 0 && p.page_size % tile != 0 && tile % p.page_size != 0)) {
    return refuse("pages whose size is neither 8 keys times a power of two nor a multiple of a tile");
  }
  if (p.k_tokens == 0) return refuse("there are no keys");
  if (!can_map(p.q, p.q_tokens) || !can_map(p.k, p.k_tokens) || !can_map(p.v, p.k_tokens)) {
    return refuse("a stride that no tensor map takes");
  }
  return take("compute capability 9.0");
}

inline Verdict backward_by_wgmma(const AttentionProblem& p, const DeviceInfo& device, const AttentionOptions& options) {
  if (p.batch == 0 || p.heads == 0 || p.q_tokens == 0) return refuse("there are no queries");
  if (const Verdict verdict = attention_by_wgmma(p, device, options); !verdict.taken) return verdict;
  if (p.head_dim > 128) return refuse("heads above 128 have no backward by wgmma");
  if (p.biased) return refuse("masks and slopes have no backward by wgmma");
  if (!can_map(p.grad_y, p.q_tokens)) return refuse("a stride of grad_y that no tensor map takes");
  return take("compute capability 9.0, and heads of up to 128");
}

// The first of these sizes of heads that has room for head_dim.
template <int kDim, int... kMore, typename Body>
AttentionPlan for_head_dim(int64_t head_dim, const Body& body) {
  if constexpr (sizeof...(kMore) > 0) {
    if (head_dim > kDim) return for_head_dim<kMore...>(head_dim, body);
  }
  return body(std::integral_constant<int, kDim>{});
}

inline int64_t tiles_of(int64_t tokens, int64_t of_tile) { return (tokens + of_tile - 1) / of_tile; }

inline AttentionPlan plan_attention(const AttentionProblem& p, bool by_wgmma, int sm_count) {
  const auto plan = [&](auto dim, auto size) -> AttentionPlan {
    using Size = decltype(size);
    const int64_t tiles = tiles_of(p.q_tokens, Size::kQueries) * p.batch * p.heads;
    return {dim, Size::kQueries, Size::kKeys, by_wgmma ? std::min<int64_t>(tiles, sm_count) : tiles,
            Size::kSharedBytes};
  };
  if (by_wgmma) {
    return for_head_dim<64, 128, 192, 256>(p.head_dim, [&](auto dim) { return plan(dim, flash::Sm90Tile<dim>{}); });
  }
  return for_head_dim<64, 128, 256>(p.head_dim, [&](auto dim) { return plan(dim, flash::Tile<dim>{}); });
}

inline AttentionPlan plan_backward(const AttentionProblem& p, int splits) {
  const auto plan = [&](auto dim, auto size, size_t shared_bytes) -> AttentionPlan {
    using Size = decltype(size);
    const int64_t key_tiles = tiles_of(p.k_tokens, Size::kRows) * p.batch * p.kv_heads;
    return {dim, Size::kColumns, Size::kRows, key_tiles * std::max(splits, 1), shared_bytes};
  };
  if (splits > 0) {
    return for_head_dim<64, 128>(p.head_dim, [&](auto dim) {
      return plan(dim, flash::Sm90Backward<dim>{}, flash::Sm90Backward<dim>::kSharedBytes);
    });
  }
  return for_head_dim<64, 128, 256>(
      p.head_dim, [&](auto dim) { return plan(dim, flash::BackwardTile<dim>{}, flash::BackwardTile<dim>::kKeyBytes); });
}

// So that there are a few blocks for each SM: tiles of keys differ in how many queries see them. The batch has no say,
// or a sequence's gradients would depend on it.
inline int count_splits(const AttentionProblem& p, int sm_count) {
  const int64_t group = p.heads / p.kv_heads, blocks = (p.k_tokens + 127) / 128 * p.kv_heads;
  int64_t splits = 1;
  while (splits < group && (group % splits != 0 || blocks * splits < 4 * sm_count)) ++splits;
  return static_cast<int>(splits);
}

inline void choose_forward(AttentionRoute& route, const AttentionProblem& p, const DeviceInfo& device,
                           const AttentionOptions& options) {
  if (p.batch == 0 || p.q_tokens == 0 || p.heads == 0 || p.head_dim == 0) {
    route.reason = "there is nothing to compute";
    return;
  }
  Verdict verdict = attention_supported(p);
  route.reason = verdict.reason;
  if (!verdict.taken) return;
  verdict = attention_is_fast(p);
  route.forward = AttentionVariant::kPlain;
  route.reason = verdict.reason;
  if (!verdict.taken) return;
  verdict = attention_by_wgmma(p, device, options);
  route.forward = verdict.taken ? AttentionVariant::kWgmma : AttentionVariant::kMma;
  route.reason = verdict.reason;
  route.plan = plan_attention(p, verdict.taken, device.sm_count);
}

inline void choose_backward(AttentionRoute& route, const AttentionProblem& p, const DeviceInfo& device,
                            const AttentionOptions& options) {
  Verdict verdict = attention_supported(p);
  route.backward_reason = verdict.reason;
  if (!verdict.taken) return;
  verdict = attention_is_fast(p);
  if (verdict.taken && !(p.grad_y_aligned && multiples(p.grad_y))) {
    verdict = refuse("a head of grad_y is not aligned to 16 bytes");
  }
  route.backward = AttentionVariant::kPlain;
  route.backward_reason = verdict.reason;
  if (!verdict.taken) return;
  verdict = backward_by_wgmma(p, device, options);
  route.backward = verdict.taken ? AttentionVariant::kWgmma : AttentionVariant::kMma;
  route.backward_reason = verdict.reason;
  if (verdict.taken) route.splits = count_splits(p, device.sm_count);
  route.backward_plan = plan_backward(p, route.splits);
}

}  // namespace routing

// The backward has a variant also where there is nothing to attend to: its gradients are zeros then.
inline AttentionRoute choose_attention_route(const AttentionProblem& problem, const DeviceInfo& device,
                                             const AttentionOptions& options = {}) {
  AttentionRoute route;
  routing::choose_forward(route, problem, device, options);
  routing::choose_backward(route, problem, device, options);
  return route;
}

// ---- decode_attention

namespace routing {

// The same as attention of a prompt to a cache.
inline AttentionProblem as_prompt(const DecodeProblem& p) {
  const auto strides = [&](const KvStrides& s) { return HeadStrides{s.page, s.token, s.head}; };
  return {.batch = p.batch,
          .q_tokens = p.tokens,
          .k_tokens = p.capacity,
          .heads = p.heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .q = {p.tokens * p.heads * p.head_dim, p.heads * p.head_dim, p.head_dim},
          .k = strides(p.k),
          .v = strides(p.v),
          .grad_y = {},
          .dtype = p.dtype,
          .aligned = p.aligned,
          .page_size = p.paged ? p.page_size : 0,
          .pages = p.paged ? p.pages : 0};
}

// Where decode_attention.cuh takes a call, too, the kernels of prompts do if they need less time. That reads all keys
// of a head for each 16 queries of it, and these for each 128 of a query head, in waves of one tile per SM. So the keys
// do not matter, and the two take as long where the SMs have so many of the former for each tile of the latter. H200,
// µs for 8192 keys, decode_attention.cuh / wgmma:
//
//   heads, head_dim, batch | 16 tokens | 32        | 64        | 128       | 512
//   -----------------------|-----------|-----------|-----------|-----------|------------
//   28 + 4, 128, 1         | 37 / 144  | 66 / 142  | 119 / 143 | 227 / 112 | 876 / 115
//   32 + 32, 128, 8        | 272 / 279 | 540 / 279 | 1060/ 284 | 2106/ 272 | 8338/ 925
//   14 + 2, 64, 1          | 17 / 121  | 23 / 121  | 37 / 122  | 61 / 89   | 203 / 86
//   14 + 2, 64, 8          | 63 / 119  | 109 / 120 | 202 / 121 | 394 / 86  | 1542/ 326
//   16 + 8, 256, 8         | 187 / 226 | 440 / 227 | 986 / 229 | 1951/ 224 | 5722/ 817
constexpr double kWorkOfTile64 = 1.9, kWorkOfTile128 = 1.1, kWorkOfTile256 = 0.8;
constexpr double kSmallPages = 1.5, kMmaSlower = 2.5;  // times that
constexpr int64_t kPromptTokensElsePlain = 4;

inline bool prompt_is_faster(const DecodeProblem& p, const DeviceInfo& device, const AttentionOptions& options) {
  const AttentionProblem prompt = as_prompt(p);
  const bool by_wgmma = attention_by_wgmma(prompt, device, options).taken;
  const AttentionPlan plan = plan_attention(prompt, by_wgmma, device.sm_count);
  const double waves =
      static_cast<double>(tiles_of(tiles_of(p.tokens, plan.queries) * p.batch * p.heads, std::max(device.sm_count, 1)));
  const double work =
      static_cast<double>(tiles_of(p.heads / p.kv_heads * p.tokens, 16) * p.batch * p.kv_heads) / device.sm_count;
  double limit = plan.head_columns <= 64 ? kWorkOfTile64 : plan.head_columns <= 128 ? kWorkOfTile128 : kWorkOfTile256;
  if (!by_wgmma) {
    limit *= kMmaSlower;
  } else if (p.paged && p.page_size < plan.keys) {
    limit *= kSmallPages;
  }
  return work > limit * waves;
}

// `else_fast`: decode_attention.cuh takes it.
inline bool takes_prompt_kernels(const DecodeProblem& p, bool else_fast, const DeviceInfo& device,
                                 const AttentionOptions& options) {
  if (p.fused || p.tokens < 2 || p.pages > INT32_MAX) return false;
  const AttentionProblem prompt = as_prompt(p);
  if (!attention_supported(prompt).taken || !attention_is_fast(prompt).taken) return false;
  if (options.min_prompt > 0) return p.tokens >= options.min_prompt;
  return else_fast ? prompt_is_faster(p, device, options) : p.tokens >= kPromptTokensElsePlain;
}

}  // namespace routing

inline DecodeRoute choose_decode_route(const DecodeProblem& problem, const DeviceInfo& device,
                                       const AttentionOptions& options = {}) {
  using namespace routing;
  const DecodeProblem& p = problem;
  if (p.batch == 0 || p.tokens == 0 || p.heads == 0 || p.kv_heads == 0 || p.head_dim == 0) {
    return {.reason = "there is nothing to compute"};
  }
  if (p.dtype == Dtype::kFloat64) return {.reason = "float64: on the CPU only"};
  if (p.head_dim > kMaxHeadDim) return {.reason = "head_dim is above 512"};
  DecodeRoute route{.variant = DecodeVariant::kPlain};
  Verdict verdict = decode_supported(p);
  const bool by_tma = device.compute_capability >= 90;
  if (verdict.taken) verdict = decode_fits(p, plan_decode_attention(p, device), device);
  if (verdict.taken && by_tma) {
    if (const Verdict maps = decode_maps(p, options); !maps.taken) verdict = maps;
  }
  route.reason = verdict.reason;
  if (takes_prompt_kernels(p, verdict.taken, device, options)) {
    route.variant = DecodeVariant::kPrompt;
    route.reason = "many tokens of a sequence";
    return route;
  }
  if (!verdict.taken) return route;
  route.variant = by_tma ? DecodeVariant::kTma : DecodeVariant::kCpAsync;
  route.sequences = std::min(p.batch, sequences_per_launch(p));
  DecodeProblem part = p;
  part.batch = route.sequences;
  route.plan = route.last = plan_decode_attention(part, device);
  if (const int64_t rest = p.batch % route.sequences; rest != 0) {
    part.batch = rest;
    route.last = plan_decode_attention(part, device);
  }
  route.shared_bytes = static_cast<size_t>(route.plan.layout(p.head_dim).bytes);
  route.blocks_per_sm = decode_blocks_per_sm(p.head_dim, route.plan.query_mma_tiles, route.shared_bytes, device);
  route.workspace_bytes = std::max(workspace_of(route.plan, p.head_dim), workspace_of(route.last, p.head_dim));
  return route;
}

}  // namespace llmk::kernels
