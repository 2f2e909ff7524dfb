// Parameters of the rotary-embedding kernels, on either device. Strides count elements; head dimensions are contiguous.
#pragma once
#include <cstdint>

namespace llmk {

struct RopeTensor {
  const void* in;  // [batch, tokens, heads, head_dim] by the strides below
  void* out;       // the same shape by its own strides; may be `in`
  int64_t heads;
  int64_t in_batch, in_token, in_head;     // strides
  int64_t out_batch, out_token, out_head;  // strides
};

struct RopeParams {
  RopeTensor q, k;
  const void* cos;           // rows of rotary_dim elements, or of rotary_dim / 2 when `half_width`
  const void* sin;           // same
  const void* position_ids;  // [batch, tokens] by the strides below, int32 or int64: rows of cos and sin; or null: cos
                             // and sin have a row for each token, by cos_batch, cos_token, ...
  bool position_ids_int64;
  int64_t positions_batch, positions_token;  // strides of position_ids
  int64_t cos_batch, cos_token;              // strides of cos and sin without position_ids (cos_batch 0: shared)
  int64_t sin_batch, sin_token;
  int64_t cos_row, sin_row;  // strides between table rows, with position_ids
  int64_t table_rows;        // with position_ids: valid positions are [0, table_rows)
  int64_t batch, tokens, head_dim, rotary_dim;
  bool half_width;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  bool transposed;   // multiply by the transpose of the rotation: the backward pass
};

}  // namespace llmk
