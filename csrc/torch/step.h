// What decode_layer and the linears are composed of, from norm.cpp, linear.cpp and attention.cpp. Called directly,
// since an error that passes through the dispatcher loses its text.
#pragma once
#include "binding.h"
#include "params/norm.h"

namespace llmk {

Tensor rms_norm_linear(const Tensor& x, std::optional<Tensor> norm_weight, const Tensor& weight,
                       std::optional<Tensor> bias, double eps, double weight_offset, bool cast_before_weight,
                       bool settled);

Tensor rms_norm_swiglu_linear(const Tensor& x, std::optional<Tensor> norm_weight, const Tensor& weight, double eps,
                              double weight_offset, bool cast_before_weight, bool settled);

// rms_norm between kernels that are not of this library: without the overlap with its neighbours, which then costs
// 0.3 us instead of saving some.
Tensor rms_norm_between(const Tensor& x, const std::optional<Tensor>& weight, const RmsNormOptions& options);

void linear_add_(Tensor residual, const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, bool settled);

Tensor rope_decode_attention(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                             const Tensor& slots, const Tensor& lengths, std::optional<Tensor> starts,
                             const Tensor& k_cache, const Tensor& v_cache, std::optional<Tensor> block_table,
                             int64_t heads, std::optional<double> scale, int64_t window, double softcap, bool settled);

}  // namespace llmk
