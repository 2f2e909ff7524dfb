// Where the keys of a sequence are in a paged cache (params/flash_attention.h).
#pragma once
#include "device/divide.cuh"
#include "params/flash_attention.h"

namespace llmk::kernels::flash {

class KeyPages {
 public:
  __device__ KeyPages(const FlashAttentionParams& params, int64_t b)
      : table_(params.block_table + b * params.table_stride),
        size_(static_cast<int>(params.page_size)),
        pages_(static_cast<int>(params.pages)),
        keys_(static_cast<int>(params.k_tokens)) {}

  // The page of a key, -1 where there is none, and its row there.
  __device__ int2 find(int key) const {
    const int index = divide(key, size_), page = key < keys_ ? table_[index] : -1;
    return {page < pages_ ? page : -1, key - index * size_};
  }

 private:
  const int32_t* table_;
  int size_, pages_, keys_;
};

}  // namespace llmk::kernels::flash
