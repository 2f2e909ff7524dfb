// How the kernel of a whole decode step lays out its linears and its shared memory. Plain host code.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "params/decode.h"

namespace llmk::kernels {

constexpr int kStepWarps = 6;      // that compute
constexpr int kStepCopyWarps = 2;  // one is too slow
constexpr int kStepSlots = 24;  // of a piece of a row each; in the course of a linear a slot is always the same warp's
// Pieces that a copying warp has under way: more make everything else wait. Fewer of the first ones of a linear, which
// come while the blocks wait for each other.
constexpr int kStepAhead = 6, kStepAheadEarly = 2;
// Of shared memory, in bytes: two barriers per slot; a number per warp; a flag of attention's; the step's rotary
// angles; the block's hidden state; the rest.
constexpr int kStepSquares = 448, kStepFlag = kStepSquares + 4 * kStepWarps;
constexpr int kStepAngles = 512, kStepOwn = 1024, kStepHeaderBytes = 2048;
constexpr int kStepMostOwn = (kStepHeaderBytes - kStepOwn) / 2;
static_assert(16 * kStepSlots <= kStepSquares && kStepFlag < kStepAngles && kStepAngles < kStepOwn);
static_assert(kStepSlots % kStepWarps == 0 && kStepSlots % kStepCopyWarps == 0);
static_assert(kStepAhead <= kStepSlots / kStepCopyWarps && kStepAheadEarly >= 1);
constexpr size_t kStepSharedBytes = 227 * 1024;  // all that a block can have: one block per SM
constexpr int kStepLeastSlotBytes = 4096;
constexpr int kMostKvHeads = 128;
constexpr int kStepQueries = 8, kStepQueryPad = 8;  // queries per kv head at most; elements behind each of them

enum StepKind { kQkv, kOutput, kGateUp, kDown, kHead, kStepKinds };

// A linear. Rows of W are copied, and summed up, in pieces of equal length (but for the last).
struct StepLinear {
  int k, out;         // columns of x and of y
  bool swiglu;        // row i of the gate and row i of the up projection make column i of y
  int piece, pieces;  // elements, and how many make up a row
};

// Offsets into the workspace and into shared memory, in bytes.
struct StepPlan {
  StepLinear linear[kStepKinds];
  int slot_bytes;
  int x_bytes;  // of the input of a linear and the sums of its rows; or of what attention needs
  int splits;   // of a kv head's keys at most
  size_t qkv, attended, middle, hidden;  // exchanged vectors, behind the counters
  size_t zero_bytes;                     // what must be zero before the launch
  size_t activated, partials, softmaxes, workspace_bytes;
  size_t shared_bytes;
};

// Where the inputs leave too little room to the ring, the plan's slots are shorter than kStepLeastSlotBytes and the
// rest of it is empty: the kernel cannot run then.
inline StepPlan plan_decode_step(const DecodeStepParams& p, int sm_count) {
  const auto round_up = [](int64_t a, int64_t b) { return (a + b - 1) / b * b; };
  StepPlan plan{};
  const int64_t width = p.heads * p.head_dim;
  const int64_t row = p.head_dim + kStepQueryPad;
  // The queries, the new key and value; behind them floats: of every warp the sums of its queries, and two numbers.
  const int64_t attention = (kStepQueries + 2) * row * 2 + kStepWarps * kStepQueries * (p.head_dim + 4 + 2) * 4 + 64;
  // x of a linear, and behind it the sums of the block's pieces of rows.
  const auto most_sums = [&](int64_t k, int64_t rows) {
    return 2 * k +
           4 * ((rows + sm_count - 1) / sm_count + 4) * ((2 * k + kStepLeastSlotBytes - 1) / kStepLeastSlotBytes);
  };
  const int64_t inputs = std::max({most_sums(p.hidden_size, std::max(width + 2 * p.kv_heads * p.head_dim, p.vocab)),
                                   most_sums(p.hidden_size, 2 * p.intermediate), most_sums(width, p.hidden_size),
                                   most_sums(p.intermediate, p.hidden_size)});
  plan.x_bytes = static_cast<int>(round_up(std::max(inputs, attention), 128));
  const int64_t room = static_cast<int64_t>(kStepSharedBytes) - kStepHeaderBytes - plan.x_bytes;
  plan.slot_bytes = static_cast<int>(std::max<int64_t>(room, 0) / kStepSlots / 128 * 128);
  if (plan.slot_bytes < kStepLeastSlotBytes) return plan;
  const auto linear = [&](int64_t k, int64_t rows, bool swiglu) {
    StepLinear l{};
    l.k = static_cast<int>(k);
    l.out = static_cast<int>(swiglu ? rows / 2 : rows);
    l.swiglu = swiglu;
    l.pieces = static_cast<int>((2 * k + plan.slot_bytes - 1) / plan.slot_bytes);
    l.piece = static_cast<int>(round_up((k + l.pieces - 1) / l.pieces, 64));
    return l;
  };
  plan.linear[kQkv] = linear(p.hidden_size, width + 2 * p.kv_heads * p.head_dim, false);
  plan.linear[kOutput] = linear(width, p.hidden_size, false);
  plan.linear[kGateUp] = linear(p.hidden_size, 2 * p.intermediate, true);
  plan.linear[kDown] = linear(p.intermediate, p.hidden_size, false);
  plan.linear[kHead] = linear(p.hidden_size, p.vocab, false);
  plan.splits = std::max(static_cast<int>(sm_count / p.kv_heads), 1);
  size_t at = 256 * 4;
  static_assert(1 + kMostKvHeads <= 256);
  const auto place = [&](size_t bytes) {
    const size_t begin = at;
    at += round_up(bytes, 256);
    return begin;
  };
  plan.qkv = place(4 * (width + 2 * p.kv_heads * p.head_dim));
  plan.attended = place(4 * width);
  plan.middle = place(4 * p.hidden_size);
  plan.hidden = place(4 * p.hidden_size);
  plan.zero_bytes = at;
  plan.activated = place(2 * p.intermediate);
  plan.partials = place(p.kv_heads * plan.splits * kStepQueries * p.head_dim * 4);
  plan.softmaxes = place(p.kv_heads * plan.splits * kStepQueries * 8);
  plan.workspace_bytes = at;
  plan.shared_bytes = kStepHeaderBytes + plan.x_bytes + static_cast<size_t>(kStepSlots) * plan.slot_bytes;
  return plan;
}

}  // namespace llmk::kernels
