// What the CPU kernels over rows share: operands that may be absent, and sums over rows.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/convert.h"

namespace llmk::cpu {

constexpr int64_t kBlock = 1024;

// Blocks of a row operand that may be absent, and then is the same value everywhere.
template <typename T>
class Operand {
 public:
  Operand(const T* row, Wide<T> value_if_absent) : row_(row) {
    if (row == nullptr) std::fill_n(buffer_, kBlock, narrow<T>(value_if_absent));
  }
  void set_row(const T* row) { row_ = row; }
  const LoopType<T>* load(int64_t begin, int64_t count) {
    return row_ != nullptr ? cpu::load(row_ + begin, count, buffer_) : buffer_;
  }

 private:
  const T* row_;
  LoopType<T> buffer_[kBlock];
};

// Columns [col_begin, col_end) of the sum of `rows` partial sums, each of `cols` columns.
template <typename T>
inline void add_partials(const Wide<T>* partials, int64_t rows, int64_t cols, int64_t col_begin, int64_t col_end,
                         T* target) {
  using A = Wide<T>;
  A sum[kBlock];
  LoopType<T> buffer[kBlock];
  for_blocks<kBlock>(col_end - col_begin, [&](int64_t begin, int64_t count) {
    const int64_t col = col_begin + begin;
    std::fill_n(sum, count, A(0));
    for (int64_t row = 0; row < rows; ++row) {
      const A* partial = partials + row * cols + col;
      for (int64_t i = 0; i < count; ++i) sum[i] += partial[i];
    }
    LoopType<T>* out = output_buffer(target + col, buffer);
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(sum[i]);
    store(out, count, target + col);
  });
}

}  // namespace llmk::cpu
