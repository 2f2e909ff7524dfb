// Backward of rms_norm_rope. With g = the gradient of the result rotated by the transpose, rounded as in rope.cu, since
// it is the gradient of a tensor of the dtype; h = g (offset + weight); n = x rstd; and m what the forward multiplied
// by the weight, round(n) with cast_before_weight, else n:
//
//   grad_x = round(rstd (h - n mean(h n)))        grad_weight = round(sum over rows of g m)
//
// as the modules' own backward passes, one after the other. rstd is recomputed. float32, float16 or bfloat16; float32
// arithmetic. Moves 3 elements per element, plus a float32 row of partial sums per block and weight.
//
// A persistent grid: every block takes rows of q, then rows of k, and sums up the gradient of the weight for the
// columns of its threads, in registers; in its row of the partial sums where threads loop over slots. Partial sums are
// added in a fixed order; no atomics.
#include <algorithm>

#include "device/ptx.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/launch.h"
#include "rms_norm_rope.cuh"
#include "rms_norm_rope.h"
#include "rope.h"

namespace llmk::kernels {
namespace {

using namespace norm_rope;

__host__ __device__ int64_t rows_of_token(const RmsNormRopeParams& params, const RopeTensor& tensor) {
  return params.row_wise ? (tensor.heads > 0) : tensor.heads;
}

// A: the type of the angles. N: elements per access; 1: threads loop over slots, with one group per block.
template <typename T, typename A, int N, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads<N>)
    rms_norm_rope_backward_kernel(const RmsNormRopeParams params, int slots_per_head, bool keep_inputs) {
  constexpr bool kLoops = N == 1;
  using SlotOf = Slot<N, kInterleaved>;
  extern __shared__ float group_sums[];  // [group][column], where there are groups
  __shared__ float shared[2][2 * kMaxThreads<N> / 32];
  const Group group{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)};
  const int of_head = params.row_wise ? slots_per_head : 0;  // 0: there is but one head, and nothing to divide
  const float eps = static_cast<float>(params.norm.eps);
  const bool cast_before_weight = params.norm.cast_before_weight;
  const uint64_t policy = l2_policy(keep_inputs);
  int parity = 0;
  pdl_wait();

#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const RopeTensor& tensor = which == 0 ? params.rope.q : params.rope.k;
    const HeadNorm& norm = which == 0 ? params.q : params.k;
    const int64_t of_token = rows_of_token(params, tensor);
    const int64_t rows = params.rope.batch * params.rope.tokens * of_token;
    const int slots = static_cast<int>(params.row_wise ? tensor.heads : 1) * slots_per_head;
    const float inverse_cols = 1.f / static_cast<float>(norm.cols);
    const float offset = norm.weight ? static_cast<float>(params.norm.weight_offset) : 0.f;
    float* const partial = norm.grad_weight ? static_cast<float*>(norm.partials) + blockIdx.x * norm.cols : nullptr;
    const SlotOf first_slot(params.rope, of_head, min(group.rank, slots - 1));  // others' where there is no own one
    const bool has_slot = group.rank < slots;
    Values<T, N> weight = Values<T, N>::all(1.f);
    if (!kLoops && has_slot) weight = load_weight<T>(norm.weight, first_slot, policy);
    float grad_weight_low[N] = {}, grad_weight_high[N] = {};
    if (kLoops && partial) {
      for (int64_t c = group.rank; c < norm.cols; c += group.threads) partial[c] = 0.f;
      __syncthreads();  // a slot's columns are other ones than these
    }

    // As many turns for every group of a block: groups that share a warp go in step.
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows; first += step) {
      const int64_t index = first + group.index;
      const bool exists = index < rows;
      const Row row(params, of_token, exists ? index : rows - 1);
      const T* const grad_in = static_cast<const T*>(tensor.in) + row.b * tensor.in_batch + row.t * tensor.in_token +
                               row.head * tensor.in_head;
      const T* const x_in =
          static_cast<const T*>(norm.x) + row.b * norm.x_batch + row.t * norm.x_token + row.head * norm.x_head;
      T* const out = static_cast<T*>(tensor.out) + row.b * tensor.out_batch + row.t * tensor.out_token +
                     row.head * tensor.out_head;

      // x, and the gradient of what the norm returned.
      const auto load = [&](const SlotOf& slot, Values<T, N>& x, Values<T, N>& grad) {
        x.load(x_in + slot.head * norm.x_head, slot, policy);
        grad.load(grad_in + slot.head * tensor.in_head, slot, policy);
        if (slot.is_rotated) {
          const auto rotation = load_rotation_of<A>(params.rope, row.b, row.t, slot.pair, slot.at);
          grad = rotate</*kRounds=*/true, kInterleaved>(grad, rotation);
        }
      };
      float sums[2] = {0.f, 0.f};  // of x^2 and h x
      const auto add_up = [&](const Vec<T, N>& x, const Vec<T, N>& grad, const Vec<T, N>& w) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[0] += x[i] * x[i];
          sums[1] += grad[i] * (offset + w[i]) * x[i];
        }
      };
      // grad_x; adds to the gradient of the weight.
      const auto finish = [&](const Vec<T, N>& x, const Vec<T, N>& grad, const Vec<T, N>& w, float rstd, float mean,
                              float(&grad_weight)[N]) {
        const auto rounded = Vec<T, N>::of([&](int i) { return x[i] * rstd; });
#pragma unroll
        for (int i = 0; i < N; ++i) grad_weight[i] += grad[i] * (cast_before_weight ? rounded[i] : x[i] * rstd);
        return Vec<T, N>::of([&](int i) { return rstd * (grad[i] * (offset + w[i]) - x[i] * rstd * mean); });
      };
      const auto reduce = [&](float& rstd, float& mean) {
        group_sum(sums, group, shared[parity]);
        parity ^= 1;
        rstd = rsqrtf(sums[0] * inverse_cols + eps);
        mean = sums[1] * inverse_cols * rstd;
      };

      float rstd, mean;
      if constexpr (kLoops) {
        const int end = exists ? slots : 0;
        const auto for_slots = [&](const auto& body) {
          for (int i = group.rank; i < end; i += group.threads) {
            const SlotOf slot(params.rope, of_head, i);
            Values<T, N> x = Values<T, N>::all(0.f), grad = x;
            load(slot, x, grad);
            body(slot, x, grad, load_weight<T>(norm.weight, slot, policy));
          }
        };
        for_slots([&](const SlotOf&, const Values<T, N>& x, const Values<T, N>& grad, const Values<T, N>& w) {
          add_up(x.low, grad.low, w.low), add_up(x.high, grad.high, w.high);
        });
        reduce(rstd, mean);
        for_slots([&](const SlotOf& slot, const Values<T, N>& x, const Values<T, N>& grad, const Values<T, N>& w) {
          float low[N] = {}, high[N] = {};
          const Values<T, N> result{finish(x.low, grad.low, w.low, rstd, mean, low),
                                    finish(x.high, grad.high, w.high, rstd, mean, high)};
          result.store(out + slot.head * tensor.out_head, slot);
          if (!partial) return;
          partial[slot.column + slot.at.low] += low[0];  // by this thread alone, for every row
          if (slot.has_high) partial[slot.column + slot.at.high] += high[0];
        });
      } else {
        Values<T, N> x, grad;
        const bool mine = exists && has_slot;
        load(first_slot, x, grad);
        add_up(x.low, grad.low, weight.low), add_up(x.high, grad.high, weight.high);
        if (!mine) sums[0] = sums[1] = 0.f;
        reduce(rstd, mean);
        if (mine) {
          const Values<T, N> result{finish(x.low, grad.low, weight.low, rstd, mean, grad_weight_low),
                                    finish(x.high, grad.high, weight.high, rstd, mean, grad_weight_high)};
          result.store(out + first_slot.head * tensor.out_head, first_slot);
        }
      }
    }

    if constexpr (!kLoops) {
      if (!partial) continue;
      // The groups of the block are added up in a fixed order.
      float* const target = blockDim.y > 1 ? group_sums + group.index * norm.cols : partial;
      __syncthreads();  // the sums of q have been read
      if (has_slot) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          target[first_slot.column + first_slot.at.low + i] = grad_weight_low[i];
          target[first_slot.column + first_slot.at.high + i] = grad_weight_high[i];
        }
      }
      if (blockDim.y == 1) continue;
      __syncthreads();
      for (int c = group.index * group.threads + group.rank; c < norm.cols; c += group.threads * blockDim.y) {
        float sum = group_sums[c];
        for (int g = 1; g < blockDim.y; ++g) sum += group_sums[g * norm.cols + c];
        partial[c] = sum;
      }
    }
  }
  pdl_launch_dependents();
}

struct BackwardPlan {
  Plan rows;
  int64_t blocks;
  size_t shared_bytes;
};

template <typename T, int N>
cudaError_t plan_backward(const RmsNormRopeParams& params, BackwardPlan& plan) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  plan.rows = plan_rows<T, N>(params);
  if (!plan.rows.vector) {
    plan.rows.threads = std::max(32, plan.rows.threads);
    plan.rows.groups = 1;
  }
  const RopeParams& rope = params.rope;
  const int64_t most_rows = std::max(rows_of_token(params, rope.q), rows_of_token(params, rope.k));
  const int64_t needed = (rope.batch * rope.tokens * most_rows + plan.rows.groups - 1) / plan.rows.groups;
  const int per_sm = std::max(1, kMaxThreads<N> / (plan.rows.threads * plan.rows.groups));
  plan.blocks = std::min<int64_t>(needed, static_cast<int64_t>(device.sm_count) * per_sm);
  const bool adds_up = plan.rows.groups > 1 && (params.q.grad_weight || params.k.grad_weight);
  plan.shared_bytes = adds_up ? plan.rows.groups * std::max(params.q.cols, params.k.cols) * sizeof(float) : 0;
  return cudaSuccess;
}

template <typename T>
cudaError_t sum_partials(const RmsNormRopeParams& params, cudaStream_t stream) {
  const HeadNorm &q = params.q, &k = params.k;
  if (q.grad_weight && k.grad_weight && q.cols == k.cols) {  // their partial sums lie side by side
    return column_sum<T>({q.partials, params.partial_rows, q.cols, q.grad_weight, k.grad_weight}, stream);
  }
  for (const HeadNorm* norm : {&q, &k}) {
    if (!norm->grad_weight) continue;
    const ColumnSums sums(norm->partials, params.partial_rows, norm->cols, norm->grad_weight);
    if (const cudaError_t status = column_sum<T>(sums, stream); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t rms_norm_rope_backward_partial_rows(const RmsNormRopeParams& params, Dtype dtype, int64_t& rows) {
  return dispatch_types(params, dtype, [&](auto element, auto, auto width) {
    using T = typename decltype(element)::type;
    BackwardPlan plan;
    const cudaError_t status = plan_backward<T, decltype(width)::value>(params, plan);
    rows = plan.blocks;
    return status;
  });
}

cudaError_t rms_norm_rope_backward(const RmsNormRopeParams& params, Dtype dtype, cudaStream_t stream) {
  const RopeParams& rope = params.rope;
  const int64_t tokens = rope.batch * rope.tokens, heads = rope.q.heads + rope.k.heads;
  if (tokens == 0 || rope.head_dim == 0 || heads == 0) return cudaSuccess;
  if (tokens > kMaxRopeTokens) return cudaErrorInvalidValue;
  return dispatch_types(params, dtype, [&](auto element, auto angle, auto width) {
    using T = typename decltype(element)::type;
    using A = typename decltype(angle)::type;
    constexpr int N = decltype(width)::value;
    DeviceInfo device;
    BackwardPlan plan;
    cudaError_t status = device_info(device);
    if (status == cudaSuccess) status = plan_backward<T, N>(params, plan);
    if (status != cudaSuccess) return status;
    const bool keep = keeps_inputs(device, 3 * tokens * heads * rope.head_dim * sizeof(T));
    const auto run = [&](auto kernel) {
      const dim3 threads(plan.rows.threads, plan.rows.groups);
      return launch(kernel, {plan.blocks, threads, plan.shared_bytes, /*may_overlap=*/false}, stream, params,
                    plan.rows.slots_per_head, keep);
    };
    if (plan.rows.vector) {
      status = run(rope.interleaved ? rms_norm_rope_backward_kernel<T, A, N, true>
                                    : rms_norm_rope_backward_kernel<T, A, N, false>);
    } else {
      status = run(rope.interleaved ? rms_norm_rope_backward_kernel<T, A, 1, true>
                                    : rms_norm_rope_backward_kernel<T, A, 1, false>);
    }
    return status == cudaSuccess ? sum_partials<T>(params, stream) : status;
  });
}

}  // namespace llmk::kernels
