// Rows of any alignment that warps keep in registers, by words of 4 bytes: each warp its part of a row.
//
//   global   |. . . . 0 1 2 3|4 5 6 7 8 9 . .|      vectors of 16 bytes; those at the ends belong to the part in part
//   shared   |. . . . 0 1 2 3|4 5 6 7 8 9 - -|- -   a slot: the part lies as in global memory, padding behind it
//   words             |0 1|2 3|4 5|6 7|8 9|- -|- -   the part's own: number 32 i + l is the i-th of lane l
//
// A part goes through shared memory both ways: from or to global memory by vectors, from or to registers by words, and
// single elements at the two ends. A word of 16-bit elements is two accesses where the row starts at an odd element.
// That takes 2 to 3 instructions per word, where cutting a vector out of two (shifted.cuh) takes 20 per vector. So an
// element has the same thread, and a sum the same order, wherever a row starts; and of another warp, a warp needs
// nothing but its sums.
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
  size_t shared_bytes;

  // Of the slots of one row, one for each of its warps.
  __host__ __device__ int64_t row_bytes() const { return int64_t{threads} / 32 * (words * 128 + 16); }
  LaunchShape shape(int64_t rows) const {
    return {(rows + rows_per_block - 1) / rows_per_block, dim3(threads, rows_per_block), shared_bytes};
  }
};

constexpr int kMaxWordThreads = 512;
constexpr int64_t kLeastWords = 64;  // of a row: most of a warp that has fewer would be idle
constexpr int kWarpRows = 4;         // rows of a block, if a warp is enough for each

// For rows of `cols` elements, of `slots` operands. A thread has as many words as it may, unless with fewer of them the
// threads have an eighth less in all, most of which would be padding. An H100, bfloat16, us:
//
//   case              | 16 words | 12   | 8
//   ------------------|----------|------|-----
//   rms_norm 8192x1001| 15.1     | 16.1 | 15.3
//   rms_norm 8192x2050| 27.5     | 26.8 | 31.3
//   rms_norm 8192x4097| 50.5     | 52.3 | 65.5
//   softmax 8192x1001 | 13.8     | 17.2 | 14.7
//   softmax 16352x513 | 17.9     | 16.0 | 23.0
inline WordPlan plan_words(int64_t cols, size_t element_bytes, int slots, int most_words = 16,
                           int most_threads = kMaxWordThreads) {
  const int64_t count = (cols * static_cast<int64_t>(element_bytes) + 3) / 4;
  WordPlan plan{};
  if (count < kLeastWords) return plan;
  for (const int words : {16, 12, 8, 4}) {
    const int64_t threads = (count + 32 * words - 1) / (32 * words) * 32;
    if (words > most_words || threads > most_threads) continue;
    if (plan.words == 0 || threads * words * 8 < int64_t{plan.threads} * plan.words * 7) {
      plan.words = words, plan.threads = static_cast<int>(threads);
    }
  }
  if (plan.words == 0) return plan;
  plan.rows_per_block = plan.threads == 32 ? kWarpRows : 1;
  plan.shared_bytes = static_cast<size_t>(plan.row_bytes()) * slots * plan.rows_per_block;
  return plan;
}

// The place of a warp's part of one operand's row in shared memory. A warp calls copy(), pad() and arrived(), then
// load(); put(), then store(). A ring of slots, in which copies stay under way, is filled with zeros once; then
// copy_vectors() and load_end() begin a copy, and put_end() goes on with it later. All take the row, or where it is to
// be stored, and go to the part by themselves.
template <typename T, int kWords>
class RowSlot {
  static constexpr int N = kVecWidth<T>;

 public:
  static constexpr int kPerWord = 4 / sizeof(T), kStep = 32 * kPerWord;  // elements of a word, and between two
  static constexpr int kPart = kWords * kStep;
  using Type = T;
  using Word = Vec<T, kPerWord>;

  // Slot `number` of the group's row, of `cols` elements: none of a row that does not exist.
  __device__ RowSlot(int4* slots, int number, const Group& group, int rows_per_block, int cols)
      : lane_(group.rank % 32),
        begin_(group.rank / 32 * kPart),
        cols_(max(0, min(cols - begin_, kPart))),
        shift_(0),
        is_full_(cols - begin_ >= kPart) {
    const int row = number * rows_per_block + group.index;
    slot_ = reinterpret_cast<T*>(slots + (row * (group.threads / 32) + group.rank / 32) * (8 * kWords + 1));
  }
  // For what is to be stored of the part that another slot has, in its place: T is narrower.
  template <typename Wide, int kWideWords>
  __device__ explicit RowSlot(const RowSlot<Wide, kWideWords>& wide)
      : lane_(wide.lane_), begin_(wide.begin_), cols_(wide.cols_), shift_(0), is_full_(wide.is_full_) {
    static_assert(kPart == RowSlot<Wide, kWideWords>::kPart && sizeof(T) < sizeof(Wide));
    slot_ = reinterpret_cast<T*>(wide.slot_);
  }

  // Where word i begins: behind the end of the row for the last ones.
  __device__ int column(int i) const { return begin_ + lane_ * kPerWord + i * kStep; }

  // Whether all words of the warp's part are the row's. (cols_ == kPart would say the same, but ptxas 13.0 makes one
  // instruction of a clamp to [0, kPart] and a comparison with kPart, whose predicate is true for less, too.)
  __device__ bool is_full() const { return is_full_; }

  // Where the slot has the row's element `column`.
  __device__ T* at(int column) const { return slot_ + shift_ + column - begin_; }

  // The slot has, or is to have, this row.
  __device__ void holds(const T* row) { shift_ = misalignment(row); }

  // Begins to copy a row; cp.async has the vectors that are all its own.
  __device__ void copy(const T* row, uint64_t policy) {
    copy_vectors(row, policy);
    for_ends([&](int e) { slot_[e] = base(row)[e]; });
  }
  __device__ void copy_vectors(const T* row, uint64_t policy) {
    holds(row);
    const T* const source = base(row);
    for_vectors([&](int e) { cp_async_16(slot_ + e, source + e, 16, policy); });
  }
  // This thread's element of the vectors that lie in the row in part; and its place, with zeros behind the row, where
  // one that ended further on may have been.
  __device__ T load_end(const T* row) const {
    T end = from_float<T>(0.f);
    for_ends([&](int e) { end = base(row)[e]; });
    return end;
  }
  __device__ void put_end(T end) const {
    for_ends([&](int e) { slot_[e] = end; });
    const int behind = cols_ + lane_ - 2 * N;  // the lanes after those of the ends
    if (lane_ >= 2 * N && lane_ < 3 * N && behind < kPart) slot_[shift_ + behind] = from_float<T>(0.f);
  }
  // Writes `value` behind the row, as far as there are words.
  __device__ void pad(float value) const {
    for (int c = cols_ + lane_; c < kPart; c += 32) slot_[shift_ + c] = from_float<T>(value);
  }
  // Waits until all but the newest kPending copies of the warp have arrived.
  template <int kPending = 0>
  __device__ static void arrived() {
    cp_async_wait<kPending>();
    __syncwarp();
  }

  __device__ Word word(int i) const {
    const T* const first = own() + i * kStep;
    if constexpr (kPerWord == 2) {
      if (shift_ % 2 != 0) return two(first);
    }
    return Word::load(first);
  }
  __device__ void load(Word (&words)[kWords]) const {
    const T* const first = own();
    if (kPerWord == 1 || shift_ % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = Word::load(first + i * kStep);
    } else if constexpr (kPerWord == 2) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = two(first + i * kStep);
    }
  }
  __device__ void put(const Word (&words)[kWords]) const {
    T* const first = own();
    if (kPerWord == 1 || shift_ % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i].assign_to(first + i * kStep);
    } else if constexpr (kPerWord == 2) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        first[i * kStep] = words[i].data[0];
        first[i * kStep + 1] = words[i].data[1];
      }
    }
  }
  // Writes a row that is to be stored to `target`, once all lanes have loaded what was there.
  __device__ void put(const T* target, const Word (&words)[kWords]) {
    __syncwarp();
    holds(target);
    put(words);
  }
  __device__ void store(T* target) const {
    __syncwarp();
    T* const to = target + begin_ - shift_;
    for_vectors([&](int e) { Vec<T, N>::load(slot_ + e).store(to + e); });
    for_ends([&](int e) { to[e] = slot_[e]; });
  }

 private:
  // Two elements at an address that is not a word's.
  __device__ static Word two(const T* address) { return Word{{address[0], address[1]}}; }
  // What lies in global memory as the slot's first element in it.
  __device__ const T* base(const T* row) const { return row + begin_ - shift_; }
  // The lane's first word.
  __device__ T* own() const { return slot_ + shift_ + lane_ * kPerWord; }

  // Calls visit(e) for the first element e of each vector of this thread that lies in the part.
  template <typename Visit>
  __device__ void for_vectors(const Visit& visit) const {
    const int first = (shift_ > 0) + lane_, end = (shift_ + cols_) / N;
#pragma unroll
    for (int i = 0; i < (kWords + 3) / 4; ++i) {
      if (first + i * 32 < end) visit((first + i * 32) * N);
    }
  }
  // Calls visit(e) for the element of this thread in the vectors that lie in the part in part.
  template <typename Visit>
  __device__ void for_ends(const Visit& visit) const {
    const int end = shift_ + cols_, tail = end / N * N, k = lane_;
    const bool of_head = k < N && shift_ > 0 && k >= shift_ && k < end;
    const bool of_tail = k >= N && tail + k - N < end && (tail > 0 || shift_ == 0);
    if (of_head || of_tail) visit(k < N ? k : tail + k - N);
  }

  template <typename, int>
  friend class RowSlot;

  T* slot_;
  int lane_, begin_, cols_, shift_;  // `begin_`: of the part in the row; `shift_`: of the part in the slot
  bool is_full_;
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
    if (first_column + (kWords - 1) * kStep + kPerWord <= cols) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = Word::load(values + first_column + i * kStep);
      return;
    }
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
