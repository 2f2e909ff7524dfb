// Choices for linears that were measured on the GPU that runs them. Where there is one, route.h takes it in place of
// its rules. Plain host code.
//
//   TunedLinear     one choice, and the linears that it is for
//   refusal         why a GPU cannot run it
//   TunedLinears    those of a GPU: an immutable table, sorted
//
// llmkernels/_tune measures them and sets the table of a GPU by llmk_set_tuned_linears() (linear.cu).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "gemv_plan.h"
#include "kernels/device_info.h"
#include "kernels/gemm/plan.h"
#include "plan.h"

namespace llmk::kernels {

enum class LinearVariant { kLibrary, kGemv, kMma, kWgmma, kSm80, kGemm };

// What a choice depends on. Both dtypes of 2 bytes take the same, with and without a bias.
struct LinearKey {
  int64_t m, n, k;
  bool glu, normalize, residual, in_step;
};

constexpr int64_t kByRule = -1;

// Plain numbers, in the order in which Python has them.
struct TunedLinear {
  int64_t first_m, last_m, n, k, glu, normalize, residual, in_step;
  int64_t variant;  // a LinearVariant, or kByRule: nothing was faster than the choice of the rules
  int64_t cluster, max_chunks, max_shared_bytes, max_tile_rows, prefetch_chunks;  // of mma and wgmma: a LinearTuning
  int64_t columns;                                                                // of gemm: a gemm_tile()

  bool is(LinearVariant other) const { return variant == static_cast<int64_t>(other); }
  LinearTuning tuning() const {
    return {is(LinearVariant::kWgmma),       static_cast<int>(cluster),
            static_cast<int>(max_chunks),    static_cast<size_t>(max_shared_bytes),
            static_cast<int>(max_tile_rows), static_cast<int>(prefetch_chunks)};
  }
  GemmTile tile() const { return gemm_tile(static_cast<int>(columns)); }
};
constexpr int64_t kTunedLinearNumbers = sizeof(TunedLinear) / sizeof(int64_t);

namespace routing {

// Of mma and wgmma for m tokens.
inline const char* plan_refusal(const TunedLinear& t, int64_t m, const DeviceInfo& device) {
  if (static_cast<size_t>(t.max_shared_bytes) > device.shared_bytes) return "a block has less shared memory";
  const LinearShape shape{.m = m, .n = t.n, .k = t.k, .glu = t.glu != 0, .normalize = t.normalize != 0 && m <= 16};
  const LinearPlan plan = plan_linear(shape, device.clusters, t.tuning());
  // The first sum has overflowed where not even what lies beside the ring fits.
  if (plan.shared_bytes > static_cast<size_t>(t.max_shared_bytes) || plan.stages < plan.k_consumers) {
    return "the ring does not fit max_shared_bytes";
  }
  // The producer of a cluster takes part in the barriers of one tile.
  if (plan.cluster > 1 && plan.output_tiles > device.clusters[plan.cluster]) return "a cluster has more than one tile";
  return nullptr;
}

inline bool is_between(int64_t low, int64_t value, int64_t high) { return low <= value && value <= high; }

}  // namespace routing

// Why the GPU cannot run a choice with m tokens; null where it can. `has_tma`: as route.h has it.
inline const char* refusal(const TunedLinear& t, int64_t m, const DeviceInfo& device, bool has_tma) {
  using routing::is_between;
  if (t.variant == kByRule || t.is(LinearVariant::kLibrary)) return nullptr;
  if (t.is(LinearVariant::kGemv)) {
    if (m != 1) return "gemv is for one token";
    if (!has_tma) return "gemv needs bulk copies, of compute capability 9.0";
    return gemv_fits(t.n, t.k, device.sm_count) ? nullptr : "k or the rows of the weight are too many for gemv";
  }
  if (t.is(LinearVariant::kMma) || t.is(LinearVariant::kWgmma)) {
    const bool wgmma = t.is(LinearVariant::kWgmma);
    if (!wgmma && !is_between(1, m, kLinearMaxMmaTokens)) return "mma is for 1 to 16 tokens";
    if (wgmma && !is_between(kLinearMaxMmaTokens + 1, m, kLinearMaxTokens)) return "wgmma is for 17 to 64 tokens";
    if (!has_tma) return "mma and wgmma need TMA, of compute capability 9.0";
    if (wgmma && !device.has_wgmma) return "wgmma needs compute capability 9.0";
    if (t.cluster != 1 && t.cluster != 2 && t.cluster != 4 && t.cluster != 8) return "cluster is not 1, 2, 4 or 8";
    if (!wgmma && t.cluster != 1) return "mma has clusters of one block";
    if (device.clusters[t.cluster] <= 0) return "the GPU runs no clusters of so many blocks";
    if (!is_between(1, t.max_chunks, 16)) return "max_chunks is not from 1 to 16";
    if (!is_between(1, t.prefetch_chunks, kLinearMaxStages)) return "prefetch_chunks is not from 1 to 56";
    if (!is_between(16, t.max_tile_rows, 384)) return "max_tile_rows is not from 16 to 384";
    if (!is_between(0, t.max_shared_bytes, 1 << 20)) return "max_shared_bytes is not from 0 to 2^20";
    return routing::plan_refusal(t, m, device);
  }
  if (t.is(LinearVariant::kGemm)) {
    if (m <= kLinearMaxTokens) return "gemm is for more than 64 tokens";
    if (!has_tma || !device.has_wgmma) return "gemm needs wgmma, of compute capability 9.0";
    const bool known = std::any_of(std::begin(kGemmTiles), std::end(kGemmTiles), [&](const GemmTile& tile) {
      return tile.columns + 1000 * static_cast<int>(tile.schedule) == t.columns;
    });
    if (!known) return "gemm has no tiles of so many columns";
    if (t.glu && t.tile().schedule == GemmSchedule::kSplit) return "gemm does not split K with a gated activation";
    return gemm_shared_bytes(t.tile()) <= device.shared_bytes ? nullptr : "a block has less shared memory";
  }
  return "the variant is not one that can be chosen";
}

// Why the GPU cannot run a choice with some number of the tokens that it is for; null where it can.
inline const char* refusal(const TunedLinear& t, const DeviceInfo& device, bool has_tma) {
  using routing::is_between;
  constexpr int64_t kMost = INT32_MAX;
  if (!is_between(1, t.first_m, t.last_m) || t.last_m > kMost) return "first_m to last_m is not a range of tokens";
  if (!is_between(1, t.n, kMost) || !is_between(1, t.k, kMost)) return "n or k is not from 1 to 2^31 - 1";
  for (const int64_t flag : {t.glu, t.normalize, t.residual, t.in_step}) {
    if (!is_between(0, flag, 1)) return "glu, normalize, residual or in_step is not 0 or 1";
  }
  if (t.glu && t.n % 2 != 0) return "n is odd with glu";
  if (t.first_m <= kLinearMaxTokens && t.last_m > kLinearMaxTokens) return "first_m to last_m crosses 64 tokens";
  // Beyond 64 tokens none of the limits depends on their number.
  for (int64_t m = t.first_m; m <= std::max<int64_t>(t.first_m, std::min<int64_t>(t.last_m, kLinearMaxTokens)); ++m) {
    if (const char* reason = refusal(t, m, device, has_tma)) return reason;
  }
  return nullptr;
}

namespace routing {

inline auto linear_of(const TunedLinear& t) {
  return std::make_tuple(t.n, t.k, t.glu, t.normalize, t.residual, t.in_step);
}
inline bool same_linear(const TunedLinear& a, const TunedLinear& b) { return linear_of(a) == linear_of(b); }
inline auto order(const TunedLinear& t) { return std::make_tuple(linear_of(t), t.first_m); }

}  // namespace routing

class TunedLinears {
 public:
  struct Refused {
    int64_t index;
    const char* reason;  // null: none is refused
  };

  explicit TunedLinears(std::vector<TunedLinear> entries) : sorted_(std::move(entries)) {
    std::sort(sorted_.begin(), sorted_.end(),
              [](const auto& a, const auto& b) { return routing::order(a) < routing::order(b); });
  }

  // The first of `entries` that the GPU cannot run, or whose tokens another one has, too.
  static Refused find_refused(const std::vector<TunedLinear>& entries, const DeviceInfo& device, bool has_tma) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (const char* reason = refusal(entries[i], device, has_tma)) return {static_cast<int64_t>(i), reason};
    }
    std::vector<size_t> indices(entries.size());
    for (size_t i = 0; i < indices.size(); ++i) indices[i] = i;
    std::sort(indices.begin(), indices.end(),
              [&](size_t a, size_t b) { return routing::order(entries[a]) < routing::order(entries[b]); });
    for (size_t i = 1; i < indices.size(); ++i) {
      const TunedLinear &last = entries[indices[i - 1]], &next = entries[indices[i]];
      if (routing::same_linear(last, next) && next.first_m <= last.last_m) {
        return {static_cast<int64_t>(indices[i]), "another entry is for the same tokens of the same linear"};
      }
    }
    return {0, nullptr};
  }

  // The choice for a linear, or null.
  const TunedLinear* find(const LinearKey& key) const {
    const TunedLinear wanted{.first_m = key.m,
                             .last_m = key.m,
                             .n = key.n,
                             .k = key.k,
                             .glu = key.glu,
                             .normalize = key.normalize,
                             .residual = key.residual,
                             .in_step = key.in_step,
                             .variant = kByRule,
                             .cluster = 0,
                             .max_chunks = 0,
                             .max_shared_bytes = 0,
                             .max_tile_rows = 0,
                             .prefetch_chunks = 0,
                             .columns = 0};
    const auto after = std::upper_bound(sorted_.begin(), sorted_.end(), wanted, [](const auto& a, const auto& b) {
      return routing::order(a) < routing::order(b);
    });
    if (after == sorted_.begin()) return nullptr;
    const TunedLinear& found = *std::prev(after);
    return routing::same_linear(found, wanted) && key.m <= found.last_m ? &found : nullptr;
  }

 private:
  std::vector<TunedLinear> sorted_;
};

}  // namespace llmk::kernels
