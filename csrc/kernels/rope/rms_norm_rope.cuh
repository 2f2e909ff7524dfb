// What the forward and the backward of rms_norm_rope share: rows, and which thread has what of a row.
//
// A row is a head of a token, or all of its heads. A group of threads takes a row. A thread takes a slot of it, two
// vectors of N elements: in the first rotary_dim elements of a head the low and the high elements of pairs, as in
// rope.cu, behind them any two vectors:
//
//   head   |l0 l1 l2 l3|h0 h1 h2 h3|l4 l5|h4 h5|       l, h: the low and the high vector of slots 0 to 5
//          |------- rotary_dim ----|-- rest ---|       of the next head: slots 6 to 11
//
// Where vectors are not aligned, or a row has more slots than a block has threads, N is 1 and threads loop over slots.
#pragma once
#include "device/reduce.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/norm/plan.h"
#include "params/rms_norm_rope.h"
#include "rotation.cuh"

namespace llmk::kernels::norm_rope {

// a = quotient * b + rest, in 32 bits where that is possible: 64 bits take several times as long.
__device__ inline void divide(int64_t a, int64_t b, int64_t& quotient, int64_t& rest) {
  if ((a | b) >> 32 == 0) {
    const unsigned q = static_cast<unsigned>(a) / static_cast<unsigned>(b);
    quotient = q;
    rest = static_cast<unsigned>(a) - q * static_cast<unsigned>(b);
  } else {
    quotient = a / b;
    rest = a - quotient * b;
  }
}

// Row `index` of q or of k: its token, and the first of its heads.
struct Row {
  int64_t b, t, head;

  __device__ Row(const RmsNormRopeParams& params, int64_t rows_of_token, int64_t index) : b(0), t(index), head(0) {
    if (rows_of_token > 1) divide(index, rows_of_token, t, head);
    if (params.rope.batch > 1) divide(t, params.rope.tokens, b, t);
  }
};

// Number `index` of the slots of a row.
template <int N, bool kInterleaved>
struct Slot {
  int head;  // of the row
  bool is_rotated;
  bool has_high;  // not the last slot of a rest of odd size; always with several elements
  int64_t pair;   // the first one, in the rotated part
  Span<N, kInterleaved> at;
  int64_t column;  // of the row, where the head begins

  __device__ Slot(const RopeParams& rope, int of_head, int index)
      : head(of_head == 0 ? 0 : index / of_head), pair(0), at(0, 0) {
    const int64_t half = rope.rotary_dim / 2, d = static_cast<int64_t>(index - head * of_head) * N;
    is_rotated = d < half;
    has_high = true;
    if (is_rotated) {
      pair = d;
      at = Span<N, kInterleaved>(d, half);
    } else {
      const int64_t rest = rope.head_dim - rope.rotary_dim;
      at.low = rope.rotary_dim + d - half;
      at.high = at.low + (rest + 1) / 2;
      has_high = at.high < rope.head_dim;
    }
    column = head * rope.head_dim;
  }
};

// The two vectors of a slot.
template <typename T, int N>
struct Values {
  Vec<T, N> low, high;

  __device__ static Values all(float value) {
    const auto vec = Vec<T, N>::of([=](int) { return value; });
    return {vec, vec};
  }
  template <bool kInterleaved>
  __device__ void load(const T* head, const Slot<N, kInterleaved>& slot, uint64_t policy) {
    low = Vec<T, N>::load(head + slot.at.low, policy);
    if (N > 1 || slot.has_high) high = Vec<T, N>::load(head + slot.at.high, policy);
  }
  template <bool kInterleaved>
  __device__ void store(T* head, const Slot<N, kInterleaved>& slot) const {
    low.store(head + slot.at.low);
    if (N > 1 || slot.has_high) high.store(head + slot.at.high);
  }
};

// The weight of a slot's elements; 1 without a weight.
template <typename T, int N, bool kInterleaved>
__device__ Values<T, N> load_weight(const void* weight, const Slot<N, kInterleaved>& slot, uint64_t policy) {
  Values<T, N> values = Values<T, N>::all(1.f);
  if (weight) values.load(static_cast<const T*>(weight) + slot.column, slot, policy);
  return values;
}

// x own + partner other, rounded to T once, and each product, too, if kRounds or if the angles are of T.
template <bool kRounds, typename T, typename A, int N>
__device__ Vec<T, N> turn(const Vec<T, N>& x, const Vec<A, N>& own, const Vec<T, N>& partner, const Vec<A, N>& other) {
  using V = Vec<T, N>;
  if constexpr (std::is_same_v<T, A>) {
    return add(mul(x, own), mul(partner, other));
  } else if constexpr (kRounds) {
    return add(V::of([&](int i) { return __fmul_rn(x[i], own[i]); }),
               V::of([&](int i) { return __fmul_rn(partner[i], other[i]); }));
  } else {
    return V::of([&](int i) { return __fadd_rn(__fmul_rn(x[i], own[i]), __fmul_rn(partner[i], other[i])); });
  }
}

template <bool kRounds, bool kInterleaved, typename T, typename A, int N>
__device__ Values<T, N> rotate(const Values<T, N>& x, const Rotation<A, N>& rotation) {
  Values<T, N> of;
  partners<T, N, kInterleaved>(x.low, x.high, of.low, of.high);
  return {turn<kRounds>(x.low, rotation.own_low, of.low, rotation.other_low),
          turn<kRounds>(x.high, rotation.own_high, of.high, rotation.other_high)};
}

// Threads of a block, at most. A slot takes the more registers the more elements it has.
template <int N>
constexpr int kMaxThreads = N == 8 ? 512 : 768;

// How rows are split over threads. It depends on the row alone, never on the number of rows.
struct Plan {
  bool vector;  // one slot of vectors per thread, else threads loop over slots of single elements
  int slots_per_head;
  int threads, groups;  // of a group, and of a block
};

template <typename T, int N>
Plan plan_rows(const RmsNormRopeParams& p) {
  const RopeParams& rope = p.rope;
  const int64_t half = rope.rotary_dim / 2, rest = rope.head_dim - rope.rotary_dim;
  const int64_t heads = p.row_wise ? std::max(rope.q.heads, rope.k.heads) : 1;
  const auto of_head = [&](int width) { return half / width + ((rest + 1) / 2 + width - 1) / width; };
  Plan plan{};
  plan.vector = half % N == 0 && rest % (2 * N) == 0 && are_vectors<T>(rope.q, N) && are_vectors<T>(rope.k, N) &&
                are_vectors<T>({p.q.weight, p.k.weight, p.q.x, p.k.x},
                               {p.q.x_batch, p.q.x_token, p.q.x_head, p.k.x_batch, p.k.x_token, p.k.x_head}, N) &&
                (p.float_angles ? has_vector_angles<float>(rope, N) : has_vector_angles<T>(rope, N)) &&
                heads * of_head(N) <= kMaxThreads<N>;
  plan.slots_per_head = static_cast<int>(of_head(plan.vector ? N : 1));
  plan.threads = group_threads(heads * plan.slots_per_head, plan.vector ? 1 : 4, kMaxThreads<N>);
  plan.groups = std::max(1, 256 / plan.threads);
  return plan;
}

// Calls body(TypeTag<T>{}, TypeTag<A>{}, N) for the types of the elements and of the angles, and the widest vectors
// that both have.
template <typename Body>
cudaError_t dispatch_types(const RmsNormRopeParams& params, Dtype dtype, const Body& body) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.float_angles) return body(tag, TypeTag<float>{}, std::integral_constant<int, kVecWidth<float>>{});
    return body(tag, tag, std::integral_constant<int, kVecWidth<T>>{});
  });
}

}  // namespace llmk::kernels::norm_rope
