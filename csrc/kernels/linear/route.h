// The route of a linear: which kernel runs it, by which plan, or whether the library (cuBLAS) does, and why. All of
// that is decided here: the binding and the launcher ask, and obey. Plain host code.
//
//   variant   tokens        GPU                          kernel
//   -------   -----------   --------------------------   -------------------------------------------------
//   gemv      1             TMA: 9.0 on, 200 KB shared   gemv.cu
//   mma       1 to 16       the same                     main_loop_mma.cuh
//   wgmma     17 to 64      9.0                          main_loop_wgmma.cuh
//   sm80      1 to 16       8.0 on                       linear_sm80.cuh, where there is no TMA
//             1 to 16       8.0 on                       the same, for quantized weights that gemv does not take
//   gemm      65 and more   9.0                          gemm/gemm_sm90.cuh
//   library   any           any                          the norm's kernel, cuBLAS, the activation's kernel
//
// A linear that adds to the residual may do the work of the norm that follows, for the linear after it: from wgmma to
// wgmma, and up to 128 tokens from gemm with split K to gemm with split K or a gated activation (choose_handoff()).
//
// Where a choice was measured on this GPU (tuned.h), that is taken in place of the rules below.
//
// A decision takes well under a microsecond, so none is kept: a cache would have to be asked as long, by more code.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "gemv_plan.h"
#include "kernels/device_info.h"
#include "kernels/gemm/plan.h"
#include "kernels/verdict.h"
#include "params/linear.h"
#include "plan.h"
#include "tuned.h"

namespace llmk::kernels {

// What a route depends on, of the linear.
struct LinearProblem {
  int64_t m;
  Weight weight;                      // [n, k]; its elements are not read
  int64_t x_stride, y_stride;         // elements between rows; y or the residual
  Dtype dtype;                        // of x
  bool glu, bias, residual, in_step;  // as in params/epilogue.h and params/linear.h
  bool normalize;                     // an RMSNorm comes first
  bool norm_weight;                   // which has a weight
  double norm_offset;
  int parts;            // of the norm hand-off (params/linear.h); 0: there is none
  bool in_rows = true;  // all tensors are rows of contiguous columns, evenly apart
  bool x_aligned = true, weight_aligned = true, y_aligned = true;  // every row, to 16 bytes
  bool norm_weight_aligned = true;                                 // and contiguous
  bool sum = false;                                                // x is a sum (params/linear.h)
  bool sum_aligned = true;                                         // its tensors, to 16 bytes

  int64_t n() const { return weight.rows; }
  int64_t k() const { return weight.cols; }
  int64_t columns() const { return glu ? n() / 2 : n(); }  // of the result
};

// What it depends on beside the linear and the device: the driver, and the switches of tests and benchmarks.
struct RouteOptions {
  bool tensor_maps = true;              // the driver has them
  bool force_sm80 = false;              // see llmk_force_linear_sm80
  int force_gemm = 0;                   // see llmk_force_gemm
  const TunedLinears* tuned = nullptr;  // choices that were measured on this GPU
};

struct LinearRoute {
  LinearVariant variant = LinearVariant::kLibrary;
  const char* reason = "";
  bool norm_first = false;             // a launch of rms_norm comes first; else the kernel normalizes, if anybody does
  bool sum_first = false;              // a launch of rms_norm_add_ comes before both; else the kernel adds, if anybody
  size_t workspace_bytes = 0;          // for that, up to 64 tokens; beyond, the caller normalizes
  int64_t blocks = 0;                  // of the launch
  const TunedLinear* tuned = nullptr;  // the measured choice that was found
  // The plan: of gemv; of mma, wgmma and sm80; of gemm.
  GemvPlan gemv{};
  LinearPlan few{};
  GemmPlan many{};
};

inline LinearProblem problem_of(const LinearParams& p, Dtype dtype) {
  return {.m = p.m,
          .weight = p.weight,
          .x_stride = p.x_stride,
          .y_stride = p.epilogue.y_stride,
          .dtype = dtype,
          .glu = p.epilogue.glu,
          .bias = p.epilogue.bias != nullptr,
          .residual = p.epilogue.add_residual,
          .in_step = p.in_step,
          .normalize = p.normalize,
          .norm_weight = p.norm_weight != nullptr,
          .norm_offset = p.norm.weight_offset,
          .parts = p.parts,
          .x_aligned = rows_aligned(p.x, p.x_stride, p.m, kHalfBytes),
          .weight_aligned = rows_aligned(p.weight.data, p.weight.row_bytes(), p.n(), 1),
          .y_aligned = rows_aligned(p.epilogue.y, p.epilogue.y_stride, p.m, kHalfBytes),
          .norm_weight_aligned = is_aligned(p.norm_weight, 16),
          .sum = p.sum != nullptr,
          .sum_aligned = !p.sum || (is_aligned(p.sum->x, 16) && is_aligned(p.sum->addend, 16) &&
                                    is_aligned(p.sum->target, 16) && is_aligned(p.sum->weight, 16))};
}

namespace routing {

// Whether the norm can be folded: x times its weight before the products, the sums times 1 / rms after them.
inline bool can_fold_norm(const LinearProblem& p) {
  const bool known_offset = p.norm_offset == 0 || (p.norm_offset == 1 && p.dtype == Dtype::kBFloat16);
  return p.normalize && p.norm_weight && known_offset && p.k() <= 16384;
}

// What no kernel takes.
inline Verdict supported(const LinearProblem& p) {
  if (p.m == 0 || p.n() == 0 || p.k() == 0) return refuse("there is nothing to multiply");
  if (p.dtype == Dtype::kFloat32) return refuse("float32: the kernels take float16 and bfloat16");
  if (p.dtype == Dtype::kFloat64) return refuse("float64: the kernels take float16 and bfloat16");
  if (!p.in_rows) return refuse("a tensor is not rows of contiguous columns");
  if (p.k() % 8 != 0) return refuse("k is no multiple of 8");
  if (!p.weight_aligned) return refuse("rows of the weight are not aligned to 16 bytes");
  if (!is_quantized(p.weight.type)) return take("");
  if (p.m > kLinearMaxMmaTokens) return refuse("more than 16 tokens of a quantized weight, which is dequantized first");
  if (p.weight.bytes(p.k()) % 16 != 0) return refuse("rows of the quantized weight are no multiple of 16 bytes");
  return take("");
}

inline bool without_tma(const DeviceInfo& device, const RouteOptions& options) {
  return options.force_sm80 || device.compute_capability < 90 || device.shared_bytes < 200 * 1024 ||
         !options.tensor_maps;
}

// The measured choice, if there is one that this GPU can run. The switches of tests come first.
inline const TunedLinear* find_tuned(const LinearProblem& p, const DeviceInfo& device, const RouteOptions& options) {
  if (!options.tuned || options.force_sm80 || options.force_gemm != 0 || is_quantized(p.weight.type)) return nullptr;
  const TunedLinear* found = options.tuned->find({.m = p.m,
                                                  .n = p.n(),
                                                  .k = p.k(),
                                                  .glu = p.glu,
                                                  .normalize = p.normalize,
                                                  .residual = p.residual,
                                                  .in_step = p.in_step});
  return found && !refusal(*found, p.m, device, !without_tma(device, options)) ? found : nullptr;
}

inline bool decides(const TunedLinear* tuned) { return tuned && tuned->variant != kByRule; }

inline Verdict measured(const TunedLinear& tuned) {
  return tuned.is(LinearVariant::kLibrary) ? refuse("cuBLAS was measured to be faster on this GPU")
                                           : take("measured to be the fastest on this GPU");
}

// ---- up to 64 tokens

inline Verdict few_supported(const LinearProblem& p, const DeviceInfo& device, const RouteOptions& options) {
  if (!p.x_aligned) return refuse("rows of x are not aligned to 16 bytes");
  if (!p.norm_weight_aligned) return refuse("the norm's weight is not contiguous and aligned to 16 bytes");
  if ((p.m > 1 && p.x_stride < p.k()) || (p.n() > 1 && p.weight.stride < p.k()))
    return refuse("rows overlap in memory");
  if (p.k() >= 1 << 30 || p.n() >= 1 << 30 || p.weight.stride >= int64_t{1} << 38)
    return refuse("the weight is too large");
  if (without_tma(device, options)) {
    if (device.compute_capability < 80) return refuse("the compute capability is below 8.0");
    if (p.m > kLinearMaxMmaTokens) return refuse("more than 16 tokens take wgmma, of compute capability 9.0");
  } else if (p.m > kLinearMaxMmaTokens && !device.has_wgmma) {
    return refuse("more than 16 tokens take wgmma, of compute capability 9.0");
  }
  return take("");
}

// Measured on an H200, in us, cuBLAS without the launches that it needs beside it for SwiGLU, for the residual (two)
// and for the norm:
//
//   case, n x k           | linear, 32 and 64 tokens | cuBLAS, 32 and 64 tokens
//   ----------------------|--------------------------|-------------------------
//   3584 x 3584           |     9.0           10.3   |    11.4            9.5
//   4608 x 3584           |    12.0           11.7   |    10.8           11.2
//   3584 x 18944          |    33.6           38.2   |    39.5           41.6
//   18944 x 3584          |    32.8           37.0   |    37.8           36.4
//   37888 x 3584, SwiGLU  |    66.7           75.2   |    74.2           74.9
//   152064 x 3584         |   258.2          284     |   266.6          273.9
//   the norm's launch     |     1.6, overlapped      |     2.2
//   896 x 4864, 24 and 48 |     9.1           12.1   |     7.5            7.4
//   896 x 896, 24 and 48  |     4.8            4.9   |     3.9            4.0
//
// Decode steps (in_step) do without cuBLAS up to 64 tokens.
inline Verdict few_is_faster(const LinearProblem& p, const int* clusters) {
  if (p.m <= kLinearMaxMmaTokens) return take("up to 16 tokens");
  if (p.glu) return take("17 to 64 tokens with a gated activation, which cuBLAS leaves to a kernel of its own");
  if (p.in_step) return take("17 to 64 tokens of a decode step, which does without cuBLAS");
  if (linear_has_many_rows(p.n(), clusters)) {
    return p.m <= 32 ? take("17 to 32 tokens of a tall weight")
                     : refuse("cuBLAS is faster from 33 to 64 tokens of a tall weight");
  }
  if (linear_has_very_few_rows(p.n(), clusters) && !p.residual) {
    return refuse("cuBLAS is faster from 17 to 64 tokens of a weight of very few rows");
  }
  if (linear_has_long_rows(p.k())) return take("17 to 64 tokens, and k above 8192");
  if (p.residual) return take("17 to 64 tokens that are added to a residual, for which cuBLAS needs more launches");
  if (p.parts > 0) return take("17 to 64 tokens, normalized by the linear before");
  if (!linear_has_few_rows(p.n(), clusters)) {
    return refuse("cuBLAS is faster from 17 to 64 tokens of a weight that is neither tall nor of few rows");
  }
  return p.m <= 48 ? take("17 to 48 tokens of a weight of few rows")
                   : refuse("cuBLAS is faster from 49 to 64 tokens of a weight of few rows");
}

// Whether this is q|k|v of a decode step: it reads a norm or a sum, as gate|up and the head do, which has many more
// rows.
inline bool is_before_attention(const LinearProblem& p) {
  return p.in_step && (p.normalize || p.sum) && !p.glu && p.n() < 8 * p.k();
}

inline LinearRoute few_tokens(const LinearProblem& p, const DeviceInfo& device, const RouteOptions& options) {
  LinearRoute route;
  const Verdict can = few_supported(p, device, options);
  route.tuned = can.taken ? find_tuned(p, device, options) : nullptr;
  const TunedLinear* const tuned = decides(route.tuned) ? route.tuned : nullptr;
  const Verdict verdict = !can.taken ? can : tuned ? measured(*tuned) : few_is_faster(p, device.clusters);
  route.reason = verdict.reason;
  // Beyond 16 tokens the kernel folds the norm with the help of the linear before only.
  const bool folds = p.parts > 0 || (p.m <= kLinearMaxMmaTokens && can_fold_norm(p));
  route.norm_first = p.normalize && !(verdict.taken && folds);
  if (!verdict.taken) return route;
  if (route.norm_first) route.workspace_bytes = static_cast<size_t>(p.m) * p.k() * kHalfBytes;
  const LinearShape shape{.m = p.m,
                          .n = p.n(),
                          .k = p.k(),
                          .glu = p.glu,
                          .normalize = p.normalize && !route.norm_first && p.parts == 0,
                          .weight_bytes = static_cast<int>(p.weight.bytes(1))};
  const bool has_tma = !without_tma(device, options);
  const bool by_gemv =
      tuned ? tuned->is(LinearVariant::kGemv) : p.m == 1 && gemv_is_faster(p.n(), p.k(), device.sm_count);
  if (!has_tma || (is_quantized(p.weight.type) && !by_gemv)) {
    route.variant = LinearVariant::kSm80;
    route.reason = has_tma ? "up to 16 tokens of a quantized weight" : "up to 16 tokens, on a GPU without TMA";
    route.few = plan_linear_sm80(shape, device.sm_count);
    route.blocks = std::min(device.sm_count, route.few.output_tiles);
    return route;
  }
  if (by_gemv) {
    route.variant = LinearVariant::kGemv;
    if (!tuned) route.reason = "one token";
    route.gemv = plan_gemv(p.weight, p.glu, is_before_attention(p), device);
    route.blocks = route.gemv.blocks;
    return route;
  }
  if (p.m == 1 && !tuned) {
    route.reason = p.k() > kGemvMaxK ? "one token, and k too large for gemv" : "one token, and too many rows for gemv";
  }
  route.few = plan_linear(shape, device.clusters, tuned ? tuned->tuning() : choose_tuning(shape, device.clusters));
  route.variant = route.few.wgmma ? LinearVariant::kWgmma : LinearVariant::kMma;
  const int64_t clusters = std::min(route.few.output_tiles, device.clusters[route.few.cluster]);
  route.blocks = clusters * route.few.cluster;
  return route;
}

// ---- more

// Whether the kernel may take x from a norm hand-off: then the norm needs no launch.
inline bool may_take_handoff(const LinearProblem& p) { return p.parts > 0 && p.m <= kHandoffTokens; }

inline Verdict many_supported(const LinearProblem& p, const DeviceInfo& device, const RouteOptions& options) {
  if (!device.has_wgmma || !options.tensor_maps) {
    return refuse("more than 64 tokens take wgmma, of compute capability 9.0");
  }
  if (p.glu && p.bias) return refuse("a gated activation with a bias");
  if (p.m > INT32_MAX - 256 || p.n() > INT32_MAX - 256 || p.k() > INT32_MAX - 64)
    return refuse("too large for 32 bits");
  // Tensor maps have no rows that overlap, as those of expanded tensors do.
  const auto can_map = [&](int64_t rows, int64_t stride) {
    return rows == 1 || (stride >= p.k() && stride < int64_t{1} << 38);
  };
  // Of a normalized x the norm makes rows side by side.
  const bool reads_x = !p.normalize || may_take_handoff(p);
  if (reads_x && !can_map(p.m, p.x_stride)) return refuse("rows of x overlap in memory, or are too far apart");
  if (!can_map(p.n(), p.weight.stride)) return refuse("rows of the weight overlap in memory, or are too far apart");
  if (reads_x && !p.x_aligned) return refuse("rows of x are not aligned to 16 bytes");
  if (p.columns() % 8 != 0) return refuse("the columns of the result are no multiple of 8");
  if (!p.y_aligned) return refuse("rows of the result are not aligned to 16 bytes");
  return take("");
}

// Why linears split K to hand a norm off, from 65 to 128 tokens. Measured on an H200, in us within a prompt of 128
// tokens, by tiles of 80 and 128 columns, before they did hand it off:
//
//   case, n x k          | split K, 80 and 128 | cuBLAS | the launch of a norm, which is saved
//   ---------------------|---------------------|--------|--------------------------------------------------
//   q|k|v, 4608 x 3584   |    15.1      17.2   |   12.6 | 2.4; and what follows starts early: rope 2.9 to 1.9,
//                        |                     |        | attention 11.3 to 9.3
//   o, 3584 x 3584       |    13.1      11.8   |   10.9 | 2.4
//   q|k|v, 1152 x 896    |     6.1       6.8   |    4.8 | 1.8; and rope 2.6 to 1.7
//   o, 896 x 896         |     5.1       5.9   |    4.5 | 1.8
//   down, 896 x 4864     |     9.4             |    8.8 | 1.8
//
// A prompt of 128 tokens of Qwen2.5-7B takes 4451 us so, from its first kernel to its last, and 4661 without.
inline Verdict many_is_faster(const GemmShape& shape, const int* clusters) {
  const bool faster = gemm_is_faster_than_library(shape, clusters);
  if (shape.glu) {
    return faster ? take("more than 64 tokens with a gated activation, whose tiles fill most of the GPU")
                  : refuse("cuBLAS is faster where tiles of a gated activation leave much of the GPU idle");
  }
  if (shape.m <= kGemmRows) {
    if (!faster) return refuse("cuBLAS is faster from 65 to 128 tokens, but of tall weights and some whose K is split");
    if (!gemm_splits(shape, clusters)) return take("65 to 128 tokens of a tall weight");
    return shape.k > kGemmLongK
               ? take("65 to 128 tokens, and k above 8192, which is split")
               : take("65 to 128 tokens of a decode step, with K split, so that a norm needs no launch");
  }
  if (shape.m <= kGemmLibraryTokens) return refuse("cuBLAS is faster from 129 to 1280 tokens");
  return faster ? take("more than 1280 tokens, and only tiles of 224 columns fill the GPU")
                : refuse("cuBLAS is faster where tiles of 224 columns do not fill the GPU better than others");
}

inline LinearRoute many_tokens(const LinearProblem& p, const DeviceInfo& device, const RouteOptions& options) {
  LinearRoute route{.norm_first = p.normalize};
  const bool makes_handoff = p.residual && p.m <= kHandoffTokens;
  const GemmShape shape{p.m, p.n(), p.k(), p.glu, p.in_step && (makes_handoff || may_take_handoff(p))};
  Verdict verdict = many_supported(p, device, options);
  route.tuned = verdict.taken ? find_tuned(p, device, options) : nullptr;
  const TunedLinear* const tuned = decides(route.tuned) ? route.tuned : nullptr;
  if (verdict.taken && options.force_gemm == 0) {
    verdict = tuned ? measured(*tuned) : many_is_faster(shape, device.clusters);
  }
  if (options.force_gemm > 0 && verdict.taken) verdict = take("a test's switch");
  if (options.force_gemm < 0) verdict = refuse("a test's switch");
  route.reason = verdict.reason;
  if (!verdict.taken) return route;
  route.variant = LinearVariant::kGemm;
  const GemmTile forced = tuned ? tuned->tile() : gemm_tile(options.force_gemm);
  const bool can_split = !p.glu, splits = forced.schedule == GemmSchedule::kSplit;
  const bool by_rule = !tuned && (options.force_gemm <= 1 || (splits && !can_split));
  route.many = by_rule ? choose_gemm(shape, device.clusters) : plan_gemm(shape, forced, device.clusters);
  const int64_t clusters = route.many.clusters(), running = device.clusters[route.many.cluster()];
  const bool one_tile = route.many.tile.schedule == GemmSchedule::kSplit;
  route.norm_first = p.normalize && !(may_take_handoff(p) && (p.glu || one_tile));
  route.blocks = (one_tile ? clusters : std::min(clusters, running)) * route.many.cluster();
  return route;
}

inline LinearRoute choose_kernel(const LinearProblem& problem, const DeviceInfo& device, const RouteOptions& options) {
  const Verdict verdict = supported(problem);
  if (!verdict.taken) return {.reason = verdict.reason, .norm_first = problem.normalize};
  return problem.m <= kLinearMaxTokens ? few_tokens(problem, device, options) : many_tokens(problem, device, options);
}

}  // namespace routing

inline LinearRoute choose_route(const LinearProblem& problem, const DeviceInfo& device,
                                const RouteOptions& options = {}) {
  LinearRoute route = routing::choose_kernel(problem, device, options);
  const bool adds =
      route.variant == LinearVariant::kGemv && !route.norm_first && gemv_adds(route.gemv) && problem.sum_aligned;
  route.sum_first = problem.sum && !adds;
  return route;
}

// Whether the linear behind a norm takes the hand-off of the linear before: up to 16 tokens it folds the norm itself.
inline bool linear_takes_handoff(int64_t m) { return m > kLinearMaxMmaTokens && m <= kHandoffTokens; }

// How many partial sums of squares per token the linear of `route`, which adds to the residual, leaves for the norm
// that follows and for `next`; 0 if it cannot, or if that would not save a launch.
inline int choose_handoff(const LinearRoute& route, LinearProblem next, const DeviceInfo& device,
                          const RouteOptions& options = {}) {
  const bool splits = route.variant == LinearVariant::kGemm && route.many.tile.schedule == GemmSchedule::kSplit;
  if (route.variant != LinearVariant::kWgmma && !splits) return 0;
  if (!linear_takes_handoff(next.m) || !routing::can_fold_norm(next) || !next.norm_weight_aligned) return 0;
  next.parts = splits ? route.many.parts() : route.few.output_tiles * route.few.cluster;
  const LinearRoute found = choose_route(next, device, options);
  return found.variant == route.variant && !found.norm_first ? next.parts : 0;
}

}  // namespace llmk::kernels
