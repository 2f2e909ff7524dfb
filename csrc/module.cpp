// The Python module _C: information for Python that is not an op. No torch header.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/route.h"
#include "kernels/linear/route.h"
#include "kernels/norm/plan.h"
#include "record.h"

namespace py = pybind11;

extern "C" const char llmkernels_build_info[];

namespace {

py::dict build_info() { return py::module_::import("json").attr("loads")(&llmkernels_build_info[0]); }

void check(const char* function, bool valid, const char* argument, const char* expected, const std::string& received) {
  if (valid) return;
  throw py::value_error(std::string(function) + ": " + argument + " must be " + expected + ", got " + received);
}

void check(const char* function, bool valid, const char* argument, const char* expected, int64_t received) {
  check(function, valid, argument, expected, std::to_string(received));
}

py::dict norm_plan(int64_t cols, int64_t element_bytes, bool vector, bool residual, bool few_rows, bool centered) {
  check("norm_plan", cols > 0, "cols", "positive", cols);
  check("norm_plan", element_bytes == 2 || element_bytes == 4, "element_bytes", "2 or 4", element_bytes);
  const auto plan =
      llmk::kernels::plan_norm(cols, static_cast<size_t>(element_bytes), vector, residual, few_rows, centered);
  return py::dict(py::arg("width") = plan.width, py::arg("vectors") = plan.vectors,
                  py::arg("threads_per_row") = plan.threads_per_row, py::arg("rows_per_block") = plan.rows_per_block);
}

// ---- routes: what all of them are asked

llmk::Dtype to_dtype(const char* function, const std::string& name) {
  if (name == "float32") return llmk::Dtype::kFloat32;
  if (name == "float16") return llmk::Dtype::kFloat16;
  if (name == "bfloat16") return llmk::Dtype::kBFloat16;
  check(function, name == "float64", "dtype", "float16, bfloat16, float32 or float64", name);
  return llmk::Dtype::kFloat64;
}

llmk::kernels::DeviceInfo to_device(const char* function, int compute_capability, bool wgmma, int sm_count,
                                    int64_t shared_bytes, const py::dict& clusters) {
  check(function, sm_count > 0 && sm_count <= 1 << 16, "sm_count", "from 1 to 65536", sm_count);
  check(function, shared_bytes >= 0, "shared_bytes", "not negative", shared_bytes);
  llmk::kernels::DeviceInfo device{.sm_count = sm_count,
                                   .compute_capability = compute_capability,
                                   .has_wgmma = wgmma && compute_capability == 90,
                                   .shared_bytes = static_cast<size_t>(shared_bytes),
                                   .l2_bytes = 0,
                                   .clusters = {}};
  for (const auto& [key, value] : clusters) {
    const int size = py::cast<int>(key), count = py::cast<int>(value);
    check(function, size == 2 || size == 4 || size == 8 || size == 16, "clusters", "of 2, 4, 8 or 16 blocks", size);
    check(function, count >= 0 && count <= sm_count, "clusters", "from 0 to sm_count", count);
    device.clusters[size] = count;
  }
  device.clusters[1] = sm_count;
  return device;
}

using Sizes = std::initializer_list<std::pair<const char*, int64_t>>;

void check_sizes(const char* function, Sizes sizes) {
  for (const auto& [argument, value] : sizes) {
    check(function, value >= 0 && value < int64_t{1} << 31, argument, "from 0 to 2^31 - 1", value);
  }
}

// ---- the route of a linear

using llmk::kernels::LinearRoute;
using llmk::kernels::LinearVariant;

const char* name(LinearVariant variant) {
  switch (variant) {
    case LinearVariant::kLibrary: return "library";
    case LinearVariant::kGemv: return "gemv";
    case LinearVariant::kMma: return "mma";
    case LinearVariant::kWgmma: return "wgmma";
    case LinearVariant::kSm80: return "sm80";
    case LinearVariant::kGemm: return "gemm";
  }
  return "";
}

// The same numbers of every kernel: of an output tile its columns of y, which are rows of the weight, or with a gated
// activation of the gate; of a block its ring (of sm80 the registers), in bytes that are in
// flight at the same time.
py::dict plan_of(const LinearRoute& route, const llmk::kernels::LinearProblem& p) {
  const auto numbers = [&](int64_t tile_rows, int64_t tiles, int cluster, int stages, int64_t ring, size_t shared) {
    return py::dict(py::arg("tile_rows") = tile_rows, py::arg("output_tiles") = tiles, py::arg("cluster") = cluster,
                    py::arg("stages") = stages, py::arg("bytes_in_flight") = ring, py::arg("shared_bytes") = shared,
                    py::arg("blocks") = route.blocks);
  };
  switch (route.variant) {
    case LinearVariant::kLibrary: return {};
    case LinearVariant::kGemv: {
      const auto& plan = route.gemv;
      return numbers(p.glu ? plan.rows / 2 : plan.rows, plan.blocks, 1, plan.stages,
                     int64_t{plan.stages} * plan.stage_bytes, plan.shared_bytes);
    }
    case LinearVariant::kGemm: {
      const auto& plan = route.many;
      const int columns = plan.tile.columns, stages = llmk::kernels::gemm_stages(plan.tile);
      return numbers(p.glu ? columns / 2 : columns, int64_t{plan.row_tiles} * plan.column_tiles * plan.pair,
                     plan.cluster(), stages, int64_t{stages} * llmk::kernels::gemm_stage_bytes(columns),
                     llmk::kernels::gemm_shared_bytes(plan.tile));
    }
    case LinearVariant::kSm80: {
      const auto& plan = route.few;
      const auto bytes = static_cast<int>(p.weight.bytes(1));
      const int steps = llmk::kernels::linear_sm80_depth(plan.mma_tiles, llmk::kernels::linear_token_tiles(p.m), bytes);
      const int64_t columns = int64_t{plan.k_consumers} * llmk::kernels::linear_sm80_step(bytes);  // of a block's step
      return numbers(plan.tile_rows, plan.output_tiles, plan.cluster, steps,
                     p.weight.bytes(steps * columns * plan.boxes * plan.tile_rows), plan.shared_bytes);
    }
    default: {
      const auto& plan = route.few;
      return numbers(plan.tile_rows, plan.output_tiles, plan.cluster, plan.stages,
                     int64_t{plan.stages} * plan.stage_bytes, plan.shared_bytes);
    }
  }
}

using llmk::kernels::kTunedLinearNumbers;
using llmk::kernels::TunedLinear;
using llmk::kernels::TunedLinears;
using Numbers = std::vector<int64_t>;

std::vector<TunedLinear> to_tuned(const char* function, const std::vector<Numbers>& rows) {
  std::vector<TunedLinear> entries(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto size = static_cast<int64_t>(rows[i].size());
    check(function, size == kTunedLinearNumbers, "an entry of tuned", "15 numbers", size);
    std::copy(rows[i].begin(), rows[i].end(), reinterpret_cast<int64_t*>(&entries[i]));
  }
  return entries;
}

py::object numbers_of(const TunedLinear* entry) {
  if (!entry) return py::none();
  const auto* numbers = reinterpret_cast<const int64_t*>(entry);
  return py::tuple(py::cast(Numbers(numbers, numbers + kTunedLinearNumbers)));
}

py::object refused_tuned_linear(const std::vector<Numbers>& tuned, int compute_capability, bool wgmma, bool tensor_maps,
                                int sm_count, int64_t shared_bytes, const py::dict& clusters) {
  constexpr const char* kFunction = "refused_tuned_linear";
  const auto device = to_device(kFunction, compute_capability, wgmma, sm_count, shared_bytes, clusters);
  const bool has_tma = !llmk::kernels::routing::without_tma(device, {.tensor_maps = tensor_maps});
  const auto refused = TunedLinears::find_refused(to_tuned(kFunction, tuned), device, has_tma);
  return refused.reason ? py::object(py::make_tuple(refused.index, refused.reason)) : py::none();
}

py::dict linear_route(int64_t m, int64_t n, int64_t k, const std::string& dtype, bool glu, bool norm, bool bias,
                      bool residual, bool in_step, bool aligned, const std::string& weight_type,
                      const std::vector<Numbers>& tuned, int compute_capability, bool wgmma, bool tensor_maps,
                      int sm_count, int64_t shared_bytes, const py::dict& clusters) {
  check_sizes("linear_route", {{"m", m}, {"n", n}, {"k", k}});
  check("linear_route", m * n < int64_t{1} << 40, "m * n", "less than 2^40", m * n);
  check("linear_route", !glu || n % 2 == 0, "n", "even with glu", n);
  check("linear_route", weight_type.empty() || weight_type == "int8", "weight_type", "int8 or empty", weight_type);
  const llmk::Dtype type = to_dtype("linear_route", dtype);
  const auto element = weight_type.empty() ? llmk::element_type(type) : llmk::ElementType::kInt8;
  const llmk::kernels::LinearProblem problem{.m = m,
                                             .weight = {nullptr, element, n, k, k},
                                             .x_stride = k,
                                             .y_stride = glu ? n / 2 : n,
                                             .dtype = type,
                                             .glu = glu,
                                             .bias = bias,
                                             .residual = residual,
                                             .in_step = in_step,
                                             .normalize = norm,
                                             .norm_weight = norm,
                                             .norm_offset = 0,
                                             .parts = 0,
                                             .x_aligned = aligned,
                                             .weight_aligned = aligned,
                                             .y_aligned = aligned,
                                             .norm_weight_aligned = aligned};
  const TunedLinears table(to_tuned("linear_route", tuned));
  const LinearRoute route = llmk::kernels::choose_route(
      problem, to_device("linear_route", compute_capability, wgmma, sm_count, shared_bytes, clusters),
      {.tensor_maps = tensor_maps, .tuned = &table});
  return py::dict(py::arg("variant") = name(route.variant), py::arg("reason") = route.reason,
                  py::arg("norm_first") = route.norm_first, py::arg("plan") = plan_of(route, problem),
                  py::arg("tuned") = numbers_of(route.tuned));
}

// ---- the routes of attention

using llmk::kernels::AttentionPlan;
using llmk::kernels::AttentionVariant;
using llmk::kernels::DecodeVariant;

const char* name(DecodeVariant variant) {
  switch (variant) {
    case DecodeVariant::kNone: return "none";
    case DecodeVariant::kPlain: return "plain";
    case DecodeVariant::kCpAsync: return "cp_async";
    case DecodeVariant::kTma: return "tma";
    case DecodeVariant::kPrompt: return "prompt";
  }
  return "";
}

const char* name(AttentionVariant variant) {
  switch (variant) {
    case AttentionVariant::kNone: return "none";
    case AttentionVariant::kPlain: return "plain";
    case AttentionVariant::kMma: return "mma";
    case AttentionVariant::kWgmma: return "wgmma";
  }
  return "";
}

void check_elements(const char* function, const char* argument, std::initializer_list<int64_t> shape) {
  double elements = 1;
  for (const int64_t size : shape) elements *= static_cast<double>(std::max<int64_t>(size, 1));
  check(function, elements < 0x1p50, argument, "less than 2^50", py::str(py::float_(elements)));
}

void check_heads(const char* function, int64_t heads, int64_t kv_heads) {
  check(function, heads <= 1 << 20, "heads", "at most 2^20", heads);
  check(function, kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, "heads", "a multiple of kv_heads", heads);
}

py::dict numbers_of(const AttentionPlan& plan) {
  return py::dict(py::arg("queries") = plan.queries, py::arg("keys") = plan.keys, py::arg("blocks") = plan.blocks,
                  py::arg("shared_bytes") = plan.shared_bytes);
}

py::dict decode_attention_route(int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                int64_t capacity, int64_t page_size, const std::string& dtype, bool fused, bool aligned,
                                int compute_capability, bool wgmma, bool tensor_maps, int sm_count,
                                int64_t shared_bytes, const py::dict& clusters) {
  constexpr const char* kFunction = "decode_attention_route";
  check_sizes(kFunction, {{"batch", batch},
                          {"tokens", tokens},
                          {"heads", heads},
                          {"kv_heads", kv_heads},
                          {"head_dim", head_dim},
                          {"capacity", capacity},
                          {"page_size", page_size}});
  check_heads(kFunction, heads, kv_heads);
  check_elements(kFunction, "elements of q", {batch, tokens, heads, head_dim});
  check_elements(kFunction, "elements of the cache", {batch, std::max(capacity, page_size), kv_heads, head_dim});
  const bool paged = page_size > 0;
  const int64_t keys = paged ? page_size : capacity;  // of a page
  const llmk::kernels::KvStrides strides{keys * kv_heads * head_dim, kv_heads * head_dim, head_dim};
  const llmk::kernels::DecodeProblem problem{.batch = batch,
                                             .tokens = tokens,
                                             .heads = heads,
                                             .kv_heads = kv_heads,
                                             .head_dim = head_dim,
                                             .capacity = capacity,
                                             .page_size = keys,
                                             .pages = paged ? batch * ((capacity + keys - 1) / keys) : batch,
                                             .paged = paged,
                                             .k = strides,
                                             .v = strides,
                                             .dtype = to_dtype(kFunction, dtype),
                                             .fused = fused,
                                             .max_seqlen = 0,
                                             .aligned = aligned};
  const auto device = to_device(kFunction, compute_capability, wgmma, sm_count, shared_bytes, clusters);
  const llmk::kernels::AttentionOptions options{.tensor_maps = tensor_maps};
  const auto route = llmk::kernels::choose_decode_route(problem, device, options);
  py::dict plan;
  if (route.variant == DecodeVariant::kPrompt) {
    plan = numbers_of(
        llmk::kernels::choose_attention_route(llmk::kernels::routing::as_prompt(problem), device, options).plan);
  }
  if (route.is_fast()) {
    const llmk::kernels::DecodePlan& p = route.plan;
    plan = py::dict(py::arg("queries") = 8 * p.query_mma_tiles,
                    py::arg("keys") = llmk::kernels::kv_tile_of(static_cast<int>(head_dim)),
                    py::arg("work_tiles") = route.sequences * kv_heads * p.query_tiles, py::arg("cluster") = p.cluster,
                    py::arg("blocks") = p.clusters * p.cluster, py::arg("blocks_per_sm") = route.blocks_per_sm,
                    py::arg("stages") = p.stages,
                    py::arg("bytes_in_flight") = p.stages * llmk::kernels::stage_bytes(static_cast<int>(head_dim)),
                    py::arg("shared_bytes") = route.shared_bytes,
                    py::arg("launches") = (batch + route.sequences - 1) / route.sequences);
  }
  return py::dict(py::arg("variant") = name(route.variant), py::arg("reason") = route.reason, py::arg("plan") = plan);
}

py::dict route_of(AttentionVariant variant, const char* reason, const AttentionPlan& plan) {
  const bool tiled = variant == AttentionVariant::kMma || variant == AttentionVariant::kWgmma;
  return py::dict(py::arg("variant") = name(variant), py::arg("reason") = reason,
                  py::arg("plan") = tiled ? numbers_of(plan) : py::dict());
}

py::dict attention_route(int64_t batch, int64_t q_tokens, int64_t k_tokens, int64_t heads, int64_t kv_heads,
                         int64_t head_dim, const std::string& dtype, bool aligned, int compute_capability, bool wgmma,
                         bool tensor_maps, int sm_count, int64_t shared_bytes, const py::dict& clusters) {
  constexpr const char* kFunction = "attention_route";
  check_sizes(kFunction, {{"batch", batch},
                          {"q_tokens", q_tokens},
                          {"k_tokens", k_tokens},
                          {"heads", heads},
                          {"kv_heads", kv_heads},
                          {"head_dim", head_dim}});
  check_heads(kFunction, heads, kv_heads);
  check_elements(kFunction, "elements of q", {batch, q_tokens, heads, head_dim});
  check_elements(kFunction, "elements of k", {batch, k_tokens, kv_heads, head_dim});
  const auto strides = [&](int64_t tokens, int64_t of_heads) -> llmk::kernels::HeadStrides {
    return {tokens * of_heads * head_dim, of_heads * head_dim, head_dim};
  };
  const llmk::kernels::AttentionProblem problem{.batch = batch,
                                                .q_tokens = q_tokens,
                                                .k_tokens = k_tokens,
                                                .heads = heads,
                                                .kv_heads = kv_heads,
                                                .head_dim = head_dim,
                                                .q = strides(q_tokens, heads),
                                                .k = strides(k_tokens, kv_heads),
                                                .v = strides(k_tokens, kv_heads),
                                                .grad_y = strides(q_tokens, heads),
                                                .dtype = to_dtype(kFunction, dtype),
                                                .aligned = aligned,
                                                .grad_y_aligned = aligned};
  const auto route = llmk::kernels::choose_attention_route(
      problem, to_device(kFunction, compute_capability, wgmma, sm_count, shared_bytes, clusters),
      {.tensor_maps = tensor_maps});
  py::dict backward = route_of(route.backward, route.backward_reason, route.backward_plan);
  if (route.splits > 0) backward["plan"]["splits"] = route.splits;
  py::dict result = route_of(route.forward, route.reason, route.plan);
  result["backward"] = backward;
  return result;
}

// Defines a function that is asked for a GPU: `arguments`, then the facts of it.
template <typename Function, typename... Arguments>
void def_route(py::module_& module, const char* name, Function function, const std::string& text,
               const Arguments&... arguments) {
  module.def(name, function, arguments..., py::arg("compute_capability"), py::arg("wgmma") = true,
             py::arg("tensor_maps") = true, py::arg("sm_count"), py::arg("shared_bytes"), py::arg("clusters"),
             (text + " `clusters`: how many clusters run at the same time, by their blocks; `wgmma`: whether the build "
                     "has code for sm_90a; `tensor_maps`: whether the driver has them. Raises: ValueError for a number "
                     "or a word out of range.")
                 .c_str());
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Build information and launch plans of llmkernels, and the guard of its decode step.";
  module.def("build_info", &build_info, "What the library beside this module was built from and for.");
  module.def(
      "norm_plan", &norm_plan, py::arg("cols"), py::arg("element_bytes"), py::arg("vector") = true,
      py::arg("residual") = false, py::arg("few_rows") = false, py::arg("centered") = false,
      "How one row of an RMSNorm, or centered of a LayerNorm, is spread over threads: elements per access, vectors per "
      "thread (0: the row is read twice), threads per row, rows per block. See csrc/kernels/norm/plan.h. Raises: "
      "ValueError for a number out of range.");
  def_route(
      module, "linear_route", &linear_route,
      "Which kernel multiplies m tokens by a weight [n, k] on a GPU, or that the library does, why, and the plan. "
      "See csrc/kernels/linear/route.h. `weight_type`: int8, or empty for the type of x. `tuned`: measured choices, as "
      "numbers of a TunedLinear (tuned.h); of the answer, the one that was found.",
      py::arg("m"), py::arg("n"), py::arg("k"), py::kw_only(), py::arg("dtype") = "bfloat16", py::arg("glu") = false,
      py::arg("norm") = false, py::arg("bias") = false, py::arg("residual") = false, py::arg("in_step") = false,
      py::arg("aligned") = true, py::arg("weight_type") = "", py::arg("tuned") = py::list());
  def_route(module, "refused_tuned_linear", &refused_tuned_linear,
            "The first of such choices that a GPU cannot run, by its index, and why; None where it can run all.",
            py::arg("tuned"), py::kw_only());
  def_route(
      module, "decode_attention_route", &decode_attention_route,
      "Which kernel runs decode_attention on a GPU, why, and the plan of its largest launch. `page_size`: 0 for a "
      "contiguous cache; `fused`: with the rotation and the write to the cache, as in a decode step. See "
      "csrc/kernels/attention/route.h.",
      py::arg("batch"), py::arg("tokens"), py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"),
      py::arg("capacity"), py::kw_only(), py::arg("page_size") = 0, py::arg("dtype") = "bfloat16",
      py::arg("fused") = false, py::arg("aligned") = true);
  def_route(module, "attention_route", &attention_route,
            "Which kernels run attention over prompts and its backward on a GPU, why, and the plans. See "
            "csrc/kernels/attention/route.h.",
            py::arg("batch"), py::arg("q_tokens"), py::arg("k_tokens"), py::arg("heads"), py::arg("kv_heads"),
            py::arg("head_dim"), py::kw_only(), py::arg("dtype") = "bfloat16", py::arg("aligned") = true);

  py::class_<llmk::Record>(module, "Record",
                           "What a model was when a step was made for it, and whether it still is. See csrc/record.h.")
      .def(py::init<const py::capsule&, const py::list&, const py::list&, const py::list&, const py::list&,
                    const py::list&, const py::list&>(),
           py::kw_only(), py::arg("exchange"), py::arg("names"), py::arg("nodes"), py::arg("same"), py::arg("equal"),
           py::arg("tensors"), py::arg("held"))
      .def("holds", &llmk::Record::holds, py::arg("model"), "Whether all of it is as it was.")
      .def("memory", &llmk::Record::memory,
           "The storages of `held`, which keep the memory of all tensors alive, or None if one is not where it was.");
}
