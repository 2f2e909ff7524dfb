// Rows of any alignment that whole warps keep in registers, by words of 4 bytes.
//
//   global   |. . . . 0 1 2 3|4 5 6 7 8 9 . .|      vectors of 16 bytes; those at the ends belong to the row in part
//   shared   |. . . . 0 1 2 3|4 5 6 7 8 9 - -|- -   a slot: the row lies as in global memory, padding behind it
//   words             |0 1|2 3|4 5|6 7|8 9|- -|- -   the row's own: word 32 i + l of a warp's part is the i-th of lane
//   l
//
// A row goes through shared memory both ways: from or to global memory by vectors, from or to registers by words, and
// single elements at the two ends. A word of 16-bit elements is two accesses where the row starts at an odd element.
// That takes 2 to 3 instructions per word, where cutting a vector out of two (shifted.cuh) takes 20 per vector. So an
// element has the same thread, and a sum the same order, wherever a row starts.
//
// There is little to do for a byte, so every instruction counts: what depends on the row, and not on the word, is asked
// outside of the loops over words, and a word's address is a constant behind the first one's.
#pragma once
#include <algorithm>

#include "device/reduce.cuh"
#include "device/shifted.cuh"
#include "device/vec.cuh"
#include "kernels/launch.h"
#include "kernels/norm/plan.h"

namespace llmk::kernels {

struct WordPlan {
  int words;    // per thread; 0: rows of this length are not kept so
  int threads;  // per row, whole warps
  int rows_per_block;
  int64_t slot_bytes;
  size_t shared_bytes;

  LaunchShape shape(int64_t rows) const {
    return {(rows + rows_per_block - 1) / rows_per_block, dim3(threads, rows_per_block), shared_bytes};
  }
};

constexpr int kMaxWordThreads = 512;
constexpr int64_t kLeastWords = 64;  // of a row: most of a warp that has fewer would be idle
constexpr int kWarpRows = 4;         // rows of a block, if a warp is enough for each

// For rows of `cols` elements, of `slots` operands. The more words a thread has, the better, unless others leave an
// eighth fewer empty. An H100, bfloat16, us:
//
//   case              | 16 words | 12   | 8
//   ------------------|----------|------|-----
//   rms_norm 8192x1001| 15.1     | 16.1 | 15.3
//   rms_norm 8192x2050| 27.5     | 26.8 | 31.3
//   rms_norm 8192x4097| 50.5     | 52.3 | 65.5
//   softmax 8192x1001 | 13.8     | 17.2 | 14.7
//   softmax 16352x513 | 17.9     | 16.0 | 23.0
inline WordPlan plan_words(int64_t cols, size_t element_bytes, int slots) {
  const int64_t count = (cols * static_cast<int64_t>(element_bytes) + 3) / 4;
  WordPlan plan{};
  if (count < kLeastWords) return plan;
  for (const int words : {16, 12, 8, 4}) {
    const int64_t threads = (count + 32 * words - 1) / (32 * words) * 32;
    if (threads > kMaxWordThreads) continue;
    if (plan.words == 0 || threads * words * 8 < int64_t{plan.threads} * plan.words * 7) {
      plan.words = words, plan.threads = static_cast<int>(threads);
    }
  }
  plan.rows_per_block = plan.threads == 32 ? kWarpRows : 1;
  plan.slot_bytes = int64_t{plan.words} * plan.threads * 4 + 16;
  plan.shared_bytes = static_cast<size_t>(plan.slot_bytes) * slots * plan.rows_per_block;
  return plan;
}

// The place of a row of one operand in shared memory. A group calls copy(), pad(), waits for its copies and for itself,
// load(); then put(), a barrier, store().
template <typename T, int kWords>
class RowSlot {
  static constexpr int N = kVecWidth<T>;

 public:
  static constexpr int kPerWord = 4 / sizeof(T), kStep = 32 * kPerWord;  // elements of a word, and between two
  using Word = Vec<T, kPerWord>;

  // `cols`: 0 of a row that does not exist.
  __device__ RowSlot(int4* slots, int number, const WordPlan& plan, const Group& group, int cols)
      : slot_(reinterpret_cast<T*>(reinterpret_cast<char*>(slots) +
                                   (number * plan.rows_per_block + group.index) * plan.slot_bytes)),
        group_(group),
        cols_(cols),
        shift_(0) {}

  // Where word i begins: behind the end of the row for the last ones.
  __device__ int column(int i) const {
    return (group_.rank / 32 * 32 * kWords + group_.rank % 32) * kPerWord + i * kStep;
  }

  // Begins to copy a row; cp.async has the vectors that are all its own.
  __device__ void copy(const T* row, uint64_t policy) {
    shift_ = misalignment(row);
    const T* const base = row - shift_;
    for_vectors([&](int e) { cp_async_16(slot_ + e, base + e, 16, policy); });
    for_ends([&](int e) { slot_[e] = base[e]; });
  }
  // Writes `value` behind the row, as far as there are words.
  __device__ void pad(float value) const {
    const int end = shift_ + kWords * group_.threads * kPerWord;
    for (int e = shift_ + cols_ + group_.rank; e < end; e += group_.threads) slot_[e] = from_float<T>(value);
  }
  __device__ void load(Word (&words)[kWords]) const {
    const T* const first = slot_ + shift_ + column(0);
    if (kPerWord == 1 || shift_ % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = Word::load(first + i * kStep);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) words[i].data[k] = first[i * kStep + k];
      }
    }
  }
  // Writes a row that is to be stored to `target`.
  __device__ void put(const T* target, const Word (&words)[kWords]) {
    const int shift = misalignment(target);
    if (shift != shift_) group_barrier(group_);  // else each thread writes where it alone has read
    shift_ = shift;
    T* const first = slot_ + shift_ + column(0);
    if (kPerWord == 1 || shift_ % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i].assign_to(first + i * kStep);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) first[i * kStep + k] = words[i].data[k];
      }
    }
  }
  __device__ void store(T* target) const {
    T* const base = target - shift_;
    for_vectors([&](int e) { Vec<T, N>::load(slot_ + e).store(base + e); });
    for_ends([&](int e) { base[e] = slot_[e]; });
  }

 private:
  // Calls visit(e) for the first element e of each vector of this thread that lies in the row.
  template <typename Visit>
  __device__ void for_vectors(const Visit& visit) const {
    const int end = (shift_ + cols_) / N;
    const int first = (shift_ > 0) + group_.rank / 32 * (8 * kWords) + group_.rank % 32;  // 8 vectors of 32 words
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      if (first + i * 32 < end) visit((first + i * 32) * N);
    }
  }
  // Calls visit(e) for the element of this thread in the vectors that lie in the row in part.
  template <typename Visit>
  __device__ void for_ends(const Visit& visit) const {
    const int end = shift_ + cols_, tail = end / N * N, k = group_.rank;
    const bool of_head = k < N && shift_ > 0 && k >= shift_ && k < end;
    const bool of_tail = k >= N && tail + k - N < end && (tail > 0 || shift_ == 0);
    if (of_head || of_tail) visit(k < N ? k : tail + k - N);
  }

  T* slot_;
  Group group_;
  int cols_, shift_;  // `shift_`: where in the slot the row begins
};

// Words of a row of parameters in global memory, as RowSlot::load(): `otherwise` where there is no such row. Behind its
// end they may be anything that is finite where the last parameter is.
template <typename T, int kWords>
__device__ void load_parameters(const T* values, int cols, int first_column, float otherwise,
                                Vec<T, 4 / sizeof(T)> (&words)[kWords]) {
  constexpr int kPerWord = 4 / sizeof(T), kStep = 32 * kPerWord;
  using Word = Vec<T, kPerWord>;
  if (!values) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = Word::of([=](int) { return otherwise; });
    return;
  }
  if (reinterpret_cast<uintptr_t>(values) % 4 == 0) {
    const float value = to_float(values[cols - 1]);
    const Word last = Word::of([=](int) { return value; });
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = last;
      if (first_column + i * kStep + kPerWord <= cols) words[i] = Word::load(values + first_column + i * kStep);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int k = 0; k < kPerWord; ++k) words[i].data[k] = values[min(first_column + i * kStep + k, cols - 1)];
    }
  }
}

}  // namespace llmk::kernels
