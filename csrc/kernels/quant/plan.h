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

constexpr int kMaxThreads = 1024, kBlockThreads = 256;

// A group of `count` vectors. With few groups, each takes as many threads as possible. `most_vectors`: per thread.
inline GroupPlan plan_group(int64_t count, bool few_groups, int most_vectors) {
  constexpr int kNarrow = 128;
  GroupPlan plan{0, 0, 0};
  if (count <= (few_groups ? kMaxThreads : kNarrow)) {
    plan.vectors = 1;
  } else {
    for (int vectors = 2; vectors <= most_vectors && plan.vectors == 0; vectors *= 2) {
      const int threads = vectors == most_vectors ? kMaxThreads : kMaxThreads / 2;
      if (count <= static_cast<int64_t>(vectors) * threads) plan.vectors = vectors;
    }
  }
  plan.threads = group_threads(count, plan.vectors > 0 ? plan.vectors : 4, kMaxThreads);
  plan.groups_per_block = std::max(1, kBlockThreads / plan.threads);
  return plan;
}

}  // namespace llmk::kernels::quant
