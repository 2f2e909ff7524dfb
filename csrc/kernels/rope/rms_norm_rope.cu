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
//
//   kernel                      | a group of threads takes                             | for
//   ----------------------------|------------------------------------------------------|---------------------------
//   rms_norm_rope_kernel        | a row: a head, or all heads of a token               | any rows
//   rms_norm_rope_tokens_kernel | two heads of a token, and then those of later tokens | many tokens, aligned heads
//
// They compute the same bits. The second loads ahead: from 2048 tokens on it took 11 to 20 % less time on one H200, of
// interleaved pairs 4 %.
#include "rms_norm_rope.h"

#include "device/ptx.cuh"
#include "kernels/launch.h"
#include "kernels/recorder.h"
#include "rms_norm_rope.cuh"
#include "rope.h"

namespace llmk::kernels {
namespace {

using namespace norm_rope;

// The rows of a token: its heads of q, then its heads of k; or all of q, then all of k.
int64_t rows_of_token(const RmsNormRopeParams& params) {
  if (params.row_wise) return (params.rope.q.heads > 0) + (params.rope.k.heads > 0);
  return params.rope.q.heads + params.rope.k.heads;
}

// The arithmetic of both kernels, of rows of q or of k.
struct RowNorm {
  float eps, inverse_cols, offset;
  bool cast_before_weight, is_product;

  __device__ RowNorm(const RmsNormOptions& options, const HeadNorm& norm)
      : eps(static_cast<float>(options.eps)),
        inverse_cols(1.f / static_cast<float>(norm.cols)),
        offset(norm.weight ? static_cast<float>(options.weight_offset) : 0.f),
        cast_before_weight(options.cast_before_weight),
        is_product(cast_before_weight && offset == 0.f) {}

  __device__ float rstd(float sum_of_squares) const { return rsqrtf(sum_of_squares * inverse_cols + eps); }

  template <typename T, int N>
  __device__ Vec<T, N> normalize(const Vec<T, N>& x, const Vec<T, N>& weight, float rstd) const {
    const auto n = Vec<T, N>::of([&](int i) { return x[i] * rstd; });
    if (is_product) return mul(n, weight);
    return Vec<T, N>::of([&](int i) { return (cast_before_weight ? n[i] : x[i] * rstd) * (offset + weight[i]); });
  }
};

template <typename T, int N>
__device__ float add_squares(float sum, const Values<T, N>& x) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum += x.low[i] * x.low[i] + x.high[i] * x.high[i];
  return sum;
}

// A: the type of the angles. N: elements per access; 1: threads loop over slots. kInterleaved: see rope.cu.
template <typename T, typename A, int N, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads<N>, 1)
    rms_norm_rope_kernel(const RmsNormRopeParams params, int slots_per_head, int rows, bool keep_inputs) {
  constexpr bool kLoops = N == 1;
  __shared__ float shared[kMaxThreads<N> / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  // A group without a row, and a thread without a slot, load what others load: a branch, or zeros instead, would keep
  // the loads from being in flight together.
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + group.index;
  const int64_t count = params.rope.batch * params.rope.tokens * rows;
  const bool exists = index < count;
  const Row row(params, rows, exists ? index : count - 1);
  const int64_t rows_of_q = params.row_wise ? params.rope.q.heads > 0 : params.rope.q.heads;
  const bool is_q = row.head < rows_of_q;
  const RopeTensor tensor = is_q ? params.rope.q : params.rope.k;
  const HeadNorm norm = is_q ? params.q : params.k;
  const int64_t first_head = params.row_wise ? 0 : is_q ? row.head : row.head - rows_of_q;
  const T* const in = static_cast<const T*>(tensor.in) + row.b * tensor.in_batch + row.t * tensor.in_token +
                      first_head * tensor.in_head;
  T* const out =
      static_cast<T*>(tensor.out) + row.b * tensor.out_batch + row.t * tensor.out_token + first_head * tensor.out_head;
  const int all_slots = static_cast<int>(params.row_wise ? tensor.heads : 1) * slots_per_head;
  const int slots = exists ? all_slots : 0;
  const int of_head = params.row_wise ? slots_per_head : 0;  // 0: there is but one head, and nothing to divide
  const RowNorm row_norm(params.norm, norm);
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_launch_dependents();
  pdl_wait();

  using SlotOf = Slot<N, kInterleaved>;
  const auto load = [&](const SlotOf& slot) {
    Values<T, N> x;
    if constexpr (kLoops) x = Values<T, N>::all(0.f);
    x.load(in + slot.head * tensor.in_head, slot, policy);
    return x;
  };
  const auto load_angles_of = [&](const SlotOf& slot) {
    return load_rotation_of<A>(params.rope, row.b, row.t, slot.pair, slot.at);
  };
  const auto finish = [&](const SlotOf& slot, const Values<T, N>& x, const Values<T, N>& weight, float rstd,
                          const Rotation<A, N>& rotation) {
    const Values<T, N> y{row_norm.normalize(x.low, weight.low, rstd), row_norm.normalize(x.high, weight.high, rstd)};
    const Values<T, N> result = slot.is_rotated ? rotate</*kRounds=*/false, kInterleaved>(y, rotation) : y;
    result.store(out + slot.head * tensor.out_head, slot);
  };

  if constexpr (kLoops) {
    float sums[1] = {0.f};
    for (int i = group.rank; i < slots; i += group.threads) {
      sums[0] = add_squares(sums[0], load(SlotOf(params.rope, of_head, i)));
    }
    group_sum(sums, group, shared);
    for (int i = group.rank; i < slots; i += group.threads) {
      const SlotOf slot(params.rope, of_head, i);
      Rotation<A, N> rotation;
      if (slot.is_rotated) rotation = load_angles_of(slot);
      finish(slot, load(slot), load_weight<T>(norm.weight, slot, policy), row_norm.rstd(sums[0]), rotation);
    }
  } else {
    const SlotOf slot(params.rope, of_head, min(group.rank, all_slots - 1));
    const bool has_slot = group.rank < slots;
    const Values<T, N> x = load(slot);
    Rotation<A, N> rotation;
    if (slot.is_rotated) rotation = load_angles_of(slot);  // in flight during the reduction
    float sums[1] = {has_slot ? add_squares(0.f, x) : 0.f};
    group_sum(sums, group, shared);
    if (!has_slot) return;
    // The weight is in L1: its registers are worth more than its latency.
    const Values<T, N> weight = load_weight<T>(norm.weight, slot, policy);
    finish(slot, x, weight, row_norm.rstd(sums[0]), rotation);
  }
}

// How rms_norm_rope_tokens_kernel splits its work. The heads of a token are pieces: those of q, kTokenHeads at a time,
// then those of k. Group g of the grid has piece g % pieces of tokens g / pieces, g / pieces + at_once, ...
//
//   group     0   1   2   3   4   5   6   7  -  -       5 tokens of 4 pieces, 2 at once
//   round 0  0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3 .  .       token.piece
//   round 1  2.0 2.1 2.2 2.3 3.0 3.1 3.2 3.3 .  .
//   round 2  4.0 4.1 4.2 4.3  .   .   .   .  .  .
struct TokenSchedule {
  unsigned pieces_of_q, pieces;  // of a token
  unsigned at_once;              // tokens of a round
  unsigned batches, rest;        // at_once = batches * tokens + rest, so that no thread divides in its loop
  unsigned rounds;
};

// Heads of a group, and blocks per SM. x takes its registers twice, for this token and for the next one: four heads do
// not fit the registers of two blocks, and two heads not those of three. In flight are 32 KiB per SM.
constexpr int kTokenHeads = 2, kTokenThreads = 256, kTokenBlocks = 2;
constexpr int64_t kMinRounds = 4;  // with fewer, little is loaded ahead, and the other kernel may start early

// For `groups` groups at most. No rounds: there are more pieces than groups.
TokenSchedule schedule_tokens(const RopeParams& rope, int64_t groups) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t tokens = rope.batch * rope.tokens, pieces_of_q = divide_up(rope.q.heads, kTokenHeads);
  const int64_t pieces = pieces_of_q + divide_up(rope.k.heads, kTokenHeads);
  if (pieces > groups) return {};
  const int64_t rounds = divide_up(tokens, groups / pieces), at_once = divide_up(tokens, rounds);  // all about full
  TokenSchedule schedule{};
  schedule.pieces_of_q = static_cast<unsigned>(pieces_of_q);
  schedule.pieces = static_cast<unsigned>(pieces);
  schedule.at_once = static_cast<unsigned>(at_once);
  schedule.batches = static_cast<unsigned>(at_once / rope.tokens);
  schedule.rest = static_cast<unsigned>(at_once % rope.tokens);
  schedule.rounds = static_cast<unsigned>(rounds);
  return schedule;
}

// The rotations of a slot, token by token, by the angles of load_rotation_of(): not transposed, and without branches
// that choose between registers, since the compiler then moves the halves of these one by one.
template <typename A, int N, bool kInterleaved>
struct SlotRotations {
  const RopeParams& rope;
  const Slot<N, kInterleaved>& slot;

  // The row of cos and sin, or the token where these have a row for each. Negative: no such position.
  __device__ int64_t row(unsigned b, unsigned t) const {
    if (!rope.position_ids) return t;
    const int64_t at = b * rope.positions_batch + t * rope.positions_token;
    const int64_t position = rope.position_ids_int64 ? static_cast<const int64_t*>(rope.position_ids)[at]
                                                     : static_cast<const int32_t*>(rope.position_ids)[at];
    return position < rope.table_rows ? position : -1;
  }
  // Without signs: whatever uses the angles here would wait for them.
  __device__ Rotation<A, N> load(unsigned b, int64_t row) const {
    const bool positions = rope.position_ids;
    const A* const cos = static_cast<const A*>(rope.cos) + row * (positions ? rope.cos_row : rope.cos_token) +
                         b * (positions ? 0 : rope.cos_batch);
    const A* const sin = static_cast<const A*>(rope.sin) + row * (positions ? rope.sin_row : rope.sin_token) +
                         b * (positions ? 0 : rope.sin_batch);
    return {angles(cos, slot.at.low), angles(cos, slot.at.high), angles(sin, slot.at.low), angles(sin, slot.at.high)};
  }
  // The first element of a pair gets -sin.
  __device__ static void add_signs(Rotation<A, N>& rotation) {
    constexpr bool kAlternating = kNeighbours<N, kInterleaved>;
    rotation.other_low =
        mul(rotation.other_low, Vec<A, N>::of([](int i) { return kAlternating && i % 2 ? 1.f : -1.f; }));
    if (kAlternating) {
      rotation.other_high = mul(rotation.other_high, Vec<A, N>::of([](int i) { return i % 2 ? 1.f : -1.f; }));
    }
  }

 private:
  __device__ Vec<A, N> angles(const A* row, int64_t at) const {
    if constexpr (!kNeighbours<N, kInterleaved>) {
      return Vec<A, N>::load(row + (rope.half_width ? slot.pair : at));
    } else {
      if (!rope.half_width) return Vec<A, N>::load(row + at);
      const A* const pairs = row + at / 2;
      Vec<A, N> both;
#pragma unroll
      for (int i = 0; i < N; ++i) both.data[i] = pairs[i / 2];  // one angle for two neighbours
      return both;
    }
  }
};

// For many tokens, and groups of up to 32 threads with one slot each. What does not depend on the token is set up once,
// and the next token's x is in flight while this one is reduced and stored.
//
// forget_floats() keeps vectors as they were loaded: the compiler would hold them as halves or as floats, or scale the
// weight ahead of the loop, and run out of registers.
template <typename T, typename A, int N, bool kInterleaved>
__global__ void __launch_bounds__(kTokenThreads, kTokenBlocks)
    rms_norm_rope_tokens_kernel(const RmsNormRopeParams params, int slots, const TokenSchedule schedule,
                                bool keep_inputs) {
  const RopeParams& rope = params.rope;
  const unsigned tokens = static_cast<unsigned>(rope.tokens), count = static_cast<unsigned>(rope.batch) * tokens;
  const int threads = static_cast<int>(blockDim.x), rank = static_cast<int>(threadIdx.x);
  const unsigned group = blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned first = group / schedule.pieces, piece = group - first * schedule.pieces;
  int is_q = piece < schedule.pieces_of_q;
  const auto tensor = [&]() -> const RopeTensor& { return is_q ? rope.q : rope.k; };
  const HeadNorm& norm = is_q ? params.q : params.k;
  const int first_head = static_cast<int>(is_q ? piece : piece - schedule.pieces_of_q) * kTokenHeads;
  const int heads = min(kTokenHeads, static_cast<int>(tensor().heads) - first_head);
  const Slot<N, kInterleaved> slot(rope, 0, min(rank, slots - 1));
  // Groups of a warp go in step, since they shuffle together. One without a token loads what others load, or what it
  // has loaded before.
  unsigned token = first < schedule.at_once ? first : count;
  unsigned b = 0, t = min(token, count - 1);
  if (rope.batch > 1) b = t / tokens, t -= b * tokens;
  const T* in = static_cast<const T*>(tensor().in) + b * tensor().in_batch + t * tensor().in_token +
                first_head * tensor().in_head + slot.at.low;
  T* out = static_cast<T*>(tensor().out) + b * tensor().out_batch + t * tensor().out_token +
           first_head * tensor().out_head + slot.at.low;
  const int to_high = static_cast<int>(slot.at.high - slot.at.low);  // from the low to the high vector
  const int64_t in_head = tensor().in_head, out_head = tensor().out_head;
  const int64_t in_step = schedule.batches * tensor().in_batch + schedule.rest * tensor().in_token;
  const int64_t out_step = schedule.batches * tensor().out_batch + schedule.rest * tensor().out_token;
  const SlotRotations<A, N, kInterleaved> rotations{rope, slot};
  const RowNorm row_norm(params.norm, norm);
  const uint64_t policy = l2_policy(keep_inputs);
  pdl_wait();

  Values<T, N> weight = load_weight<T>(norm.weight, slot, policy);
  const auto load = [&](Values<T, N>(&x)[kTokenHeads]) {
#pragma unroll
    for (int h = 0; h < kTokenHeads; ++h) {
      const T* const from = in + min(h, heads - 1) * in_head;
      x[h].low = Vec<T, N>::load(from, policy);
      x[h].high = Vec<T, N>::load(from + to_high, policy);
      forget_floats(x[h].low), forget_floats(x[h].high);
    }
  };
  Values<T, N> x[kTokenHeads];
  load(x);
  for (unsigned round = 1;; ++round) {
    const bool has_slot = token < count && rank < slots;
    Rotation<A, N> rotation;
    const int64_t angle_row = slot.is_rotated ? rotations.row(b, t) : 0;
    const bool has_angles = angle_row >= 0;
    if (slot.is_rotated && has_angles) rotation = rotations.load(b, angle_row);
    T* const to = out;
    token += schedule.at_once;
    if (token < count) {
      b += schedule.batches, t += schedule.rest, in += in_step, out += out_step;
      if (t >= tokens) {
        ++b, t -= tokens;
        asm volatile("" : "+r"(is_q));  // the strides are read here again: registers are worth more
        in += tensor().in_batch - tokens * tensor().in_token;
        out += tensor().out_batch - tokens * tensor().out_token;
      }
    }
    Values<T, N> next[kTokenHeads];
    if (round < schedule.rounds) load(next);

    float sums[kTokenHeads];
#pragma unroll
    for (int h = 0; h < kTokenHeads; ++h) sums[h] = rank < slots ? add_squares(0.f, x[h]) : 0.f;
    warp_sum(sums, threads);
    rotations.add_signs(rotation);
    forget_floats(weight.low), forget_floats(weight.high);
#pragma unroll
    for (int h = 0; h < kTokenHeads; ++h) {
      if (!has_slot || h >= heads) continue;
      forget_floats(x[h].low), forget_floats(x[h].high);
      const float rstd = has_angles ? row_norm.rstd(sums[h]) : NAN;  // rather than a wrong rotation
      const Values<T, N> y{row_norm.normalize(x[h].low, weight.low, rstd),
                           row_norm.normalize(x[h].high, weight.high, rstd)};
      const Values<T, N> result = slot.is_rotated ? rotate</*kRounds=*/false, kInterleaved>(y, rotation) : y;
      result.low.store(to + h * out_head);
      result.high.store(to + h * out_head + to_high);
    }
    if (round == schedule.rounds) break;
#pragma unroll
    for (int h = 0; h < kTokenHeads; ++h) x[h] = next[h];
  }
  pdl_launch_dependents();
}

cudaError_t launch_rms_norm_rope(const RmsNormRopeParams& params, Dtype dtype, cudaStream_t stream) {
  const int64_t tokens = params.rope.batch * params.rope.tokens, all_heads = params.rope.q.heads + params.rope.k.heads;
  if (tokens == 0 || params.rope.head_dim == 0 || rows_of_token(params) == 0) return cudaSuccess;
  if (tokens > kMaxRopeTokens) return cudaErrorInvalidValue;
  return dispatch_types(params, dtype, [&](auto element, auto angle, auto width) {
    using T = typename decltype(element)::type;
    using A = typename decltype(angle)::type;
    constexpr int N = decltype(width)::value;
    DeviceInfo device;
    if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
    const int64_t bytes = 2 * tokens * all_heads * params.rope.head_dim * sizeof(T);
    const Plan plan = plan_rows<T, N>(params);
    const auto run = [&](auto kernel) {
      const int64_t rows = rows_of_token(params);
      return launch(kernel, {(tokens * rows + plan.groups - 1) / plan.groups, dim3(plan.threads, plan.groups)}, stream,
                    params, plan.slots_per_head, static_cast<int>(rows), keeps_inputs(device, bytes));
    };
    return dispatch_int<0, 1>(params.rope.interleaved, [&](auto interleaved) {
      constexpr bool kInterleaved = decltype(interleaved)::value;
      if (!plan.vector) return run(rms_norm_rope_kernel<T, A, 1, kInterleaved>);
      if (!params.row_wise && plan.threads <= 32) {
        const int64_t groups = int64_t{device.sm_count} * kTokenBlocks * plan.groups;
        const TokenSchedule schedule = schedule_tokens(params.rope, groups);
        if (schedule.rounds >= kMinRounds) {
          const int64_t blocks = (int64_t{schedule.at_once} * schedule.pieces + plan.groups - 1) / plan.groups;
          return launch(rms_norm_rope_tokens_kernel<T, A, N, kInterleaved>,
                        {blocks, dim3(plan.threads, plan.groups), /*shared_bytes=*/0, /*may_overlap=*/false}, stream,
                        params, plan.slots_per_head, schedule, keeps_inputs(device, bytes));
        }
      }
      return run(rms_norm_rope_kernel<T, A, N, kInterleaved>);
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
