// Routes of csrc/kernels/linear/route.h: one line of JSON per line of standard input, of numbers in the order of
// test_route.py.
#include <cstdio>

#include "kernels/linear/route.h"

int main() {
  using namespace llmk;
  using namespace llmk::kernels;
  LinearProblem p{};
  DeviceInfo device{};
  long long m, n, k, x_stride, weight_stride, y_stride, shared_bytes;
  int dtype, glu, bias, residual, in_step, normalize, norm_weight, in_rows, x, weight, y, norm, wgmma, maps, sm80, gemm;
  while (std::scanf("%lld %lld %lld %lld %lld %lld %d %d %d %d %d %d %d %lf %d %d %d %d %d %d", &m, &n, &k, &x_stride,
                    &weight_stride, &y_stride, &dtype, &glu, &bias, &residual, &in_step, &normalize, &norm_weight,
                    &p.norm_offset, &p.parts, &in_rows, &x, &weight, &y, &norm) == 20 &&
         std::scanf("%d %d %d %lld %d %d %d %d", &device.compute_capability, &wgmma, &device.sm_count, &shared_bytes,
                    &device.clusters[2], &maps, &sm80, &gemm) == 8) {
    p.m = m, p.n = n, p.k = k, p.x_stride = x_stride, p.weight_stride = weight_stride, p.y_stride = y_stride;
    p.dtype = static_cast<Dtype>(dtype);
    p.glu = glu, p.bias = bias, p.residual = residual, p.in_step = in_step;
    p.normalize = normalize, p.norm_weight = norm_weight, p.in_rows = in_rows;
    p.x_aligned = x, p.weight_aligned = weight, p.y_aligned = y, p.norm_weight_aligned = norm;
    device.has_wgmma = wgmma;
    device.shared_bytes = static_cast<size_t>(shared_bytes);
    device.clusters[1] = device.sm_count;
    const RouteOptions options{.tensor_maps = maps != 0, .force_sm80 = sm80 != 0, .force_gemm = gemm};
    const LinearRoute route = choose_route(p, device, options);
    // The linear behind the norm of these tokens, for the hand-off.
    const LinearProblem next{.m = m,
                             .n = 4608,
                             .k = n,
                             .x_stride = n,
                             .weight_stride = n,
                             .y_stride = 4608,
                             .dtype = p.dtype,
                             .glu = false,
                             .bias = false,
                             .residual = false,
                             .in_step = p.in_step,
                             .normalize = true,
                             .norm_weight = true,
                             .norm_offset = 0,
                             .parts = 0};
    std::printf(
        "{\"variant\": %d, \"reason\": \"%s\", \"norm_first\": %d, \"workspace\": %zu, \"columns\": %d, \"handoff\": "
        "%d, \"tiles\": %d}\n",
        static_cast<int>(route.variant), route.reason, route.norm_first, route.workspace_bytes, route.many.tile.columns,
        choose_handoff(route, next, device, options), route.few.output_tiles);
  }
}
