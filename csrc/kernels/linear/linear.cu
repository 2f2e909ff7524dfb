// Linear for few tokens, after an RMSNorm if wanted:
//
//   y = x W^T (+ bias)      y = act(x Wg^T) (x Wu^T)      residual += alpha (x W^T (+ bias))
//
// x [m, k] with m <= 64, W [n, k]; float16 or bfloat16. Sums in float32, rounded once. As in eager PyTorch, each step
// after that rounds, too: of a gated activation gate, up, act(gate) and the product; of a residual add the sum, alpha
// times it, and the addition. Moves n k elements of W, once: memory is the limit, so the design keeps as many bytes in
// flight as shared memory holds.
//
// The design is the GEMM of CUTLASS on Hopper with the operands swapped, so that W fills the rows of the MMA:
//
//   route.h           which of the kernels, or cuBLAS
//   plan.h            tiles, split-K and stages, with the measured choices
//   ring.cuh          the producer, and the ring of stages with full and empty barriers
//   prologue.cuh      the RMSNorm of x, folded in; where it cannot be, a launch of rms_norm comes first
//   main_loop_*.cuh   the consumers: mma.sync up to 16 tokens, wgmma up to 64
//   epilogue.cuh      the reduction of the partial sums, bias, activation, residual; finish.cuh has what the other
//                     kernels of linears share with it
//
// GPUs without TMA, or with less shared memory, take linear_sm80.cuh for up to 16 tokens; one token takes gemv.cu,
// unless k is too large for it or W has many short rows. More tokens take gemm.cu, or cuBLAS. All of that is decided in
// route.h.
//
// Programmatic dependent launch: in a decode step (`in_step`) the norm's weight and the first stages of W are read
// before the previous kernel has ended, see ptx.cuh. Elsewhere nothing is.
#include "linear.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <memory>
#include <vector>

#include "epilogue.cuh"
#include "gemv.h"
#include "kernels/dispatch.cuh"
#include "kernels/gemm/gemm.h"
#include "kernels/launch.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/tensor_map.h"
#include "linear_sm80.cuh"
#include "main_loop_mma.cuh"
#include "main_loop_wgmma.cuh"
#include "ring.cuh"

namespace llmk::kernels {
namespace {

using few_tokens::Arguments;
using few_tokens::MmaSync;
using few_tokens::Wgmma;

std::atomic<bool> forced_sm80{false};  // see llmk_force_linear_sm80

// The measured choices of each device. A table is never freed: another thread may be reading it.
std::array<std::atomic<const TunedLinears*>, 64> tuned_linears{};

// The consumers, the producer warp, and for wgmma a warp that loads 1 / rms.
template <typename Math>
constexpr int kBlockThreads = Math::kThreads + 32 + 32 * Math::kNormHandoff;

// Math: MmaSync or Wgmma. Where it is not compiled the kernel is empty, and its launch bounds refuse a launch.
template <typename Math>
__global__ void __launch_bounds__(Math::kCompiled ? kBlockThreads<Math> : 32, Math::kBlocksPerSm)
    linear_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                  const __grid_constant__ Arguments arguments) {
#if __CUDA_ARCH__ >= 900
  if constexpr (Math::kCompiled) {
    using namespace few_tokens;
    using T = typename Math::Element;
    constexpr int kThreads = Math::kThreads;
    extern __shared__ __align__(1024) unsigned char shared[];
    const LinearPlan& plan = arguments.plan;
    const Layout layout(shared_address(shared), plan);
    const bool producer = threadIdx.x / 32 == kThreads / 32;
    if (producer) {
      if (threadIdx.x == kThreads) {
        tensor_map_prefetch(weight);
        tensor_map_prefetch(x);
        barrier_init(layout.epilogue_done, kThreads / 32);
        *reinterpret_cast<uint32_t*>(shared + (layout.norm_weight_max - layout.full)) = 0;
      }
#pragma unroll 1
      for (int i = threadIdx.x - kThreads; i < plan.stages; i += 32) {
        barrier_init(layout.full + 8 * i, 1);
        barrier_init(layout.empty + 8 * i, plan.row_consumers * Math::kConsumerWarps);
      }
      barrier_init_fence();
    }
    __syncthreads();
    pdl_launch_dependents();
    const int rank = plan.cluster > 1 ? cluster_rank() : 0;
    const KRange k_range(plan, rank);
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const bool no_cluster = plan.cluster == 1;
    const TileScheduler scheduler{no_cluster ? block : divide(block, plan.cluster),
                                  no_cluster ? blocks : divide(blocks, plan.cluster), plan.output_tiles};
    if (producer) {
      if (threadIdx.x == kThreads) produce(arguments, weight, x, layout, k_range, scheduler);
      if (plan.cluster > 1) {  // one output tile: the two cluster barriers of its epilogue
        __syncwarp();
        cluster_barrier_relaxed();
        cluster_barrier_relaxed();
      }
      return;
    }
    if constexpr (Math::kNormHandoff) {
      if (threadIdx.x >= kThreads + 32) {
        if (arguments.parts > 0) {
          pdl_wait();
          load_rstd(arguments, layout, shared);
          named_barrier_arrive(kRstdBarrier, kThreads + 32);
        }
        return;
      }
    }
    if (!arguments.prefetch_weights) pdl_wait();
    Math::prologue(arguments, layout, static_cast<int64_t>(scheduler.first) * plan.tile_rows, shared);
    pdl_wait();
    Consumer consumer(plan, threadIdx.x / (32 * Math::kConsumerWarps));
    int begin = 0;
    for (int tile = scheduler.first; tile < scheduler.end; tile += scheduler.step, begin += k_range.k_tiles()) {
      Math::main_loop(arguments, layout, k_range, consumer, begin, begin + k_range.k_tiles(), shared);
      if (Math::kNormHandoff && arguments.parts > 0 && tile == scheduler.first) {
        named_barrier(kRstdBarrier, kThreads + 32);
      } else {
        named_barrier(kConsumersBarrier, kThreads);
      }
      if (plan.cluster > 1) cluster_sync();
      const int64_t first = static_cast<int64_t>(tile) * plan.tile_rows;
      if (arguments.vector) {
        epilogue<T, 4, kThreads, Math::kNormHandoff>(arguments, layout, first, tile, rank);
      } else {
        epilogue<T, 1, kThreads, Math::kNormHandoff>(arguments, layout, first, tile, rank);
      }
      __syncwarp();
      if (plan.cluster > 1) cluster_barrier_relaxed();  // the other blocks have read this block's partial sums
      if (plan.sums_alias_ring) {
        async_proxy_fence();
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(layout.epilogue_done);
      }
    }
  }
#endif
}

// Boxes of `chunks` chunks by `box_rows` rows, swizzled, zeros beyond the tensor. Where chunks divide K they are a
// dimension of their own, so that one copy moves several; else they are columns.
cudaError_t tensor_map(CUtensorMap& map, const void* data, int64_t rows, int64_t cols, int64_t stride, int box_rows,
                       int chunks, ElementType type) {
  if (rows == 1) stride = cols;  // the given one is not used, and may be out of range
  const bool whole = cols % kLinearChunk == 0;
  const TensorBox tensor{.dims = 3,
                         .sizes = {whole ? kLinearChunk : cols, rows, whole ? cols / kLinearChunk : 1},
                         .strides = {1, stride, kLinearChunk},
                         .box = {kLinearChunk, box_rows, chunks}};
  return make_tensor_map(map, data, tensor, type);
}

bool is_vector(const LinearParams& p, const LinearPlan& plan) {
  return p.columns() % 4 == 0 && plan.box_rows % 4 == 0 && (p.m == 1 || p.epilogue.y_stride % 4 == 0) &&
         is_aligned(p.epilogue.y, 8) && is_aligned(p.epilogue.bias, 8);
}

Arguments arguments_of(const LinearParams& p, const LinearPlan& plan) {
  const Epilogue& last = p.epilogue;
  return {.x = p.x,
          .norm_weight = p.norm_weight,
          .bias = last.bias,
          .y = last.y,
          .add_residual = last.add_residual,
          .glu = last.glu,
          .vector = is_vector(p, plan),
          .activation = last.activation,
          .alpha = last.alpha,
          .m = static_cast<int>(p.m),
          .k = static_cast<int>(p.k()),
          .out = p.columns(),
          .box_step = last.glu ? static_cast<int>(p.columns()) : plan.box_rows,
          .column_step = p.k() % kLinearChunk ? kLinearChunk : 0,
          .depth_step = p.k() % kLinearChunk ? 0 : 1,
          .y_stride = last.y_stride,
          .fold_norm = p.normalize && p.parts == 0,
          .norm_offset = p.norm.weight_offset != 0,
          .prefetch_weights = p.in_step,
          .eps = static_cast<float>(p.norm.eps),
          .next_norm_weight = last.next_norm_weight,
          .next_offset = last.next_offset,
          .scaled = last.scaled,
          .next_squares = last.squares,
          .squares = p.squares,
          .parts = p.parts,
          .plan = plan};
}

cudaError_t launch_sm80(const LinearParams& p, const LinearRoute& route, Dtype dtype, cudaStream_t stream) {
  const few_tokens::Sm80Operands operands{p.weight.data, p.x, p.weight.row_bytes(), p.x_stride * kHalfBytes};
  return few_tokens::launch_sm80(arguments_of(p, route.few), operands, p.weight, static_cast<int>(route.blocks), dtype,
                                 stream);
}

// One launch with TMA; a norm, if there is one, is folded.
cudaError_t launch_with_tma(const LinearParams& p, const LinearRoute& route, Dtype dtype, cudaStream_t stream) {
  const LinearPlan& plan = route.few;
  CUtensorMap weight{}, x{};
  if (const cudaError_t status =
          tensor_map(weight, p.weight.data, p.n(), p.k(), p.weight.stride, plan.box_rows, plan.chunks, p.weight.type);
      status != cudaSuccess) {
    return status;
  }
  if (const cudaError_t status =
          tensor_map(x, p.x, p.m, p.k(), p.x_stride, plan.x_rows, plan.chunks, element_type(dtype));
      status != cudaSuccess) {
    return status;
  }
  const Arguments arguments = arguments_of(p, plan);
  LaunchShape shape{route.blocks, {}, plan.shared_bytes};
  shape.cluster = plan.cluster;
  const auto launch_math = [&](auto tag) {
    using Math = typename decltype(tag)::type;
    shape.threads = kBlockThreads<Math>;
    return launch(linear_kernel<Math>, shape, stream, weight, x, arguments);
  };
  const auto launch_as = [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!plan.wgmma) {
      return dispatch_int<1, 2>(linear_token_tiles(p.m),
                                [&](auto tiles) { return launch_math(TypeTag<MmaSync<T, decltype(tiles)::value>>{}); });
    }
    return dispatch_int<32, 48, 64>(plan.x_rows, [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      if constexpr (kColumns >= 48) {
        if (plan.mma_tiles <= 2 * plan.row_consumers) return launch_math(TypeTag<Wgmma<T, kColumns, 2>>{});
      }
      return launch_math(TypeTag<Wgmma<T, kColumns, 3>>{});
    });
  };
  return dtype == Dtype::kFloat16 ? launch_as(TypeTag<__half>{}) : launch_as(TypeTag<__nv_bfloat16>{});
}

// What choose_route() depends on beside the problem, on the current device.
cudaError_t find_facts(DeviceInfo& device, RouteOptions& options) {
  int index = 0;
  if (const cudaError_t status = cudaGetDevice(&index); status != cudaSuccess) return status;
  const bool in_range = static_cast<size_t>(index) < tuned_linears.size();
  options = {.tensor_maps = has_tensor_maps(),
             .force_sm80 = forced_sm80,
             .force_gemm = forced_gemm(),
             .tuned = in_range ? tuned_linears[index].load(std::memory_order_acquire) : nullptr};
  return device_info(device);
}

}  // namespace

LinearRoute route_linear(const LinearProblem& problem) {
  DeviceInfo device;
  RouteOptions options;
  if (find_facts(device, options) != cudaSuccess) return {.reason = "the GPU's properties are not known"};
  return choose_route(problem, device, options);
}

int linear_parts(const LinearRoute& route, const LinearProblem& next) {
  DeviceInfo device;
  RouteOptions options;
  return find_facts(device, options) == cudaSuccess ? choose_handoff(route, next, device, options) : 0;
}

cudaError_t linear(const LinearParams& params, const LinearRoute& route, Dtype dtype, cudaStream_t stream) {
  LinearParams p = params;
  if (route.workspace_bytes > 0) {
    const NormParams norm{.x = p.x,
                          .weight = p.norm_weight,
                          .y = p.workspace,
                          .rows = p.m,
                          .cols = p.k(),
                          .x_stride = p.x_stride,
                          .options = p.norm};
    if (const cudaError_t status = rms_norm(norm, dtype, stream); status != cudaSuccess) return status;
    p.x = p.workspace;
    p.x_stride = p.k();
    p.normalize = false;
  }
  switch (route.variant) {
    case LinearVariant::kGemv: return gemv(p, route.gemv, dtype, stream);
    case LinearVariant::kMma:
    case LinearVariant::kWgmma: return launch_with_tma(p, route, dtype, stream);
    case LinearVariant::kSm80: return launch_sm80(p, route, dtype, stream);
    case LinearVariant::kGemm: return gemm(p, route.many, static_cast<int>(route.blocks), dtype, stream);
    case LinearVariant::kLibrary: break;
  }
  return cudaErrorInvalidValue;  // the caller's own
}

}  // namespace llmk::kernels

// For tests and benchmarks, which call it through ctypes: whether every GPU takes the kernel of those without TMA.
extern "C" __attribute__((visibility("default"))) void llmk_force_linear_sm80(int value) {
  llmk::kernels::forced_sm80 = value != 0;
}

// For llmkernels/_tune, which calls it through ctypes: sets the measured choices of the current device, in place of
// those that it had. `numbers` are those of `count` TunedLinear, each kTunedLinearNumbers. If the device cannot run one
// of them nothing changes, and `refused` is its index and `reason` says why. Returns a cudaError_t. Graphs that were
// recorded before keep the kernels that they have.
extern "C" __attribute__((visibility("default"))) int llmk_set_tuned_linears(const int64_t* numbers, int64_t count,
                                                                             int64_t* refused, const char** reason) {
  using namespace llmk::kernels;
  *reason = nullptr;
  DeviceInfo device;
  RouteOptions options;
  if (const cudaError_t status = find_facts(device, options); status != cudaSuccess) return status;
  int index = 0;
  if (const cudaError_t status = cudaGetDevice(&index); status != cudaSuccess) return status;
  if (static_cast<size_t>(index) >= tuned_linears.size()) return cudaErrorInvalidDevice;
  std::vector<TunedLinear> entries(count);
  std::copy_n(numbers, count * kTunedLinearNumbers, reinterpret_cast<int64_t*>(entries.data()));
  options.force_sm80 = false;
  const auto found = TunedLinears::find_refused(entries, device, !routing::without_tma(device, options));
  *refused = found.index, *reason = found.reason;
  if (found.reason) return cudaErrorInvalidValue;
  auto table = entries.empty() ? nullptr : std::make_unique<const TunedLinears>(std::move(entries));
  tuned_linears[index].store(table.release(), std::memory_order_release);
  return cudaSuccess;
}

// For llmkernels.explain, which calls it through ctypes: what the routes of the current device depend on. Facts: the
// compute capability, wgmma, tensor maps, SMs, bytes of shared memory of a block, clusters of 2, 4, 8 and 16 blocks.
// Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int llmk_route_facts(int* facts) {
  llmk::kernels::DeviceInfo device;
  llmk::kernels::RouteOptions options;
  const cudaError_t status = llmk::kernels::find_facts(device, options);
  if (status != cudaSuccess) return status;
  const int found[] = {device.compute_capability,
                       device.has_wgmma,
                       options.tensor_maps,
                       device.sm_count,
                       static_cast<int>(device.shared_bytes),
                       device.clusters[2],
                       device.clusters[4],
                       device.clusters[8],
                       device.clusters[16]};
  std::copy(std::begin(found), std::end(found), facts);
  return cudaSuccess;
}
