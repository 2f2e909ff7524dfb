// Routes of csrc/kernels/linear/route.h and csrc/kernels/attention/route.h: one line of JSON per line of standard
// input, of a word, "linear", "decode" or "attention", and numbers in the order of the tests of routes.
#include <cstdio>
#include <cstring>

#include "kernels/attention/route.h"
#include "kernels/linear/route.h"

using namespace llmk;
using namespace llmk::kernels;

// The next number of the line.
static bool failed = false;
static int64_t number() {
  long long value = 0;
  failed |= std::scanf("%lld", &value) != 1;
  return value;
}

static bool linear() {
  LinearProblem p{};
  DeviceInfo device{};
  long long m, n, k, x_stride, weight_stride, y_stride, shared_bytes;
  int dtype, glu, bias, residual, in_step, normalize, norm_weight, in_rows, x, weight, y, norm, wgmma, maps, sm80, gemm;
  if (std::scanf("%lld %lld %lld %lld %lld %lld %d %d %d %d %d %d %d %lf %d %d %d %d %d %d", &m, &n, &k, &x_stride,
                 &weight_stride, &y_stride, &dtype, &glu, &bias, &residual, &in_step, &normalize, &norm_weight,
                 &p.norm_offset, &p.parts, &in_rows, &x, &weight, &y, &norm) == 20 &&
      std::scanf("%d %d %d %lld %d %d %d %d %d %d", &device.compute_capability, &wgmma, &device.sm_count, &shared_bytes,
                 &device.clusters[2], &device.clusters[4], &device.clusters[8], &maps, &sm80, &gemm) == 10) {
    const long long next_rows = number();
    const bool next_glu = number() != 0, int8 = number() != 0;
    std::vector<TunedLinear> tuned(number());
    for (TunedLinear& entry : tuned) {
      for (int i = 0; i < kTunedLinearNumbers; ++i) reinterpret_cast<int64_t*>(&entry)[i] = number();
    }
    const TunedLinears table(std::move(tuned));
    p.dtype = static_cast<Dtype>(dtype);
    p.m = m, p.x_stride = x_stride, p.y_stride = y_stride;
    p.weight = {nullptr, int8 ? ElementType::kInt8 : element_type(p.dtype), n, k, weight_stride};
    p.glu = glu, p.bias = bias, p.residual = residual, p.in_step = in_step;
    p.normalize = normalize, p.norm_weight = norm_weight, p.in_rows = in_rows;
    p.x_aligned = x, p.weight_aligned = weight, p.y_aligned = y, p.norm_weight_aligned = norm;
    device.has_wgmma = wgmma;
    device.shared_bytes = static_cast<size_t>(shared_bytes);
    device.clusters[1] = device.sm_count;
    const RouteOptions options{.tensor_maps = maps != 0, .force_sm80 = sm80 != 0, .force_gemm = gemm, .tuned = &table};
    const LinearRoute route = choose_route(p, device, options);
    // The linear behind the norm of these tokens, for the hand-off.
    const LinearProblem next{.m = m,
                             .weight = {nullptr, p.weight.type, next_rows, n, n},
                             .x_stride = n,
                             .y_stride = next_glu ? next_rows / 2 : next_rows,
                             .dtype = p.dtype,
                             .glu = next_glu,
                             .bias = false,
                             .residual = false,
                             .in_step = p.in_step,
                             .normalize = true,
                             .norm_weight = true,
                             .norm_offset = 0,
                             .parts = 0};
    std::printf(
        "{\"variant\": %d, \"reason\": \"%s\", \"norm_first\": %d, \"workspace\": %zu, \"columns\": %d, \"handoff\": "
        "%d, \"tiles\": %d, \"rows\": %d, \"splits\": %d, \"blocks\": %d, \"tuned\": %d}\n",
        static_cast<int>(route.variant), route.reason, route.norm_first, route.workspace_bytes, route.many.tile.columns,
        choose_handoff(route, next, device, options), route.few.output_tiles, route.few.tile_rows, route.many.splits,
        static_cast<int>(route.blocks), route.tuned != nullptr);
    return true;
  }
  return false;
}

static DeviceInfo device_of_line() {
  DeviceInfo device{};
  device.compute_capability = static_cast<int>(number());
  device.has_wgmma = number() != 0;
  device.sm_count = device.clusters[1] = static_cast<int>(number());
  device.shared_bytes = static_cast<size_t>(number());
  device.clusters[2] = static_cast<int>(number());
  return device;
}

static bool decode() {
  DecodeProblem p{};
  for (int64_t* const size : {&p.batch, &p.tokens, &p.heads, &p.kv_heads, &p.head_dim, &p.capacity, &p.page_size,
                              &p.pages, &p.k.page, &p.k.token, &p.k.head}) {
    *size = number();
  }
  p.v = {number(), number(), number()};
  p.paged = number() != 0, p.fused = number() != 0, p.dtype = static_cast<Dtype>(number()), p.aligned = number() != 0;
  const DeviceInfo device = device_of_line();
  const AttentionOptions options{.tensor_maps = number() != 0};
  const DecodeRoute route = choose_decode_route(p, device, options);
  std::printf(
      "{\"variant\": %d, \"reason\": \"%s\", \"sequences\": %lld, \"workspace\": %zu, \"clusters\": %d, "
      "\"last_clusters\": %d, \"blocks_per_sm\": %d}\n",
      static_cast<int>(route.variant), route.reason, static_cast<long long>(route.sequences), route.workspace_bytes,
      route.plan.clusters, route.last.clusters, route.blocks_per_sm);
  return !failed;
}

static bool attention() {
  AttentionProblem p{};
  for (int64_t* const size : {&p.batch, &p.q_tokens, &p.k_tokens, &p.heads, &p.kv_heads, &p.head_dim}) {
    *size = number();
  }
  for (HeadStrides* const strides : {&p.q, &p.k, &p.v, &p.grad_y}) {
    strides->batch = number(), strides->token = number(), strides->head = number();
  }
  p.dtype = static_cast<Dtype>(number()), p.aligned = number() != 0, p.grad_y_aligned = number() != 0;
  p.biased = number() != 0, p.page_size = number(), p.pages = number();
  const DeviceInfo device = device_of_line();
  AttentionOptions options{};
  options.tensor_maps = number() != 0, options.portable = number() != 0;
  const AttentionRoute route = choose_attention_route(p, device, options);
  std::printf(
      "{\"variant\": %d, \"reason\": \"%s\", \"backward\": %d, \"backward_reason\": \"%s\", \"columns\": %d, "
      "\"backward_columns\": %d, \"splits\": %d}\n",
      static_cast<int>(route.forward), route.reason, static_cast<int>(route.backward), route.backward_reason,
      route.plan.head_columns, route.backward_plan.head_columns, route.splits);
  return !failed;
}

int main() {
  char word[16];
  while (std::scanf("%15s", word) == 1) {
    const bool done = !std::strcmp(word, "linear") ? linear() : !std::strcmp(word, "decode") ? decode() : attention();
    if (!done) return 1;
    std::fflush(stdout);
  }
}
