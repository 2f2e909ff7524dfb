// Sampling on the CPU, by the same arithmetic as on the GPU (sampling_arithmetic.h, kernels/sampling/sample.cu). Finds
// thresholds by partial sorting. float64 logits are rounded to float32.
#include "cpu/sampling.h"

#include <algorithm>
#include <cfloat>
#include <functional>
#include <vector>

#include "cpu/convert.h"
#include "sampling_arithmetic.h"

namespace llmk::cpu {
namespace {

using namespace llmk::sampling;

template <typename T>
T of_row(const PerRow<T>& parameter, int64_t row) {
  return parameter.values ? parameter.values[row] : parameter.value;
}

template <typename T>
constexpr float kLargestFinite = FLT_MAX;
template <>
constexpr float kLargestFinite<Half> = 65504.f;
template <>
constexpr float kLargestFinite<BFloat16> = 3.38953139e38f;

// The weights of the logits of at least `floor`.
inline void compute_weights(const float* values, int64_t count, const Distance& distance, float floor,
                            uint64_t* weights) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t weight = weight_of(distance(values[i]));
    weights[i] = values[i] >= floor ? weight : 0;
  }
}

class Sampler {
 public:
  explicit Sampler(const SamplingParams& params) : params_(params), values_(params.vocab), weights_(params.vocab) {}

  template <typename T>
  int64_t draw(int64_t row) {
    load<T>(row);
    const int64_t best = std::max_element(values_.begin(), values_.end()) - values_.begin();
    const float temperature = of_row(params_.temperature, row);
    if (values_[best] == -INFINITY) return 0;
    if (!(temperature > 0.f)) return best;

    const Distance distance(values_[best], temperature);
    const float floor = kth_largest(of_row(params_.top_k, row));
    dispatch_instruction_set([&] { compute_weights(values_.data(), params_.vocab, distance, floor, weights_.data()); });
    if (const float top_p = of_row(params_.top_p, row); top_p < 1.f) apply_top_p(top_p, distance);

    const uint64_t min_weight = min_p_weight(of_row(params_.min_p, row));
    uint64_t total = 0;
    for (uint64_t& weight : weights_) total += weight = weight >= min_weight ? weight : 0;
    uint64_t remaining =
        high_product(random_bits(params_.rng_state[0], params_.rng_state[1] & kOffsetMask, row), total);
    int64_t token = 0;
    while (remaining >= weights_[token]) remaining -= weights_[token++];
    return token;
  }

 private:
  template <typename T>
  void load(int64_t row) {
    const T* const logits = static_cast<const T*>(params_.logits) + row * params_.logits_stride;
    const float penalty = of_row(params_.repetition_penalty, row);
    const bool penalises = params_.seen && penalty > 0.f && penalty != 1.f;
    const Penalty penalised(penalty);
    const uint8_t* const seen = penalises ? params_.seen + row * params_.seen_stride : nullptr;
    for_blocks<512>(params_.vocab, [&](int64_t begin, int64_t count) {
      LoopType<T> buffer[512];
      const LoopType<T>* const x = cpu::load(logits + begin, count, buffer);
      for (int64_t i = 0; i < count; ++i) {
        const float value = sanitize(static_cast<float>(widen(x[i])), kLargestFinite<T>);
        values_[begin + i] = seen && seen[begin + i] ? penalised(value) : value;
      }
    });
  }

  float kth_largest(int64_t k) {
    if (k <= 0 || k >= params_.vocab) return -INFINITY;
    sorted_ = values_;
    std::nth_element(sorted_.begin(), sorted_.begin() + (k - 1), sorted_.end(), std::greater<>());
    return sorted_[k - 1];
  }

  // Drops all but the most probable tokens that reach top_p; of equal ones, those with the highest index stay.
  void apply_top_p(float top_p, const Distance& distance) {
    std::vector<uint64_t> bins(kBins);
    for (int64_t i = 0; i < params_.vocab; ++i) bins[bin_of(distance(values_[i]))] += weights_[i];
    uint64_t total = 0, above = 0;
    for (const uint64_t bin : bins) total += bin;
    const uint64_t target = top_p_target(top_p, total);
    int target_bin = 0;
    while (above + bins[target_bin] < target) above += bins[target_bin++];

    std::vector<std::pair<float, int64_t>> members;  // of the bin in which the target lies
    for (int64_t i = 0; i < params_.vocab; ++i) {
      const int bin = bin_of(distance(values_[i]));
      if (bin == target_bin && weights_[i] > 0) members.emplace_back(values_[i], i);
      if (bin > target_bin) weights_[i] = 0;
    }
    std::sort(members.begin(), members.end(), std::greater<>());
    for (const auto& [value, index] : members) {
      const bool keep = above < target;
      above += weights_[index];
      if (!keep) weights_[index] = 0;
    }
  }

  const SamplingParams& params_;
  std::vector<float> values_, sorted_;
  std::vector<uint64_t> weights_;
};

}  // namespace

void sample(const SamplingParams& params, Dtype dtype, int64_t begin, int64_t end) {
  dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Sampler sampler(params);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = sampler.draw<T>(row);
      params.tokens[row] = token;
      if (params.seen) params.seen[row * params.seen_stride + token] = 1;
    }
  });
}

}  // namespace llmk::cpu
