// The norm hand-off (params/linear.h) of linears of up to 128 tokens, with a gated activation or split K. The warps
// beside the one that copies find what the epilogue needs while the products are under way:
//
//   reader   x is `scaled`     1 / rms of each token, from the sums of squares that the linear before has left. The
//                              epilogue multiplies the sums by it
//   writer   adds, and writes  in float16 the scale of the next norm's weight (linear/norm_weight.cuh), which the
//            `scaled`          epilogue divides it by
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/tma.cuh"
#include "kernels/linear/norm_weight.cuh"
#include "params/linear.h"
#include "plan.h"

namespace llmk::kernels::many_tokens {

constexpr int kHelpersBarrier = 4;  // 1 to 3 are those of the warps that multiply

struct NormHandoff {
  const float* squares;  // of the linear before
  int parts;             // of them, per token; 0: x is what is multiplied
  float inverse_cols;    // of x; the helpers have no registers for a division
  float eps;
  const void* next_norm_weight;  // of the norm that follows the residual add
  float next_offset;
  void* scaled;         // for the next linear, or null
  float* next_squares;  // likewise

  __host__ __device__ bool is_used() const { return parts > 0 || scaled != nullptr; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// In shared memory, behind the barriers. `squares`: sums of the parts of each warp; then, in the first row, 1 / rms
// times the weight's scale. `largest`: of the next norm's weight, in each warp's part.
struct HandoffPlace {
  float squares[kGemmHelpers][kHandoffTokens];
  uint32_t largest[4];

  template <typename T>
  __device__ float next_scale() const {
    return norm_weight_scale<T>(max(max(largest[0], largest[1]), largest[2]));
  }
};
static_assert(sizeof(HandoffPlace) + 8 == kGemmHandoffBytes && kGemmHelpers == 3 && kHandoffTokens == 4 * 32);

// Adds up the partial sums of squares, each warp every third part, and all of them what the warps have.
__device__ inline void load_rstd(const NormHandoff& norm, int m, HandoffPlace& place, int warp, int lane) {
  float4 sum{};
  if (4 * lane < m) {
    const float* from = norm.squares + warp * kHandoffTokens + 4 * lane;
#pragma unroll 2
    for (int part = warp; part < norm.parts; part += kGemmHelpers, from += kGemmHelpers * kHandoffTokens) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
  }
  *reinterpret_cast<float4*>(&place.squares[warp][4 * lane]) = sum;
  named_barrier(kHelpersBarrier, 32 * kGemmHelpers);
  const float scale = norm.squares[norm.parts * kHandoffTokens];
#pragma unroll 1
  for (int token = 32 * warp + lane; token < m; token += 32 * kGemmHelpers) {
    const float squares = place.squares[0][token] + place.squares[1][token] + place.squares[2][token];
    place.squares[0][token] = rstd_of(squares, norm.inverse_cols, norm.eps) * scale;
  }
}

// What helper `warp` does, and arrives at `ready`. `columns`: the next norm's weight, of which the block scales those
// from `column` up to `end`. `weight_early`: that may be read before the previous kernels have ended.
template <typename T>
__device__ void prepare_handoff(const NormHandoff& norm, int m, bool weight_early, int columns, int column, int end,
                                HandoffPlace& place, uint32_t ready, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32, thread = 32 * warp + lane;
  if (norm.scaled) {
    if (!weight_early) pdl_wait();
    if constexpr (std::is_same_v<T, __half>) {
      uint32_t largest = largest_of_weight(norm.next_norm_weight, columns / 8, thread, 32 * kGemmHelpers);
      largest = __reduce_max_sync(0xffffffffu, largest);
      if (lane == 0) place.largest[warp] = largest;
    } else if (column + 64 * thread < min(end, columns)) {
      prefetch_l2(static_cast<const T*>(norm.next_norm_weight) + column + 64 * thread);
    }
  }
  if (norm.parts > 0) {
    pdl_wait();
    load_rstd(norm, m, place, warp, lane);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(ready);
}

#endif

}  // namespace llmk::kernels::many_tokens
