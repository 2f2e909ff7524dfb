// Parameters of the beginning of a forward, on either device. Strides count elements; columns are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

struct EmbedTokensParams {
  const void* embedding;  // [vocab, cols]
  const void* ids;        // [rows] int32 or int64, contiguous
  void* hidden;           // [rows, cols]
  int64_t rows, cols, vocab;
  int64_t embedding_stride, hidden_stride;  // between rows
  double scale;                             // of the embeddings
  bool ids_int64;
  bool accumulate;  // they are added to `hidden`

  // What is counted for each of the `batch` sequences, or null; contiguous.
  int32_t* counters;  // [counts, batch], the first of which are the positions of the last tokens
  int64_t counts, batch;
  int32_t advance;       // added to all of them
  int32_t* positions;    // [batch, tokens] of the last tokens, or null
  int64_t tokens;        // of each sequence
  int32_t max_position;  // positions are from 0 to this
};

}  // namespace llmk
