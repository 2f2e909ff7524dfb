// Decode attention on the CPU, as GPUs before Hopper run it: ring, tensor cores, the merge of warps and of clusters
// through the workspace; sequences as long as each other or not, more and fewer than there are clusters, in one piece
// or in pages. Fails where an output is not that of the formula, or a counter is not put back.
#include "kernels/attention/decode_attention.cuh"
#include "matrix.h"

namespace llmk::kernels {

alignas(1024) thread_local unsigned char shared[stub::kShared];  // dynamic shared memory

}  // namespace llmk::kernels

using namespace llmk;
using namespace llmk::kernels;

namespace {

int launches = 0, with_whole = 0;

template <int kHeadDim>
void run(int batch, int kv_heads, int group, int tokens, int64_t capacity, const std::vector<int>& lengths,
         int window_left, int sm_count, int64_t page_size, bool fused) {
  ++launches;
  const bool paged = page_size > 0;
  if (!paged) page_size = capacity;
  // Pages in reverse order; in one piece, sequence b is page b.
  const int64_t pages_each = (capacity + page_size - 1) / page_size, pages = batch * pages_each;
  capacity = pages_each * page_size;
  std::vector<int32_t> table;
  for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(paged ? pages - 1 - i : i));
  const auto row_of = [&](int b, int64_t key) {
    return table[b * pages_each + key / page_size] * page_size + key % page_size;
  };
  const int heads = kv_heads * group;
  Matrix q(batch, tokens * heads * kHeadDim, tokens * heads * kHeadDim, false),
      k(batch * capacity, kv_heads * kHeadDim, kv_heads * kHeadDim, false),
      v(batch * capacity, kv_heads * kHeadDim, kv_heads * kHeadDim, true),
      out(batch, tokens * heads * kHeadDim, tokens * heads * kHeadDim, true);
  q.fill(), k.fill(), v.fill();
  Matrix new_k(batch, k.cols, k.cols, false), new_v(batch, k.cols, k.cols, true),
      cos(capacity, kHeadDim / 2, kHeadDim / 2, false), sin(capacity, kHeadDim / 2, kHeadDim / 2, true);
  new_k.fill(), new_v.fill(), cos.fill(), sin.fill();
  std::vector<int32_t> positions;
  for (const int length : lengths) positions.push_back(length - 1);
  // Element d of a head that begins at column `first` of a row, rotated.
  const auto rotated = [&](Matrix& m, int b, int64_t first, int d) {
    const int half = kHeadDim / 2, other = d < half ? d + half : d - half, sign = d < half ? -1 : 1;
    return m.value(b, first + d) * cos.value(positions[b], d % half) +
           sign * m.value(b, first + other) * sin.value(positions[b], d % half);
  };
  for (int b = 0; b < batch; ++b) {  // what is behind a sequence does not count, not even NaN
    for (int64_t key = lengths[b] - fused; key < capacity; ++key) {
      for (int64_t c = 0; c < k.cols; ++c) k(row_of(b, key), c) = v(row_of(b, key), c) = {0x7fff};
    }
  }
  DeviceInfo device{};
  device.sm_count = sm_count, device.compute_capability = 80, device.shared_bytes = 166912;
  const DecodeProblem problem{.batch = batch,
                              .tokens = tokens,
                              .heads = heads,
                              .kv_heads = kv_heads,
                              .head_dim = kHeadDim,
                              .capacity = capacity,
                              .page_size = page_size,
                              .pages = pages,
                              .paged = paged,
                              .k = {},
                              .v = {},
                              .dtype = Dtype::kBFloat16,
                              .fused = fused,
                              .max_seqlen = 0};
  const DecodePlan plan = plan_decode_attention(problem, device);
  std::vector<float4> workspace(plan.clusters * 2 * 16 * (kHeadDim / 4 + 1));
  std::vector<int> counters(kDecodeAttentionCounters);
  DecodeAttentionParams p{};
  const int64_t token = int64_t{kv_heads} * kHeadDim;
  p.q = q.data(), p.q_head = kHeadDim, p.q_token = heads * kHeadDim, p.q_batch = q.cols;
  p.cache.k = k.data(), p.cache.v = v.data(), p.cache.pages = pages, p.cache.page_size = page_size;
  p.cache.capacity = capacity, p.cache.block_table = paged ? table.data() : nullptr, p.cache.table_stride = pages_each;
  p.cache.k_page = p.cache.v_page = page_size * token, p.cache.k_token = p.cache.v_token = token;
  p.cache.k_head = p.cache.v_head = kHeadDim;
  p.cache_seqlens = lengths.data(), p.out = out.data();
  p.batch = batch, p.tokens = tokens, p.heads = heads, p.kv_heads = kv_heads, p.head_dim = kHeadDim;
  p.softmax_scale = 0.125, p.window_left = window_left;
  p.workspace = workspace.data(), p.counters = counters.data();
  if (fused) {
    p.new_k = new_k.data(), p.new_v = new_v.data(), p.new_k_batch = p.new_v_batch = token;
    p.new_k_head = p.new_v_head = kHeadDim, p.positions = positions.data();
    p.rope = {cos.data(), sin.data(), kHeadDim / 2, kHeadDim / 2, capacity, kHeadDim, true};
  }
  const LaunchShape shape{plan.clusters, dim3(kThreads), static_cast<size_t>(plan.layout(kHeadDim).bytes)};
  if (shape.shared_bytes > sizeof(shared)) gpu::fail();
  if (plan.query_mma_tiles == 1) {
    launch(decode_attention_kernel<Shape<__nv_bfloat16, kHeadDim, 1>, false>, shape, nullptr, p, plan, KvMaps{});
  } else {
    launch(decode_attention_kernel<Shape<__nv_bfloat16, kHeadDim, 2>, false>, shape, nullptr, p, plan, KvMaps{});
  }
  with_whole += batch * kv_heads * plan.query_tiles > plan.clusters * 5 / 4;

  for (int b = 0; b < batch; ++b) {
    for (int64_t c = 0; fused && c < k.cols; ++c) {
      const double expected = rotated(new_k, b, c / kHeadDim * kHeadDim, c % kHeadDim);
      check(k.value(row_of(b, lengths[b] - 1), c), expected, 4, "the new key in the cache", b, lengths[b]);
      check(v.value(row_of(b, lengths[b] - 1), c), new_v.value(b, c), 0, "the new value in the cache", b, lengths[b]);
    }
    for (int t = 0; t < tokens; ++t) {
      const int end = lengths[b] - tokens + t + 1, begin = window_left < 0 ? 0 : max(end - 1 - window_left, 0);
      for (int h = 0; h < heads; ++h) {
        const int64_t of_q = (int64_t{t} * heads + h) * kHeadDim, of_k = h / group * kHeadDim;
        std::vector<double> scores, query;
        for (int d = 0; d < kHeadDim; ++d) query.push_back(fused ? rotated(q, b, of_q, d) : q.value(b, of_q + d));
        for (int key = begin; key < end; ++key) {
          double s = 0;
          for (int d = 0; d < kHeadDim; ++d) s += query[d] * k.value(row_of(b, key), of_k + d);
          scores.push_back(s * p.softmax_scale);
        }
        double maximum = -INFINITY, sum = 0;
        for (const double s : scores) maximum = max(maximum, s);
        for (double& s : scores) sum += s = std::exp(s - maximum);
        for (int d = 0; d < kHeadDim; ++d) {
          double expected = 0;
          for (int key = begin; key < end; ++key) {
            expected += scores[key - begin] / sum * v.value(row_of(b, key), of_k + d);
          }
          check(out.value(b, of_q + d), expected, fused ? 4 : 1, "an output", b, lengths[b]);
        }
      }
    }
  }
  for (const int counter : counters) check(counter, 0, 1, "a counter", batch, kv_heads);
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (int i = 0; i < 20; ++i) {
    const bool equal = i % 2 == 0;
    const int batch = 1 + static_cast<int>(random() % (i % 3 ? 6 : 20)), kv_heads = 1 + static_cast<int>(random() % 3);
    const int capacity = 64 + static_cast<int>(random() % 700), tokens = i % 4 == 3 ? 3 : 1, longest = capacity - 1;
    const bool fused = i % 7 > 3 && tokens == 1;
    std::vector<int> lengths;
    for (int b = 0; b < batch; ++b) {
      lengths.push_back(equal ? longest : fused + static_cast<int>(random() % (longest - 1)));
    }
    const int window = i % 6 == 5 ? 50 : -1, sms = 1 + static_cast<int>(random() % 4), page_size = i % 3 == 2 ? 16 : 0;
    if (i % 5 == 4) {
      run<128>(batch, kv_heads, 2, tokens, capacity, lengths, window, sms, page_size, fused);
    } else {
      run<64>(batch, kv_heads, i % 3 ? 2 : 7, tokens, capacity, lengths, window, sms, page_size, fused);
    }
  }
  std::printf("%d launches, %d of more work tiles than clusters, %d failures\n", launches, with_whole, failures);
  return failures > 0 || with_whole == 0;
}
