// The launch plan of FP8 quantization: how a group of elements that share a scale is split over threads. A maximum is
// exact in any order, so the plan may depend on the number of groups.
#pragma once
#include "kernels/norm/plan.h"

namespace llmk::kernels::quant {

struct GroupPlan {
  int vectors;  // per thread, kept in registers; 0: the group is too long for that and is read twice
  int threads;  // per group
  int groups_per_block;
};

constexpr int kMaxThreads = 1024, kBlockThreads = 256;  // of a block at most, and at least
constexpr int64_t kSomeRowsPerSm = 16;

// `groups` of `count` vectors, at most `most_vectors` per thread and `most_threads` per group, at least
// `least_threads`, a power of two up to 32. With few groups, each takes as many threads as possible. With many, a warp
// if that is enough, or two of them with all vectors, since most instructions do not depend on the number of vectors;
// else four vectors, for more groups at a time. An H200, bfloat16, the time with four vectors per thread over that with
// eight:
//
//   rows x group | result
//   -------------|-------
//   2048 x 3584  | 0.97
//   16384 x 3584 | 1.04
//   2048 x 8192  | 0.88
//   2048 x 18944 | 1.01
//
// A block has at least 256 threads, or 128 for up to 16 groups per SM that take a warp each. In the same units, the
// time with that over the time of the other:
//
//   rows x group | result
//   -------------|-------
//   2048 x 896   | 0.93
//   2048 x 1536  | 0.94
inline GroupPlan plan_group(int64_t count, int64_t groups, int sm_count, int most_vectors, int most_threads,
                            int least_threads = 1) {
  const bool few = groups <= kFewRowsPerSm * sm_count;
  GroupPlan plan{0, 0, 0};
  const auto fits = [&](int vectors, int64_t threads) {
    if (plan.vectors == 0 && count <= vectors * threads) plan.vectors = vectors;
  };
  for (int vectors = 1; vectors < most_vectors; vectors *= 2) fits(vectors, few ? most_threads : 32);
  if (!few && most_vectors > 0) fits(most_vectors, 64), fits(4, 512);
  fits(most_vectors, most_threads);
  plan.threads = std::max(least_threads, group_threads(count, plan.vectors > 0 ? plan.vectors : 4, kMaxThreads));
  const int64_t per_sm = std::max<int64_t>(1, groups / sm_count);
  const int least = plan.threads <= 32 && groups <= kSomeRowsPerSm * sm_count ? kBlockThreads / 2 : kBlockThreads;
  const int together = (least + plan.threads - 1) / plan.threads;
  plan.groups_per_block = static_cast<int>(std::min<int64_t>(together, per_sm));
  return plan;
}

}  // namespace llmk::kernels::quant
