// decode_attention, rope_kv_write and both in one.
#include <algorithm>
#include <cmath>

#include "backend.h"
#include "cpu/attention.h"
#include "step.h"
#if LLMK_CUDA
#include "kernels/attention/decode_attention.h"
#include "kernels/attention/decode_attention_any.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// int32 (batch,), contiguous.
Tensor check_per_sequence(const char* op, const Argument& argument, const Argument& model, int64_t batch) {
  const Tensor& tensor = argument.tensor;
  check_same_device(op, argument, model);
  LLMK_CHECK(tensor.scalar_type() == ScalarType::Int, op, argument.name, " must be int32, got ",
             name(tensor.scalar_type()));
  LLMK_CHECK(tensor.dim() == 1 && tensor.size(0) == batch, op, argument.name, " must have shape [", batch,
             "] (the batch of q), got ", shape(tensor));
  return with_unit_last_stride(tensor);
}

void check_heads(const char* op, const Argument& argument, const char* axes) {
  LLMK_CHECK(argument.tensor.dim() == 4, op, argument.name, " must have shape ", axes, ", got ",
             shape(argument.tensor));
}

// The two caches, [batch, capacity, ...] or, with a block table, [pages, page_size, ...].
KvCache check_cache(const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                    const std::optional<Tensor>& block_table, std::optional<Tensor>& kept_table) {
  const char* axes = block_table ? "(pages, page_size, kv_heads, head_dim)" : "(batch, capacity, kv_heads, head_dim)";
  check_heads(op, {"k_cache", k_cache}, axes);
  check_same_dtype_and_device(op, {"k_cache", k_cache}, {"q", q});
  check_like(op, {"v_cache", v_cache}, {"k_cache", k_cache});
  const int64_t batch = q.size(0), heads = q.size(2), kv_heads = k_cache.size(2);
  LLMK_CHECK(block_table || k_cache.size(0) == batch, op, "k_cache must have the batch of q, ", batch, ", got shape ",
             shape(k_cache));
  LLMK_CHECK(k_cache.size(3) == q.size(3), op, "k_cache must have the head_dim of q, ", q.size(3), ", got shape ",
             shape(k_cache));
  LLMK_CHECK(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, op,
             "q must have a multiple of the heads of k_cache, got ", heads, " and ", kv_heads);
  for (const Argument& cache : {Argument{"k_cache", k_cache}, Argument{"v_cache", v_cache}}) {
    LLMK_CHECK(has_unit_last_stride(cache.tensor), op, cache.name, " must be contiguous along head_dim, got strides ",
               text(cache.tensor.strides()));
  }
  KvCache cache{k_cache.mutable_data_ptr(),
                v_cache.mutable_data_ptr(),
                k_cache.stride(0),
                k_cache.stride(1),
                k_cache.stride(2),
                v_cache.stride(0),
                v_cache.stride(1),
                v_cache.stride(2),
                k_cache.size(0),
                k_cache.size(1),
                nullptr,
                0,
                k_cache.size(1)};
  if (block_table) {
    check_same_device(op, {"block_table", *block_table}, {"q", q});
    LLMK_CHECK(block_table->scalar_type() == ScalarType::Int, op, "block_table must be int32, got ",
               name(block_table->scalar_type()));
    LLMK_CHECK(block_table->dim() == 2 && block_table->size(0) == batch, op, "block_table must have shape (", batch,
               ", pages of a sequence), got ", shape(*block_table));
    kept_table = with_unit_last_stride(*block_table);
    cache.block_table = static_cast<const int32_t*>(kept_table->const_data_ptr());
    cache.table_stride = kept_table->stride(0);
    cache.capacity = block_table->size(1) * cache.page_size;
  }
  return cache;
}

// On the CPU, where it costs nothing: that keys [0, count) of a sequence are in pages that exist.
void check_pages(const char* op, const KvCache& cache, int64_t b, int64_t count) {
  if (cache.block_table == nullptr) return;
  for (int64_t i = 0; i * cache.page_size < count; ++i) {
    const int64_t page = cache.block_table[b * cache.table_stride + i];
    LLMK_CHECK(page >= 0 && page < cache.pages, op, "block_table must lie in [0, ", cache.pages,
               ") for live keys, but [", b, ", ", i, "] is ", page);
  }
}

// The parameters of an attention, and what they point to.
struct Attention {
  DecodeAttentionParams params{};
  Tensor cache_seqlens;
  std::optional<Tensor> cache_leftpad, table;
};

// Everything but `out`, from q with contiguous heads.
Attention prepare(const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                  const Tensor& given_seqlens, const std::optional<Tensor>& given_leftpad,
                  const std::optional<Tensor>& block_table, std::optional<double> softmax_scale, int64_t window_left,
                  double softcap) {
  const int64_t batch = q.size(0);
  std::optional<Tensor> table, cache_leftpad;
  const KvCache cache = check_cache(op, q, k_cache, v_cache, block_table, table);
  const Tensor cache_seqlens = check_per_sequence(op, {"cache_seqlens", given_seqlens}, {"q", q}, batch);
  if (given_leftpad) cache_leftpad = check_per_sequence(op, {"cache_leftpad", *given_leftpad}, {"q", q}, batch);
  LLMK_CHECK(window_left >= -1, op, "window_left must be at least -1 (unlimited), got ", window_left);
  LLMK_CHECK(softcap >= 0, op, "softcap must not be negative, got ", softcap);
  Attention attention{{}, cache_seqlens, cache_leftpad, table};
  DecodeAttentionParams& params = attention.params;
  params.q = q.const_data_ptr();
  params.q_batch = q.stride(0);
  params.q_token = q.stride(1);
  params.q_head = q.stride(2);
  params.cache = cache;
  params.cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr());
  params.cache_leftpad = cache_leftpad ? static_cast<const int32_t*>(cache_leftpad->const_data_ptr()) : nullptr;
  params.batch = batch;
  params.tokens = q.size(1);
  params.heads = q.size(2);
  params.kv_heads = k_cache.size(2);
  params.head_dim = q.size(3);
  params.softmax_scale = softmax_scale.value_or(1 / std::sqrt(static_cast<double>(params.head_dim)));
  params.window_left = std::min<int64_t>(window_left, INT32_MAX);
  params.softcap = softcap;
  return attention;
}

#if LLMK_CUDA
cudaError_t launch(const char* op, DecodeAttentionParams& params, Dtype dtype, const Tensor& q, cudaStream_t stream) {
  std::optional<Tensor> workspace;  // kept until the kernel is launched; the allocator orders its reuse behind it
  if (kernels::decode_attention_is_fast(params, dtype)) {
    size_t bytes = 0;
    check_cuda(op, kernels::decode_attention_workspace_bytes(params, bytes));
    const int64_t size = static_cast<int64_t>(bytes);
    workspace = empty({&size, 1}, ScalarType::Byte, q);
    params.workspace = workspace->mutable_data_ptr();
    check_cuda(op, kernels::decode_attention_counters(stream, params.counters));
  } else {
    LLMK_CHECK(params.head_dim <= kernels::kMaxHeadDim, op, "q must have a head_dim of at most ", kernels::kMaxHeadDim,
               ", got ", params.head_dim);
  }
  return kernels::decode_attention(params, dtype, stream);
}
#endif

void run_on_cpu(DecodeAttentionParams& params, Dtype dtype, int64_t longest, const Tensor& q) {
  const cpu::AttentionPlan plan = cpu::plan_decode_attention(params, longest);
  const int64_t bytes = static_cast<int64_t>(cpu::attention_partials_bytes(params, plan, dtype));
  const Tensor partials = empty({&bytes, 1}, ScalarType::Byte, q);
  params.workspace = partials.mutable_data_ptr();
  const int64_t rows = params.batch * params.tokens * params.heads;
  parallel_for(plan.units, rows * longest / plan.units * params.head_dim,
               [&](int64_t begin, int64_t end) { cpu::decode_attention(params, plan, dtype, begin, end); });
  if (plan.splits == 1) return;
  parallel_for(rows, plan.splits * params.head_dim,
               [&](int64_t begin, int64_t end) { cpu::merge_attention(params, plan, dtype, begin, end); });
}

Tensor decode_attention(const Tensor& given_q, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& cache_seqlens, std::optional<Tensor> cache_leftpad,
                        std::optional<Tensor> block_table, std::optional<double> softmax_scale, int64_t window_left,
                        double softcap) {
  constexpr const char* op = "decode_attention";
  const Dtype dtype = to_dtype(op, {"q", given_q});
  check_heads(op, {"q", given_q}, "(batch, tokens, heads, head_dim)");
  const Tensor q = with_unit_last_stride(given_q);
  Attention attention =
      prepare(op, q, k_cache, v_cache, cache_seqlens, cache_leftpad, block_table, softmax_scale, window_left, softcap);
  DecodeAttentionParams& params = attention.params;
  Tensor out = empty_rows(q);
  if (q.numel() == 0) return out;
  params.out = out.mutable_data_ptr();
  on_device(op, q, LLMK_CUDA_ONLY([&](auto stream) { return launch(op, params, dtype, q, stream); }), [&] {
    int64_t longest = 0;
    for (int64_t b = 0; b < params.batch; ++b) {
      LLMK_CHECK(params.cache_seqlens[b] >= 0 && params.cache_seqlens[b] <= params.cache.capacity, op,
                 "cache_seqlens must lie in [0, ", params.cache.capacity, "], the capacity of the cache, but [", b,
                 "] is ", params.cache_seqlens[b]);
      check_pages(op, params.cache, b, params.cache_seqlens[b]);
      longest = std::max<int64_t>(longest, params.cache_seqlens[b]);
    }
    run_on_cpu(params, dtype, longest, q);
  });
  return out;
}

// cos and sin of every position.
void check_tables(const char* op, const Tensor& cos, const Tensor& sin, const Tensor& q) {
  check_same_dtype_and_device(op, {"cos", cos}, {"q", q});
  const int64_t head_dim = q.size(3);
  LLMK_CHECK(cos.dim() == 2 && (cos.size(1) == head_dim || cos.size(1) * 2 == head_dim), op,
             "cos must be a table of head_dim or head_dim / 2 columns (head_dim is ", head_dim, "), got ", shape(cos));
  check_like(op, {"sin", sin}, {"cos", cos});
}

RopeTables rope_tables(const Tensor& cos, const Tensor& sin, int64_t head_dim) {
  return {cos.const_data_ptr(), sin.const_data_ptr(), cos.stride(0),
          sin.stride(0),        cos.size(0),          cos.size(1) != head_dim};
}

void rope_kv_write(const Tensor& q, const Tensor& given_k, const Tensor& given_v, const Tensor& given_cos,
                   const Tensor& given_sin, const Tensor& position_ids, const Tensor& k_cache, const Tensor& v_cache,
                   const Tensor& given_seqlens, std::optional<Tensor> block_table, bool interleaved) {
  constexpr const char* op = "rope_kv_write";
  const Dtype dtype = to_dtype(op, {"q", q});
  check_heads(op, {"q", q}, "(batch, tokens, heads, head_dim)");
  LLMK_CHECK(has_unit_last_stride(q), op, "q must be contiguous along head_dim to be rotated in place, got strides ",
             text(q.strides()));
  RopeKvWriteParams params{};
  std::optional<Tensor> table;
  params.cache = check_cache(op, q, k_cache, v_cache, block_table, table);
  const int64_t batch = q.size(0), tokens = q.size(1), head_dim = q.size(3), kv_heads = k_cache.size(2);
  LLMK_CHECK(head_dim % 2 == 0, op, "q must have an even head_dim, got ", head_dim);
  for (const Argument& argument : {Argument{"k", given_k}, Argument{"v", given_v}}) {
    check_heads(op, argument, "(batch, tokens, kv_heads, head_dim)");
    check_same_dtype_and_device(op, argument, {"q", q});
    const Tensor& x = argument.tensor;
    LLMK_CHECK(x.size(0) == batch && x.size(1) == tokens && x.size(2) == kv_heads && x.size(3) == head_dim, op,
               argument.name, " must have shape [", batch, ", ", tokens, ", ", kv_heads, ", ", head_dim, "], got ",
               shape(x));
  }
  check_tables(op, given_cos, given_sin, q);
  check_same_device(op, {"position_ids", position_ids}, {"q", q});
  const ScalarType type = position_ids.scalar_type();
  LLMK_CHECK(type == ScalarType::Int || type == ScalarType::Long, op, "position_ids must be int32 or int64, got ",
             name(type));
  const bool fits = (position_ids.dim() == 1 && position_ids.size(0) == tokens) ||
                    (position_ids.dim() == 2 && (position_ids.size(0) == 1 || position_ids.size(0) == batch) &&
                     position_ids.size(1) == tokens);
  LLMK_CHECK(fits, op, "position_ids must have shape [", tokens, "], [1, ", tokens, "] or [", batch, ", ", tokens,
             "], got ", shape(position_ids));
  const Tensor cache_seqlens = check_per_sequence(op, {"cache_seqlens", given_seqlens}, {"q", q}, batch);
  if (q.numel() == 0 && given_k.numel() == 0) return;

  const Tensor k = with_unit_last_stride(given_k), v = with_unit_last_stride(given_v);
  const Tensor cos = with_unit_last_stride(given_cos), sin = with_unit_last_stride(given_sin);
  params.q = q.mutable_data_ptr();
  params.k = k.const_data_ptr();
  params.v = v.const_data_ptr();
  params.q_batch = q.stride(0), params.q_token = q.stride(1), params.q_head = q.stride(2);
  params.k_batch = k.stride(0), params.k_token = k.stride(1), params.k_head = k.stride(2);
  params.v_batch = v.stride(0), params.v_token = v.stride(1), params.v_head = v.stride(2);
  params.rope = rope_tables(cos, sin, head_dim);
  params.position_ids = position_ids.const_data_ptr();
  params.position_ids_int64 = type == ScalarType::Long;
  const bool has_batch = position_ids.dim() == 2;
  params.positions_batch = has_batch && position_ids.size(0) > 1 ? position_ids.stride(0) : 0;
  params.positions_token = position_ids.stride(has_batch ? 1 : 0);
  params.cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr());
  params.batch = batch;
  params.tokens = tokens;
  params.heads = q.size(2);
  params.kv_heads = kv_heads;
  params.head_dim = head_dim;
  params.interleaved = interleaved;
  on_device(op, q, LLMK_CUDA_ONLY([&](auto stream) { return kernels::rope_kv_write(params, dtype, stream); }), [&] {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = b * params.positions_batch + t * params.positions_token;
        const int64_t position = params.position_ids_int64 ? static_cast<const int64_t*>(params.position_ids)[at]
                                                           : static_cast<const int32_t*>(params.position_ids)[at];
        LLMK_CHECK(position >= 0 && position < params.rope.rows, op, "position_ids must lie in [0, ", params.rope.rows,
                   "), the rows of cos, but that of [", b, ", ", t, "] is ", position);
        const int64_t place = params.cache_seqlens[b] - tokens + t;
        if (params.cache.block_table == nullptr || place < 0 || place >= params.cache.capacity) continue;
        const int64_t page = params.cache.block_table[b * params.cache.table_stride + place / params.cache.page_size];
        LLMK_CHECK(page >= 0 && page < params.cache.pages, op, "block_table must lie in [0, ", params.cache.pages,
                   ") for token ", place, " of sequence ", b, ", got ", page);
      }
    }
    parallel_for(batch * tokens, (params.heads + 2 * kv_heads) * head_dim,
                 [&](int64_t begin, int64_t end) { cpu::rope_kv_write(params, dtype, begin, end); });
  });
}

}  // namespace

// One new token per sequence, from a packed q|k|v: rope_kv_write, then decode_attention, in one launch where the fast
// kernel takes it. The new token is the one at cache_seqlens - 1.
Tensor rope_decode_attention(const Tensor& qkv, const Tensor& given_cos, const Tensor& given_sin,
                             const Tensor& given_positions, const Tensor& cache_seqlens,
                             std::optional<Tensor> cache_leftpad, const Tensor& k_cache, const Tensor& v_cache,
                             std::optional<Tensor> block_table, int64_t heads, std::optional<double> softmax_scale,
                             int64_t window_left, double softcap, bool prefetch_cache) {
  constexpr const char* op = "rope_decode_attention";
  const Dtype dtype = to_dtype(op, {"qkv", qkv});
  check_heads(op, {"k_cache", k_cache}, "(batch or pages, tokens, kv_heads, head_dim)");
  const int64_t kv_heads = k_cache.size(2), head_dim = k_cache.size(3), columns = (heads + 2 * kv_heads) * head_dim;
  LLMK_CHECK(qkv.dim() == 2 && qkv.size(1) == columns && has_unit_last_stride(qkv), op,
             "qkv must have shape (batch, (heads + 2 kv_heads) head_dim), ", columns, " contiguous columns, got ",
             shape(qkv));
  const int64_t batch = qkv.size(0), row = qkv.stride(0);
  const auto part = [&](int64_t first, int64_t count) {
    return view(qkv, {batch, 1, count, head_dim}, {row, row, head_dim, 1}, first * head_dim);
  };
  const Tensor q = part(0, heads), k = part(heads, kv_heads), v = part(heads + kv_heads, kv_heads);
  Attention attention =
      prepare(op, q, k_cache, v_cache, cache_seqlens, cache_leftpad, block_table, softmax_scale, window_left, softcap);
  const int64_t width = heads * head_dim;
#if LLMK_CUDA
  check_tables(op, given_cos, given_sin, q);
  const Tensor positions = check_per_sequence(op, {"positions", given_positions}, {"q", q}, batch);
  const Tensor cos = with_unit_last_stride(given_cos), sin = with_unit_last_stride(given_sin);
  DecodeAttentionParams& params = attention.params;
  params.new_k = k.const_data_ptr();
  params.new_v = v.const_data_ptr();
  params.new_k_batch = params.new_v_batch = row;
  params.new_k_head = params.new_v_head = head_dim;
  params.rope = rope_tables(cos, sin, head_dim);
  params.positions = static_cast<const int32_t*>(positions.const_data_ptr());
  params.prefetch_cache = prefetch_cache;
  if (q.is_cuda() && q.numel() > 0) {
    const std::array<int64_t, 2> sizes{batch, width};
    Tensor out = empty({sizes.data(), 2}, dtype_code(q), q);
    params.out = out.mutable_data_ptr();
    if (kernels::decode_attention_is_fast(params, dtype)) {
      on_device(
          op, q, [&](auto stream) { return launch(op, params, dtype, q, stream); }, [] {});
      return out;
    }
  }
#endif
  check_per_sequence(op, {"positions", given_positions}, {"q", q}, batch);
  const Tensor position_ids = view(given_positions, {batch, 1}, {given_positions.stride(0), 1}, 0);
  rope_kv_write(q, k, v, given_cos, given_sin, position_ids, k_cache, v_cache, cache_seqlens, block_table, false);
  const Tensor out = decode_attention(q, k_cache, v_cache, cache_seqlens, cache_leftpad, block_table, softmax_scale,
                                      window_left, softcap);
  return view(out, {batch, width}, {width, 1}, 0);
}

namespace {

void register_ops(StableLibrary& ops) {
  ops.impl("decode_attention", TORCH_BOX(&decode_attention));
  ops.impl("rope_kv_write", TORCH_BOX(&rope_kv_write));
  ops.impl("rope_decode_attention", TORCH_BOX(&rope_decode_attention));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
