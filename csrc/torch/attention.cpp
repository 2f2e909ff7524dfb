// decode_attention, rope_kv_write and both in one.
#include <algorithm>
#include <cmath>

#include "backend.h"
#include "cpu/attention.h"
#include "heads.h"
#include "parts.h"
#include "positions.h"
#if LLMK_CUDA
#include "kernels/attention/decode_attention.h"
#endif

namespace llmk {
namespace {

using torch::stable::detail::StableLibrary;

// The arguments of an attention besides the queries.
struct AttentionInputs {
  Argument k_cache, v_cache;  // (batch, capacity, kv_heads, head_dim), or pages with a block table
  const Tensor& cache_seqlens;
  const std::optional<Tensor>&cache_leftpad, &block_table;
  std::optional<double> softmax_scale;
  int64_t window_left;
  double softcap;
};

// The tables and positions by which one new token per sequence is rotated.
struct Rotation {
  const Tensor &cos, &sin, &positions;
  int64_t rotary_dim;
};

// RMSNorm of q or k before their rotation, where there is a weight: of each head, or of all heads of a token together.
struct QkNorms {
  Argument q_weight, k_weight;  // (head_dim,), or (heads * head_dim,) and (kv_heads * head_dim,)
  RmsNormOptions options;
  bool row_wise;
};

// The two caches, [batch, capacity, ...] or, with a block table, [pages, page_size, ...], for queries of `heads` heads
// and the dtype of `model`.
void check_caches(const char* op, const Argument& model, int64_t batch, int64_t heads, const Argument& k_cache,
                  const Argument& v_cache, const std::optional<Tensor>& block_table) {
  const char* axes = block_table ? "(pages, page_size, kv_heads, head_dim)" : "(batch, capacity, kv_heads, head_dim)";
  check_heads(op, k_cache, axes);
  check_dtype(op, k_cache, model);
  check_like(op, v_cache, k_cache);
  LLMK_CHECK(block_table || k_cache->size(0) == batch, op, k_cache.name, " must have the batch of ", model.name, ", ",
             batch, ", got shape ", shape(*k_cache));
  check_head_counts(op, model, heads, k_cache, k_cache->size(2));
  for (const Argument& cache : {k_cache, v_cache}) {
    LLMK_CHECK(has_unit_last_stride(*cache), op, cache.name, " must be contiguous along head_dim, got strides ",
               text(cache->strides()));
  }
  if (!block_table) return;
  LLMK_CHECK(block_table->scalar_type() == ScalarType::Int, op, "block_table must be int32, got ",
             name(block_table->scalar_type()));
  LLMK_CHECK(block_table->dim() == 2 && block_table->size(0) == batch, op, "block_table must have shape (", batch,
             ", pages of a sequence), got ", shape(*block_table));
}

// For `heads` query heads of one token in each of `batch` sequences; `model` has their dtype.
void check_attention(const char* op, const Argument& model, int64_t batch, int64_t heads,
                     const AttentionInputs& inputs) {
  check_caches(op, model, batch, heads, inputs.k_cache, inputs.v_cache, inputs.block_table);
  check_per_sequence(op, {"cache_seqlens", inputs.cache_seqlens}, batch);
  check_per_sequence(op, {"cache_leftpad", inputs.cache_leftpad}, batch);
  check_finite(op, "softmax_scale", inputs.softmax_scale.value_or(1));
  LLMK_CHECK(inputs.window_left >= -1, op, "window_left must be at least -1 (unlimited), got ", inputs.window_left);
  check_not_negative(op, "softcap", inputs.softcap);
}

// Checks that queries have the head_dim of the cache.
void check_head_dim(const char* op, const Tensor& q, const Tensor& k_cache) {
  LLMK_CHECK(k_cache.size(3) == q.size(3), op, "k_cache must have the head_dim of q, ", q.size(3), ", got shape ",
             shape(k_cache));
}

// `table`: block_table, contiguous; it has to live as long as the result.
KvCache kv_cache(const Tensor& k_cache, const Tensor& v_cache, const std::optional<Tensor>& table) {
  const int64_t page_size = k_cache.size(1);
  return {k_cache.mutable_data_ptr(),
          v_cache.mutable_data_ptr(),
          k_cache.stride(0),
          k_cache.stride(1),
          k_cache.stride(2),
          v_cache.stride(0),
          v_cache.stride(1),
          v_cache.stride(2),
          k_cache.size(0),
          page_size,
          static_cast<const int32_t*>(data(table)),
          table ? table->stride(0) : 0,
          table ? table->size(1) * page_size : page_size};
}

// Checks that keys [0, count) of a sequence are in pages that exist. On the CPU only, where this costs nothing.
void check_pages(const char* op, const KvCache& cache, int64_t b, int64_t count) {
  if (cache.block_table == nullptr) return;
  for (int64_t i = 0; i * cache.page_size < count; ++i) {
    const int64_t page = cache.block_table[b * cache.table_stride + i];
    LLMK_CHECK(page >= 0 && page < cache.pages, op, "block_table must lie in [0, ", cache.pages,
               ") for live keys, but [", b, ", ", i, "] is ", page);
  }
}

// The parameters of an attention, and the tensors that they point to.
struct Attention {
  DecodeAttentionParams params{};
  Tensor cache_seqlens;
  std::optional<Tensor> cache_leftpad, table;
};

// Everything but `out`, from q with contiguous heads.
Attention prepare(const Tensor& q, const AttentionInputs& inputs) {
  const Tensor &k_cache = *inputs.k_cache, &v_cache = *inputs.v_cache;
  Attention attention{{},
                      with_unit_last_stride(inputs.cache_seqlens),
                      contiguous(inputs.cache_leftpad),
                      contiguous(inputs.block_table)};
  DecodeAttentionParams& params = attention.params;
  params.q = q.const_data_ptr();
  params.q_batch = q.stride(0);
  params.q_token = q.stride(1);
  params.q_head = q.stride(2);
  params.cache = kv_cache(k_cache, v_cache, attention.table);
  params.cache_seqlens = static_cast<const int32_t*>(attention.cache_seqlens.const_data_ptr());
  params.cache_leftpad = static_cast<const int32_t*>(data(attention.cache_leftpad));
  params.batch = q.size(0);
  params.tokens = q.size(1);
  params.heads = q.size(2);
  params.kv_heads = k_cache.size(2);
  params.head_dim = q.size(3);
  params.softmax_scale = inputs.softmax_scale.value_or(1 / std::sqrt(static_cast<double>(params.head_dim)));
  params.window_left = std::min<int64_t>(inputs.window_left, INT32_MAX);
  params.softcap = inputs.softcap;
  return attention;
}

#if LLMK_CUDA
cudaError_t launch(const char* op, DecodeAttentionParams& params, Dtype dtype, const Tensor& q, cudaStream_t stream) {
  std::optional<Tensor> workspace;  // kept until the launch; later uses of the memory are ordered after the kernel
  const kernels::DecodeRoute route = kernels::route_decode_attention(params, dtype);
  LLMK_CHECK(route.variant != kernels::DecodeVariant::kNone, op, "q must have a head_dim of at most ",
             kernels::kMaxHeadDim, ", got ", params.head_dim);
  if (route.is_fast()) {
    const int64_t size = static_cast<int64_t>(route.workspace_bytes);
    workspace = empty({&size, 1}, ScalarType::Byte, q);
    params.workspace = workspace->mutable_data_ptr();
    check_cuda(op, kernels::decode_attention_counters(stream, params.counters));
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
  parallel_for(plan.tasks, rows * longest / plan.tasks * params.head_dim,
               [&](int64_t begin, int64_t end) { cpu::decode_attention(params, plan, dtype, begin, end); });
  if (plan.splits == 1) return;
  parallel_for(rows, plan.splits * params.head_dim,
               [&](int64_t begin, int64_t end) { cpu::merge_attention(params, plan, dtype, begin, end); });
}

Tensor run_attention(const char* op, const Tensor& given_q, const AttentionInputs& inputs) {
  const Dtype dtype = to_dtype(op, {"q", given_q});
  const Tensor q = with_unit_last_stride(given_q);
  Attention attention = prepare(q, inputs);
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

Tensor decode_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& cache_seqlens,
                        std::optional<Tensor> cache_leftpad, std::optional<Tensor> block_table,
                        std::optional<double> softmax_scale, int64_t window_left, double softcap) {
  constexpr const char* op = "decode_attention";
  check_tensors(op, {{"q", q},
                     {"k_cache", k_cache},
                     {"v_cache", v_cache},
                     {"cache_seqlens", cache_seqlens},
                     {"cache_leftpad", cache_leftpad},
                     {"block_table", block_table}});
  to_dtype(op, {"q", q});
  check_heads(op, {"q", q}, "(batch, tokens, heads, head_dim)");
  const AttentionInputs inputs{{"k_cache", k_cache}, {"v_cache", v_cache}, cache_seqlens, cache_leftpad,
                               block_table,          softmax_scale,        window_left,   softcap};
  check_attention(op, {"q", q}, q.size(0), q.size(2), inputs);
  check_head_dim(op, q, k_cache);
  return run_attention(op, q, inputs);
}

// Checks the tables of cos and sin by position; returns how many elements of a head are rotated, all by default.
int64_t check_tables(const char* op, const Argument& model, const Argument& cos, const Argument& sin, int64_t head_dim,
                     std::optional<int64_t> rotary_dim) {
  check_dtype(op, cos, model);
  LLMK_CHECK(head_dim % 2 == 0, op, "head_dim must be even, got ", head_dim);
  const int64_t dim = rotary_dim.value_or(head_dim);
  LLMK_CHECK(dim >= 0 && dim % 2 == 0 && dim <= head_dim, op, "rotary_dim must be even and in [0, ", head_dim,
             "], head_dim, got ", dim);
  const char* name = rotary_dim ? "rotary_dim" : "head_dim";
  LLMK_CHECK(cos->dim() == 2 && (cos->size(1) == dim || cos->size(1) * 2 == dim), op, "cos must be a table of ", name,
             " or ", name, " / 2 columns (", name, " is ", dim, "), got ", shape(*cos));
  check_like(op, sin, cos);
  return dim;
}

// `k_cache` has the heads of k.
void check_norms(const char* op, const Argument& model, int64_t heads, const Tensor& k_cache, const QkNorms& norms) {
  check_options(op, norms.options);
  const int64_t kv_heads = k_cache.size(2), head_dim = k_cache.size(3);
  if (norms.row_wise) {
    check_vector(op, norms.q_weight, model, heads * head_dim, "heads * head_dim");
    check_vector(op, norms.k_weight, model, kv_heads * head_dim, "kv_heads * head_dim");
  } else {
    check_vector(op, norms.q_weight, model, head_dim, "head_dim");
    check_vector(op, norms.k_weight, model, head_dim, "head_dim");
  }
}

RopeTables rope_tables(const Tensor& cos, const Tensor& sin, int64_t rotary_dim) {
  return {cos.const_data_ptr(), sin.const_data_ptr(),     cos.stride(0), sin.stride(0), cos.size(0),
          rotary_dim,           cos.size(1) != rotary_dim};
}

// The norms of a kernel, and the weights that they point to.
struct Norms {
  explicit Norms(const QkNorms& norms)
      : q_weight(contiguous(norms.q_weight.optional())),
        k_weight(contiguous(norms.k_weight.optional())),
        params{data(q_weight), data(k_weight), norms.options, norms.row_wise} {}

  std::optional<Tensor> q_weight, k_weight;
  QkNorm params;
};

struct NewTokens {
  const Tensor &q, &k, &v, &cos, &sin, &position_ids;
  int64_t rotary_dim;
};

void write(const char* op, const NewTokens& tokens, const QkNorms& qk_norms, const AttentionInputs& to,
           bool interleaved) {
  const Tensor& q = tokens.q;
  if (q.numel() == 0 && tokens.k.numel() == 0) return;
  const Dtype dtype = to_dtype(op, {"q", q});
  const Tensor k = with_unit_last_stride(tokens.k), v = with_unit_last_stride(tokens.v);
  const Tensor cos = with_unit_last_stride(tokens.cos), sin = with_unit_last_stride(tokens.sin);
  const Tensor cache_seqlens = with_unit_last_stride(to.cache_seqlens);
  const std::optional<Tensor> table = contiguous(to.block_table);
  const Norms norms(qk_norms);
  RopeKvWriteParams params{};
  params.q = q.mutable_data_ptr();
  params.k = k.const_data_ptr();
  params.v = v.const_data_ptr();
  params.q_batch = q.stride(0), params.q_token = q.stride(1), params.q_head = q.stride(2);
  params.k_batch = k.stride(0), params.k_token = k.stride(1), params.k_head = k.stride(2);
  params.v_batch = v.stride(0), params.v_token = v.stride(1), params.v_head = v.stride(2);
  params.cache = kv_cache(*to.k_cache, *to.v_cache, table);
  params.batch = q.size(0);
  params.tokens = q.size(1);
  params.heads = q.size(2);
  params.kv_heads = k.size(2);
  params.head_dim = q.size(3);
  params.norm = norms.params;
  params.rope = rope_tables(cos, sin, tokens.rotary_dim);
  params.position_ids = tokens.position_ids.const_data_ptr();
  params.position_ids_int64 = tokens.position_ids.scalar_type() == ScalarType::Long;
  std::tie(params.positions_batch, params.positions_token) = batch_and_token_strides(tokens.position_ids, 0);
  params.cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr());
  params.interleaved = interleaved;
  on_device(op, q, LLMK_CUDA_ONLY([&](auto stream) { return kernels::rope_kv_write(params, dtype, stream); }), [&] {
    for (int64_t b = 0; b < params.batch; ++b) {
      for (int64_t t = 0; t < params.tokens; ++t) {
        const int64_t at = b * params.positions_batch + t * params.positions_token;
        const int64_t position = params.position_ids_int64 ? static_cast<const int64_t*>(params.position_ids)[at]
                                                           : static_cast<const int32_t*>(params.position_ids)[at];
        LLMK_CHECK(position >= 0 && position < params.rope.rows, op, "position_ids must lie in [0, ", params.rope.rows,
                   "), the rows of cos, but that of [", b, ", ", t, "] is ", position);
        const int64_t place = params.cache_seqlens[b] - params.tokens + t;
        if (params.cache.block_table == nullptr || place < 0 || place >= params.cache.capacity) continue;
        const int64_t page = params.cache.block_table[b * params.cache.table_stride + place / params.cache.page_size];
        LLMK_CHECK(page >= 0 && page < params.cache.pages, op, "block_table must lie in [0, ", params.cache.pages,
                   ") for token ", place, " of sequence ", b, ", got ", page);
      }
    }
    parallel_for(params.batch * params.tokens, (params.heads + 2 * params.kv_heads) * params.head_dim,
                 [&](int64_t begin, int64_t end) { cpu::rope_kv_write(params, dtype, begin, end); });
  });
}

void rope_kv_write(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                   const Tensor& position_ids, const Tensor& k_cache, const Tensor& v_cache,
                   const Tensor& cache_seqlens, std::optional<Tensor> block_table, bool interleaved,
                   std::optional<Tensor> q_norm_weight, std::optional<Tensor> k_norm_weight, double eps,
                   double weight_offset, bool cast_before_weight, bool row_wise, std::optional<int64_t> rotary_dim) {
  constexpr const char* op = "rope_kv_write";
  check_tensors(op, {{"q", q, Access::kWrite},
                     {"k", k},
                     {"v", v},
                     {"cos", cos},
                     {"sin", sin},
                     {"position_ids", position_ids},
                     {"k_cache", k_cache, Access::kWrite},
                     {"v_cache", v_cache, Access::kWrite},
                     {"cache_seqlens", cache_seqlens},
                     {"block_table", block_table},
                     {"q_norm_weight", q_norm_weight},
                     {"k_norm_weight", k_norm_weight}});
  to_dtype(op, {"q", q});
  check_heads(op, {"q", q}, "(batch, tokens, heads, head_dim)");
  LLMK_CHECK(has_unit_last_stride(q), op, "q must be contiguous along head_dim to be rotated in place, got strides ",
             text(q.strides()));
  const int64_t batch = q.size(0), tokens = q.size(1), head_dim = q.size(3);
  const AttentionInputs to{{"k_cache", k_cache}, {"v_cache", v_cache}, cache_seqlens, {}, block_table, {}, -1, 0};
  check_attention(op, {"q", q}, batch, q.size(2), to);
  check_head_dim(op, q, k_cache);
  const std::array<int64_t, 4> expected{batch, tokens, k_cache.size(2), head_dim};
  for (const Argument& argument : {Argument{"k", k}, Argument{"v", v}}) {
    check_heads(op, argument, "(batch, tokens, kv_heads, head_dim)");
    check_dtype(op, argument, {"q", q});
    LLMK_CHECK(argument->sizes().equals({expected.data(), 4}), op, argument.name, " must have shape ",
               text({expected.data(), 4}), ", got ", shape(*argument));
  }
  const QkNorms norms{{"q_norm_weight", q_norm_weight},
                      {"k_norm_weight", k_norm_weight},
                      {eps, weight_offset, cast_before_weight},
                      row_wise};
  const int64_t rotated = check_tables(op, {"q", q}, {"cos", cos}, {"sin", sin}, head_dim, rotary_dim);
  check_norms(op, {"q", q}, q.size(2), k_cache, norms);
  check_position_ids(op, position_ids, batch, tokens);
  write(op, {q, k, v, cos, sin, position_ids, rotated}, norms, to, interleaved);
}

// rope_kv_write, then decode_attention, for one new token per sequence from a packed q|k|v: one launch where the fast
// kernel supports it. The new token is at cache_seqlens - 1.
Tensor rope_decode_attention(const char* op, const Tensor& qkv, const Rotation& rotation, const QkNorms& norms,
                             const AttentionInputs& inputs, int64_t heads, [[maybe_unused]] bool prefetch_cache) {
  const Tensor& k_cache = *inputs.k_cache;
  const int64_t batch = qkv.size(0), row = qkv.stride(0), kv_heads = k_cache.size(2), head_dim = k_cache.size(3);
  const auto part = [&](int64_t first, int64_t count) {
    return view(qkv, {batch, 1, count, head_dim}, {row, row, head_dim, 1}, first * head_dim);
  };
  const Tensor q = part(0, heads), k = part(heads, kv_heads), v = part(heads + kv_heads, kv_heads);
  const int64_t width = heads * head_dim;
#if LLMK_CUDA
  if (q.is_cuda() && q.numel() > 0) {
    const Dtype dtype = to_dtype(op, {"qkv", qkv});
    const Tensor positions = with_unit_last_stride(rotation.positions);
    const Tensor cos = with_unit_last_stride(rotation.cos), sin = with_unit_last_stride(rotation.sin);
    const Norms weights(norms);
    Attention attention = prepare(q, inputs);
    DecodeAttentionParams& params = attention.params;
    params.new_k = k.const_data_ptr();
    params.new_v = v.const_data_ptr();
    params.new_k_batch = params.new_v_batch = row;
    params.new_k_head = params.new_v_head = head_dim;
    params.rope = rope_tables(cos, sin, rotation.rotary_dim);
    params.positions = static_cast<const int32_t*>(positions.const_data_ptr());
    params.norm = weights.params;
    params.prefetch_cache = prefetch_cache;
    const std::array<int64_t, 2> sizes{batch, width};
    Tensor out = empty({sizes.data(), 2}, dtype_code(q), q);
    params.out = out.mutable_data_ptr();
    if (kernels::route_decode_attention(params, dtype).is_fast()) {
      on_device(
          op, q, [&](auto stream) { return launch(op, params, dtype, q, stream); }, [] {});
      return out;
    }
  }
#endif
  const Tensor position_ids = view(rotation.positions, {batch, 1}, {rotation.positions.stride(0), 1}, 0);
  write(op, {q, k, v, rotation.cos, rotation.sin, position_ids, rotation.rotary_dim}, norms, inputs, false);
  return view(run_attention(op, q, inputs), {batch, width}, {width, 1}, 0);
}

Tensor rope_decode_attention_op(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                                const Tensor& cache_seqlens, std::optional<Tensor> cache_leftpad, const Tensor& k_cache,
                                const Tensor& v_cache, std::optional<Tensor> block_table, int64_t heads,
                                std::optional<double> softmax_scale, int64_t window_left, double softcap,
                                bool prefetch_cache, std::optional<Tensor> q_norm_weight,
                                std::optional<Tensor> k_norm_weight, double eps, double weight_offset,
                                bool cast_before_weight, bool row_wise, std::optional<int64_t> rotary_dim) {
  constexpr const char* op = "rope_decode_attention";
  check_tensors(op, {{"qkv", qkv, Access::kWrite},
                     {"cos", cos},
                     {"sin", sin},
                     {"positions", positions},
                     {"cache_seqlens", cache_seqlens},
                     {"cache_leftpad", cache_leftpad},
                     {"k_cache", k_cache, Access::kWrite},
                     {"v_cache", v_cache, Access::kWrite},
                     {"block_table", block_table},
                     {"q_norm_weight", q_norm_weight},
                     {"k_norm_weight", k_norm_weight}});
  to_dtype(op, {"qkv", qkv});
  check_not_negative(op, "heads", static_cast<double>(heads));
  check_heads(op, {"k_cache", k_cache}, "(batch or pages, tokens, kv_heads, head_dim)");
  const int64_t head_dim = k_cache.size(3), columns = (heads + 2 * k_cache.size(2)) * head_dim;
  LLMK_CHECK(qkv.dim() == 2 && qkv.size(1) == columns && has_unit_last_stride(qkv), op,
             "qkv must have shape (batch, (heads + 2 kv_heads) head_dim), ", columns, " contiguous columns, got ",
             shape(qkv));
  const AttentionInputs inputs{{"k_cache", k_cache}, {"v_cache", v_cache}, cache_seqlens, cache_leftpad,
                               block_table,          softmax_scale,        window_left,   softcap};
  const QkNorms norms{{"q_norm_weight", q_norm_weight},
                      {"k_norm_weight", k_norm_weight},
                      {eps, weight_offset, cast_before_weight},
                      row_wise};
  check_attention(op, {"qkv", qkv}, qkv.size(0), heads, inputs);
  const int64_t rotated = check_tables(op, {"qkv", qkv}, {"cos", cos}, {"sin", sin}, head_dim, rotary_dim);
  check_norms(op, {"qkv", qkv}, heads, k_cache, norms);
  check_per_sequence(op, {"positions", positions}, qkv.size(0));
  return rope_decode_attention(op, qkv, {cos, sin, positions, rotated}, norms, inputs, heads, prefetch_cache);
}

void register_ops(StableLibrary& ops) {
  ops.impl("decode_attention", TORCH_BOX(&decode_attention));
  ops.impl("rope_kv_write", TORCH_BOX(&rope_kv_write));
  ops.impl("rope_decode_attention", TORCH_BOX(&rope_decode_attention_op));
}

}  // namespace

LLMK_IMPLEMENT(register_ops)

}  // namespace llmk
