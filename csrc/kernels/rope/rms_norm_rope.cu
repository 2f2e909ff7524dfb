// RMSNorm of queries and keys, of every head by itself or of all heads of a token, then rotary embedding, in one
// launch. With r = rounding to the dtype, n = x / sqrt(mean(x^2) + eps), m = r(n) with cast_before_weight, else n:
//
//   y = r(m (offset + weight))        out = y rotated, as in rope.cu
//
// rounded where eager modules round that do one after the other (Qwen3, OLMo 2, Gemma 3). Where cos and sin are float32
// although q and k are not, the rotation is computed in float32 and rounded once, as OLMo 2 does.
// Tensors are [batch, tokens, heads, head_dim] by any strides; float32, float16 or bfloat16; float32 arithmetic.
//
// Reads and writes every element of q and k once; weights and angles come from the caches. The result may be in place:
// a thread writes what it alone has read.
#include "rms_norm_rope.h"

#include "device/ptx.cuh"
#include "kernels/launch.h"
#include "kernels/recorder.h"
#include "rms_norm_rope.cuh"
#include "rope.h"

namespace llmk::kernels {
namespace {

using namespace norm_rope;

// Heads that a group takes, with the same angles and weights, where there are many of them.
constexpr int kManyHeads = 4;

// The rows of a token: its heads of q, `heads` at a time, then its heads of k; or all of q, then all of k.
int64_t rows_of_token(const RmsNormRopeParams& params, int64_t heads) {
  if (params.row_wise) return (params.rope.q.heads > 0) + (params.rope.k.heads > 0);
  return (params.rope.q.heads + heads - 1) / heads + (params.rope.k.heads + heads - 1) / heads;
}

// A: the type of the angles. N: elements per access; 1: threads loop over slots. kInterleaved: see rope.cu. kHeads:
// of a group, if the norm is of heads; several only without the loop.
template <typename T, typename A, int N, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kHeads > 1 ? 256 : kMaxThreads<N>, kHeads > 1 ? 2 : 1)
    rms_norm_rope_kernel(const RmsNormRopeParams params, int slots_per_head, int rows, bool keep_inputs) {
  constexpr bool kLoops = N == 1;
  __shared__ float shared[kMaxThreads<N> / 32 * kHeads];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  // A group without a row, and a thread without a slot, load what others load: a branch, or zeros instead, would keep
  // the loads from being in flight together.
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  const int64_t count = params.rope.batch * params.rope.tokens * rows;
  const bool exists = index < count;
  const Row row(params, rows, exists ? index : count - 1);
  const int64_t rows_of_q = params.row_wise ? params.rope.q.heads > 0 : (params.rope.q.heads + kHeads - 1) / kHeads;
  const bool is_q = row.head < rows_of_q;
  const RopeTensor tensor = is_q ? params.rope.q : params.rope.k;
  const HeadNorm norm = is_q ? params.q : params.k;
  const int64_t first_head = params.row_wise ? 0 : (is_q ? row.head : row.head - rows_of_q) * kHeads;
  const T* const in = static_cast<const T*>(tensor.in) + row.b * tensor.in_batch + row.t * tensor.in_token +
                      first_head * tensor.in_head;
  T* const out =
      static_cast<T*>(tensor.out) + row.b * tensor.out_batch + row.t * tensor.out_token + first_head * tensor.out_head;
  const int all_slots = static_cast<int>(params.row_wise ? tensor.heads : 1) * slots_per_head;
  const int slots = exists ? all_slots : 0;
  const int of_head = params.row_wise ? slots_per_head : 0;  // 0: there is but one head, and nothing to divide
  const float eps = static_cast<float>(params.norm.eps), inverse_cols = 1.f / static_cast<float>(norm.cols);
  const float offset = norm.weight ? static_cast<float>(params.norm.weight_offset) : 0.f;
  const bool cast_before_weight = params.norm.cast_before_weight, is_product = cast_before_weight && offset == 0.f;
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();

  using SlotOf = Slot<N, kInterleaved>;
  const auto load = [&](const SlotOf& slot, int h) {
    Values<T, N> x;
    if constexpr (kLoops) x = Values<T, N>::all(0.f);
    x.load(in + (slot.head + h) * tensor.in_head, slot, policy);
    return x;
  };
  const auto load_angles_of = [&](const SlotOf& slot) {
    return load_rotation_of<A>(params.rope, row.b, row.t, slot.pair, slot.at);
  };
  const auto add_squares = [&](float sum, const Values<T, N>& x) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum += x.low[i] * x.low[i] + x.high[i] * x.high[i];
    return sum;
  };
  const auto rstd_of = [&](float sum) { return rsqrtf(sum * inverse_cols + eps); };
  const auto finish = [&](const SlotOf& slot, int h, const Values<T, N>& x, const Values<T, N>& weight, float rstd,
                          const Rotation<A, N>& rotation) {
    const auto normalized = [&](const Vec<T, N>& v, const Vec<T, N>& w) {
      const auto n = Vec<T, N>::of([&](int i) { return v[i] * rstd; });
      if (is_product) return mul(n, w);
      return Vec<T, N>::of([&](int i) { return (cast_before_weight ? n[i] : v[i] * rstd) * (offset + w[i]); });
    };
    const Values<T, N> y{normalized(x.low, weight.low), normalized(x.high, weight.high)};
    const Values<T, N> result = slot.is_rotated ? rotate</*kRounds=*/false, kInterleaved>(y, rotation) : y;
    result.store(out + (slot.head + h) * tensor.out_head, slot);
  };

  if constexpr (kLoops) {
    float sums[1] = {0.f};
    for (int i = group.rank; i < slots; i += group.threads) {
      sums[0] = add_squares(sums[0], load(SlotOf(params.rope, of_head, i), 0));
    }
    group_sum(sums, group, shared);
    for (int i = group.rank; i < slots; i += group.threads) {
      const SlotOf slot(params.rope, of_head, i);
      Rotation<A, N> rotation;
      if (slot.is_rotated) rotation = load_angles_of(slot);
      finish(slot, 0, load(slot, 0), load_weight<T>(norm.weight, slot, policy), rstd_of(sums[0]), rotation);
    }
  } else {
    const SlotOf slot(params.rope, of_head, min(group.rank, all_slots - 1));
    const bool has_slot = group.rank < slots;
    const int heads = params.row_wise ? 1 : static_cast<int>(min(int64_t{kHeads}, tensor.heads - first_head));
    Values<T, N> x[kHeads];
    Rotation<A, N> rotation;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) x[h] = load(slot, min(h, heads - 1));
    if (slot.is_rotated) rotation = load_angles_of(slot);  // in flight during the reduction
    float sums[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h] = has_slot ? add_squares(0.f, x[h]) : 0.f;
    group_sum(sums, group, shared);
    if (!has_slot) return;
    // The weight is in L1: its registers are worth more than its latency.
    const Values<T, N> weight = load_weight<T>(norm.weight, slot, policy);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads) finish(slot, h, x[h], weight, rstd_of(sums[h]), rotation);
    }
  }
}

cudaError_t launch_rms_norm_rope(const RmsNormRopeParams& params, Dtype dtype, cudaStream_t stream) {
  const int64_t tokens = params.rope.batch * params.rope.tokens, all_heads = params.rope.q.heads + params.rope.k.heads;
  if (tokens == 0 || params.rope.head_dim == 0 || rows_of_token(params, 1) == 0) return cudaSuccess;
  if (tokens > kMaxRopeTokens) return cudaErrorInvalidValue;
  return dispatch_types(params, dtype, [&](auto element, auto angle, auto width) {
    using T = typename decltype(element)::type;
    using A = typename decltype(angle)::type;
    constexpr int N = decltype(width)::value;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const int64_t bytes = 2 * tokens * all_heads * params.rope.head_dim * sizeof(T);
    const Plan plan = plan_rows<T, N>(params);
    const auto run = [&](auto kernel, int64_t heads) {
      const int64_t rows = rows_of_token(params, heads);
      return launch(kernel, {(tokens * rows + plan.groups - 1) / plan.groups, dim3(plan.threads, plan.groups)}, stream,
                    params, plan.slots_per_head, static_cast<int>(rows), keeps_inputs(device, bytes));
    };
    return dispatch_int<0, 1>(params.rope.interleaved, [&](auto interleaved) {
      constexpr bool kInterleaved = decltype(interleaved)::value;
      if (!plan.vector) return run(rms_norm_rope_kernel<T, A, 1, kInterleaved, 1>, 1);
      // Enough groups with several heads each to fill the GPU.
      const bool many = tokens * all_heads * plan.threads >= int64_t{1024} * kManyHeads * device.sm_count;
      if (many && !params.row_wise && plan.threads * plan.groups <= 256) {
        return run(rms_norm_rope_kernel<T, A, N, kInterleaved, kManyHeads>, kManyHeads);
      }
      return run(rms_norm_rope_kernel<T, A, N, kInterleaved, 1>, 1);
    });
  });
}

}  // namespace

cudaError_t rms_norm_rope(const RmsNormRopeParams& params, Dtype dtype, cudaStream_t stream) {
  return launch_movable(
      params, [=](const RmsNormRopeParams& p) { return launch_rms_norm_rope(p, dtype, stream); },
      [](RmsNormRopeParams& p, const Moves& moves) { moves(p.rope.position_ids); });
}

}  // namespace llmk::kernels
