// decode_attention (see its file for the formula, the rounding and `settled`) where the keys of all kv heads of a token
// lie side by side and tokens follow each other without a gap: caches [batch, tokens, kv_heads, head_dim], and pages of
// them. sm_90 and later.
//
// There a tile of keys of all heads is one stretch of memory, and linear bulk copies of a few KiB reach 4.4-4.6 TB/s of
// an H200, while tensor maps, whatever the box, stay at 4.1: the copy engine takes longer to walk them. So a unit of
// work (work.cuh) is 16 or 32 keys of all heads, and a sequence is one pair. Every kv head has one or two warps of a
// block, which share nothing with the others but the ring: queries, weights and sums stay in registers.
#include "decode_attention_dense.h"

#include "dense_merge.cuh"
#include "dense_tile.cuh"
#include "device/cluster.cuh"
#include "kernels/dispatch.cuh"
#include "ring_tma.cuh"
#include "work.cuh"

namespace llmk::kernels {
namespace {

#if __CUDA_ARCH__ >= 900

// Units by linear copies; see DenseLayout.
struct LinearSource {
  static constexpr int kLanes = 1;  // of the copying warp, that a box is copied by
  const DecodeAttentionParams& params;
  int box, row, shift;
  unsigned char* shared;

  __device__ LinearSource(const DecodeAttentionParams& given, const DensePlan& plan, int row_bytes,
                          unsigned char* given_shared)
      : params(given),
        box((1 << plan.log2_unit) / plan.copies),
        row(row_bytes),
        shift(128 / plan.copies),
        shared(given_shared) {}

  // Nothing behind the live keys, which might be nobody's memory, and nothing of a page that does not exist.
  __device__ int bytes(int page, int keys) const { return page >= 0 && page < params.cache.pages ? keys * row : 0; }
  // Zeros in place of such a page.
  __device__ void missing(uint32_t slot, int part) const {
    unsigned char* const to = shared + (slot - shared_address(shared)) + part * (box * row + shift);
    for (int i = 0; i < box * row; i += 16) *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
    async_proxy_fence();
  }
  __device__ void load(uint32_t slot, bool is_value, int part, int bytes, const Walk&, int page, int in_page,
                       uint32_t full) const {
    const KvCache& cache = params.cache;
    const char* const base = static_cast<const char*>(is_value ? cache.v : cache.k);
    const int64_t offset = page * (is_value ? cache.v_page : cache.k_page) * 2 + static_cast<int64_t>(in_page) * row;
    bulk_load(slot + part * (box * row + shift), base + offset, bytes, full, kEvictFirst);
  }
};

// Brings the new key, rotated, and the new value of a head to a warp's shared memory, and to the cache.
template <typename S>
__device__ void stage_fresh(const DecodeAttentionParams& params, const Walk& walk, int head, unsigned char* fresh) {
  using T = typename S::T;
  const int lane = threadIdx.x % 32, b = walk.b;
  const KvCache& cache = params.cache;
  int64_t page = b;
  int in_page = walk.keys.fresh;
  if (cache.block_table) {
    const int page_size = static_cast<int>(cache.page_size), index = in_page / page_size;
    page = __ldcg(cache.block_table + b * cache.table_stride + index);
    in_page -= index * page_size;
  }
  const bool exists = page >= 0 && page < cache.pages;
  const auto put = [&](bool is_value, int column, const Vec<T, 8>& x) {
    *reinterpret_cast<Vec<T, 8>*>(fresh + (is_value * S::D + column) * 2) = x;  // not store(): no global memory
    if (!exists) return;
    T* const kept = is_value ? static_cast<T*>(cache.v) + page * cache.v_page + in_page * cache.v_token
                             : static_cast<T*>(cache.k) + page * cache.k_page + in_page * cache.k_token;
    x.store(kept + head * S::D + column);
  };
  const DenseQueries<S> key = DenseQueries<S>::new_key(params, b, head);
  if (lane < 4) {
#pragma unroll
    for (int j = 0; j < S::kKeyVectors; ++j) put(false, 8 * lane + 32 * j, key.part[j]);
  }
  if (lane < S::D / 8) {
    const T* const value = static_cast<const T*>(params.new_v) + b * params.new_v_batch + head * params.new_v_head;
    put(true, 8 * lane, Vec<T, 8>::load(value + 8 * lane));
  }
  __syncwarp();
}

#endif

template <typename S>
__global__ void __launch_bounds__(32 * (kDenseHeads + 1), 1)
    decode_attention_dense_kernel([[maybe_unused]] const __grid_constant__ DecodeAttentionParams params,
                                  [[maybe_unused]] const __grid_constant__ DensePlan plan) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const int kv_heads = plan.kv_heads, consumers = kv_heads * S::kWorkers, warp = threadIdx.x / 32;
  const DenseLayout layout(S::D, kv_heads, S::kWorkers, plan.log2_unit, plan.slots);
  const Cluster cluster{1, 0, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  const uint32_t base = shared_address(shared);
  const RingPlace place{base, base + layout.full, base + layout.empty, layout.slot, plan.slots};
  pdl_launch_dependents();
  Search search(params, Line{1, plan.log2_unit}, cluster, plan.least, plan.slack);
  Walk& walk = search.walk;
  if (warp == consumers) {
    const LinearSource source(params, plan, layout.row, shared);
    Producer producer(params, source, place, consumers, cluster, walk);
    if (!params.settled) pdl_wait();
    const Live after = search.look();
    producer.begin(walk);
    if (!search.holds(after)) {
      producer.forget();
      producer.begin(walk);
    }
    __syncthreads();
    producer.run();
    pdl_wait();
    return;
  }

  bool waiting = true;
  const auto wait = [&] {
    if (waiting) pdl_wait();
    waiting = false;
  };
  if (!params.settled) {
    wait();
    search.holds(search.look());
  }
  __syncthreads();  // the barriers of the ring are there, and of the copies that are wanted
  Ring ring(place);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = warp % kv_heads, worker = warp / kv_heads;
  const int unit_keys = 1 << plan.log2_unit, tiles = unit_keys / kTile, turns = S::kWorkers / tiles;
  const Columns columns(plan.log2_unit, tiles == 1 ? 0 : worker);
  const int key_offset = columns.offset(g / 2, g % 2, layout.row, plan.copies) + head * S::D * 2 + 16 * t;
  int value_offset[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    value_offset[e] = columns.offset(t, e, layout.row, plan.copies) + head * S::D * 2 + 16 * g;
  }
  unsigned char* const fresh_rows = shared + layout.fresh + warp * 2 * S::D * 2;
  const Scoring scoring(params);
  const int group = static_cast<int>(params.heads / params.kv_heads), tokens = static_cast<int>(params.tokens);

  for (; !walk.done(params); walk.next(params)) {
    const int first_key = walk.first_key(), end_key = walk.end_key(), fresh = walk.keys.fresh;
    const DenseQueries<S> q(params, walk.b, head, wait);
    int fresh_unit = -1;  // the one that has the new key, if this warp has that
    if (fresh >= first_key && fresh < end_key) {
      const int unit = (fresh - first_key) >> plan.log2_unit, tile = fresh % (unit_keys / 4) / 4;
      if ((turns == 1 ? tile : unit % turns) == (S::kWorkers == 1 ? 0 : worker)) {
        fresh_unit = first_key + unit * unit_keys;
        stage_fresh<S>(params, walk, head, fresh_rows);
      }
    }
    // What query g sees.
    const int until = walk.keys.end - tokens + (tokens == 1 ? 0 : g / group) + 1, upper = min(until, end_key);
    const int lower =
        params.window > 0 ? static_cast<int>(max(until - params.window, int64_t{walk.keys.begin})) : walk.keys.begin;
    DenseAccumulator<S> accumulator;
    int next = turns == 1 ? 0 : worker;  // units until it is this warp's turn
    for (int unit = first_key; unit < end_key; unit += unit_keys) {
      const bool mine = next == 0, whole = unit >= walk.keys.begin && unit + unit_keys <= end_key;
      next = mine ? turns - 1 : next - 1;
      const unsigned char* const keys = shared + ring.wait();
      if (mine) {
        uint4 k[2][S::kKeyVectors];
        accumulator.load_keys(k, keys + key_offset, layout.row);
        if (unit == fresh_unit) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            if (unit + columns.key(n, g / 2, g % 2) != fresh) continue;
#pragma unroll
            for (int j = 0; j < S::kKeyVectors; ++j) {
              k[n][j] = *reinterpret_cast<const uint4*>(fresh_rows + 16 * t + 64 * j);
            }
          }
        }
        accumulator.weigh(k, q, scoring, [&](int n, int e) {
          const int key = unit + columns.key(n, t, e);
          return key >= lower && key < upper;
        });
      }
      ring.release();
      const unsigned char* const values = shared + ring.wait();
      if (mine) {
        uint4 v[4][S::kValueVectors];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < S::kValueVectors; ++j) {
            v[i][j] = *reinterpret_cast<const uint4*>(values + value_offset[i % 2] + i / 2 * 2 * layout.row + 128 * j);
          }
        }
        if (!whole || unit == fresh_unit) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = unit + columns.key(i / 2, t, i % 2);
#pragma unroll
            for (int j = 0; j < S::kValueVectors; ++j) {
              // A weight of zero would not silence what may lie there.
              if (key < walk.keys.begin || key >= end_key) v[i][j] = make_uint4(0, 0, 0, 0);
              if (unit == fresh_unit && key == fresh) {
                v[i][j] = *reinterpret_cast<const uint4*>(fresh_rows + S::D * 2 + 16 * g + 128 * j);
              }
            }
          }
        }
        accumulator.add(v);
      }
      ring.release();
    }
    dense_finish<S>(params, walk, accumulator, shared + layout.exchange, head, worker);
  }
  wait();  // also where there was nothing to do: the successor takes our end for that of our predecessor
#endif
}

}  // namespace

bool decode_attention_can_be_dense(const DecodeAttentionParams& p, const DensePlan& plan, const DeviceInfo& device) {
  const KvCache& c = p.cache;
  const int64_t row = p.kv_heads * p.head_dim;
  const bool dense =
      (c.page_size == 1 || (c.k_token == row && c.v_token == row)) && c.k_head == p.head_dim && c.v_head == p.head_dim;
  const int64_t box = (int64_t{1} << plan.log2_unit) / plan.copies;
  return device.compute_capability >= 90 && dense && (!c.block_table || c.page_size % box == 0) &&
         (p.head_dim == 64 || p.head_dim == 128) && p.kv_heads >= 2 && p.kv_heads <= kDenseHeads &&
         p.heads / p.kv_heads * p.tokens <= 8 && plan.slots >= 2;
}

bool decode_attention_is_dense(const DecodeAttentionParams& p, const DensePlan& plan, const DeviceInfo& device) {
  // Where many blocks share a sequence, adding up their sums of all heads costs more than the copies save.
  constexpr int64_t kMostBlocks = 10;
  return p.batch * kMostBlocks >= device.sm_count && decode_attention_can_be_dense(p, plan, device);
}

size_t decode_attention_dense_workspace_bytes(const DecodeAttentionParams& params, const DensePlan& plan) {
  return static_cast<size_t>(plan.blocks) * 2 * params.kv_heads * 8 * (params.head_dim + 16 * plan.workers) * 4;
}

cudaError_t decode_attention_dense(const DecodeAttentionParams& params, const DensePlan& plan, Dtype dtype,
                                   cudaStream_t stream) {
  const int head_dim = static_cast<int>(params.head_dim);
  const DenseLayout layout(head_dim, plan.kv_heads, plan.workers, plan.log2_unit, plan.slots);
  const LaunchShape shape{plan.blocks, dim3(32 * (plan.warps() + 1)), static_cast<size_t>(layout.bytes)};
  return dispatch_int<64, 128>(head_dim, [&](auto dim) {
    return dispatch_int<1, 2>(plan.workers, [&](auto workers) {
      constexpr int D = decltype(dim)::value, kWorkers = decltype(workers)::value;
      if (dtype == Dtype::kFloat16) {
        return launch(decode_attention_dense_kernel<DenseShape<__half, D, kWorkers>>, shape, stream, params, plan);
      }
      return launch(decode_attention_dense_kernel<DenseShape<__nv_bfloat16, D, kWorkers>>, shape, stream, params, plan);
    });
  });
}

}  // namespace llmk::kernels
