// The norms' backward (backward.cuh) for rows of any alignment that fit a block, by words (row_words.cuh): a persistent
// grid, as in backward_persistent.cuh. A group reads its rows from a ring of slots, and has one slot more for what it
// stores. In the turn of its row i,
//
//   vectors   of row i + 2 begin to be copied, by cp.async
//   ends      of row i + 1, loaded in the turn before, are put beside its vectors
//   words     x, grad_y -> sums -> grad_x -> a slot -> stored by vectors
//
// An H100, bfloat16, us, forward and backward; cut: vectors were cut out of two that neighbouring lanes had copied.
//
//   case                 | cut   | words | aligned neighbour
//   ---------------------|-------|-------|------------------
//   rms_norm 8192x1001   | 47.3  | 40.7  | 34.7
//   rms_norm 8192x2050   | 73.2  | 73.6  |
//   rms_norm 8192x4097   | 135.9 | 143.8 | 119.8
//   layer_norm 8192x1001 | 62.1  | 48.1  | 39.4
//   layer_norm 8192x4097 | 208.1 | 208.2 | 128.9
//   layer_norm 4096x8191 | 213.9 | 164.5 |
//
// The weights are in registers. Where that leaves a LayerNorm too few threads, they are in shared memory, once for the
// block, which has more threads then: 8192x4097 takes 121 us instead of 138 on an H200. (With them in shared memory
// always, layer_norm 8192x1001 took 34.2 us instead of 30.4, and rms_norm 24.5 instead of 22.9.)
#pragma once
#include <algorithm>

#include "backward_row.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/row_words.cuh"

namespace llmk::kernels::norm {

// Words of a thread, at most, for the sums over rows have to fit the registers; threads of a block, at most; rows of a
// group in shared memory.
constexpr int kFewWords = 8;
template <typename T, bool kCentered>
constexpr int kMostWords = kCentered && sizeof(T) == 2 ? 12 : 16;
__host__ __device__ constexpr int backward_threads(bool shares_weights) { return shares_weights ? 640 : 512; }
__host__ __device__ constexpr int word_stages(int words) { return words > kFewWords ? 2 : 3; }

struct BackwardWordPlan : WordPlan {
  bool shares_weights;
};

// kRounds: round(n) is what the forward multiplied by the weight. kSharesWeights: they are in shared memory.
template <typename T, int kWords, bool kCentered, bool kRounds, bool kSharesWeights>
__global__ void __launch_bounds__(backward_threads(kSharesWeights))
    norm_backward_words_kernel(const NormBackwardParams params, const WordPlan plan, bool keep_inputs) {
  using Slot = RowSlot<T, kWords>;
  using W = typename Slot::Word;
  constexpr int kPerWord = Slot::kPerWord, kDepth = word_stages(kWords), kSums = kCentered ? 3 : 2;
  extern __shared__ int4 slots[];  // [stage][operand][group], [group]: grad_x, and one of weights where they are shared
  __shared__ float shared[2][kSums * backward_threads(kSharesWeights) / 32];
  const LooseGroup group{{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.y)}};
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int cols = static_cast<int>(params.cols), operands = params.grad_sum ? 3 : 2;
  const uint64_t policy = l2_policy(keep_inputs);
  const auto slot_of = [&](int stage, int operand) {
    return Slot(slots, stage * operands + operand, group, plan.rows_per_block, cols);
  };

  // As many turns for every group of a block: those that share a barrier meet as often.
  const int64_t ahead = static_cast<int64_t>(group.index) * gridDim.x, first = ahead + blockIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  T ends[3];  // of the copy that was begun last
  const auto for_operands = [&](int64_t row, int stage, const auto& body) {
    if (row >= params.rows) return;
    const Rows<T> rows(params, row);
    body(slot_of(stage, 0), rows.x, ends[0]);
    body(slot_of(stage, 1), rows.grad_y, ends[1]);
    if (params.grad_sum) body(slot_of(stage, 2), rows.grad_sum, ends[2]);
  };
  const auto begin_copy = [&](int64_t row, int stage) {
    for_operands(row, stage, [&](Slot slot, const T* source, T& end) {
      slot.copy_vectors(source, policy);
      end = slot.load_end(source);
    });
    cp_async_commit();
  };
  const auto end_copy = [&](int64_t row, int stage) {
    for_operands(row, stage, [&](Slot slot, const T* source, T& end) {
      slot.holds(source);
      slot.put_end(end);
    });
  };

  const int vectors = static_cast<int>(plan.row_bytes() / 16) * kDepth * operands * plan.rows_per_block;
  for (int v = thread; v < vectors; v += threads) slots[v] = make_int4(0, 0, 0, 0);
  __syncthreads();
  pdl_wait();
  begin_copy(first, 0);
  if constexpr (kDepth == 3) {
    end_copy(first, 0);
    begin_copy(first + step, 1);
  }

  const Rows<T> row_0(params, 0);
  const float eps = static_cast<float>(params.options.eps), inverse_cols = 1.f / static_cast<float>(params.cols);
  const float weight_offset = row_0.weight ? static_cast<float>(params.options.weight_offset) : 0.f;
  Slot result(slots, kDepth * operands, group, plan.rows_per_block, cols);
  const Group of_block{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), 0};
  const Slot shared_weights(slots, kDepth * operands + 1, of_block, plan.rows_per_block, cols);
  [[maybe_unused]] W own_weights[kWords];
  if constexpr (!kSharesWeights) {
    load_parameters(row_0.weight, cols, result.column(0), 1.f, own_weights);
  } else if (group.index == 0) {
    W words[kWords];
    load_parameters(row_0.weight, cols, shared_weights.column(0), 1.f, words);
    shared_weights.put(words);
  }
  if constexpr (kSharesWeights) __syncthreads();
  const auto weight_of = [&](int i) {
    if constexpr (kSharesWeights) {
      return shared_weights.word(i);
    } else {
      forget_floats(own_weights[i]);
      return own_weights[i];
    }
  };
  float grad_weight[kWords][kPerWord];
  [[maybe_unused]] float grad_bias[kWords][kPerWord];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) grad_weight[i][k] = grad_bias[i][k] = 0.f;
  }

  int stage = 0, last = kDepth - 2, free = kDepth - 1;  // of this row, of the copy that was begun last, of the next
  int parity = 0;
  for (int64_t row = first; row < params.rows + ahead; row += step) {
    end_copy(row + (kDepth - 2) * step, last);
    begin_copy(row + (kDepth - 1) * step, free);
    Slot::template arrived<kDepth - 1>();
    const bool exists = row < params.rows;
    const Rows<T> rows(params, row);
    W x[kWords], grad_y[kWords];
    const auto load = [&](int operand, const T* source, W(&words)[kWords]) {
      Slot slot = slot_of(stage, operand);
      slot.holds(source);
      slot.load(words);
#pragma unroll
      for (int i = 0; i < kWords; ++i) forget_floats(words[i]);
    };
    load(0, rows.x, x);
    load(1, rows.grad_y, grad_y);
    float mean = 0.f, mean_g = 0.f;
    if constexpr (kCentered) {
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const W weight = weight_of(i);
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) {
          sums[0] += x[i][k];
          sums[1] += grad_y[i][k] * (weight_offset + weight[k]);
        }
      }
      group_sum(sums, group, shared[1]);
      mean = sums[0] * inverse_cols, mean_g = sums[1] * inverse_cols;
    }
    float sums[kSums] = {};
    const int left = cols - result.column(0);  // columns from the thread's first one on
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      forget_floats(x[i]), forget_floats(grad_y[i]);
      const W weight = weight_of(i);
#pragma unroll
      for (int k = 0; k < kPerWord; ++k) {
        if (kCentered && i * Slot::kStep + k >= left) continue;  // the difference of no number from the mean is not 0
        const float d = centered<kCentered>(x[i][k], mean);
        sums[0] += d * d;
        sums[1] += grad_y[i][k] * (weight_offset + weight[k]) * d;
        if constexpr (kCentered) sums[2] += d;
      }
    }
    group_sum(sums, group, shared[kCentered ? 0 : parity]);
    if (exists) {
      const Scalars scalars = row_scalars<kCentered>(sums, mean, mean_g, inverse_cols, eps);
      Slot grad_sum = slot_of(stage, 2);
      grad_sum.holds(rows.grad_sum);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        forget_floats(x[i]), forget_floats(grad_y[i]);
        const W weight = weight_of(i);
        float n[kPerWord], grad[kPerWord];
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) n[k] = centered<kCentered>(x[i][k], scalars.mean) * scalars.rstd;
        const W rounded = W::of([&](int k) { return n[k]; });
#pragma unroll
        for (int k = 0; k < kPerWord; ++k) {
          grad_weight[i][k] += grad_y[i][k] * (kRounds ? rounded[k] : n[k]);
          if constexpr (kCentered) grad_bias[i][k] += grad_y[i][k];
          grad[k] = scalars.rstd * without_means<kCentered>(grad_y[i][k] * (weight_offset + weight[k]), n[k], scalars);
        }
        if (params.grad_sum) {
          const W extra = grad_sum.word(i);
#pragma unroll
          for (int k = 0; k < kPerWord; ++k) grad[k] += extra[k];
        }
        x[i] = W::of([&](int k) { return grad[k]; });
      }
      result.put(rows.grad_x, x);
    }
    if (exists) result.store(rows.grad_x);
    parity ^= 1;
    last = free;
    free = stage;
    stage = stage + 1 < kDepth ? stage + 1 : 0;
  }

  pdl_launch_dependents();
  // One row of each partial sum per block: its groups are added up in shared memory, in a fixed order.
  cp_async_wait<0>();
  auto* const group_sums = reinterpret_cast<float*>(slots);  // [group][column]
  auto* partial = static_cast<float*>(params.partials) + blockIdx.x * params.cols;
  const auto add_groups = [&](const float(&of_thread)[kWords][kPerWord]) {
    __syncthreads();  // what lies there has been read
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int k = 0; k < kPerWord; ++k) {
        const int c = result.column(i) + k;
        if (c < cols) group_sums[group.index * cols + c] = of_thread[i][k];
      }
    }
    __syncthreads();
    for (int c = thread; c < cols; c += threads) {
      float sum = group_sums[c];
      for (int g = 1; g < blockDim.y; ++g) sum += group_sums[g * cols + c];
      partial[c] = sum;
    }
    partial += params.partial_rows * params.cols;
  };
  if (params.grad_weight) add_groups(grad_weight);
  if constexpr (kCentered) {
    if (params.grad_bias) add_groups(grad_bias);
  }
}

// The plan of a row, and the grid; no words when the row is not for this kernel. A thread has eight words and its
// weights in registers, unless another way keeps a quarter more threads of a block at work. That does not depend on the
// number of rows.
template <typename T, bool kCentered>
cudaError_t plan_backward_words(const NormBackwardParams& params, BackwardWordPlan& plan, int64_t& blocks) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const int64_t room = static_cast<int64_t>(device.shared_bytes) - 1024;  // the reductions need some
  int64_t bytes = 0, weights = 0;  // of shared memory for a row, and for the weights
  const auto consider = [&](int most_words, bool shares_weights) {
    const int threads = backward_threads(shares_weights);
    BackwardWordPlan some{plan_words(params.cols, sizeof(T), 1, most_words, threads), shares_weights};
    if (some.words == 0) return;
    const int64_t some_bytes = some.row_bytes() * (word_stages(some.words) * (params.grad_sum ? 3 : 2) + 1);
    const int64_t some_weights = shares_weights ? some.row_bytes() : 0;
    const int64_t fit = (room - some_weights) / some_bytes;
    some.rows_per_block = static_cast<int>(std::min<int64_t>(threads / some.threads, fit));
    if (4 * some.threads * some.rows_per_block > 5 * plan.threads * plan.rows_per_block) {
      plan = some, bytes = some_bytes, weights = some_weights;
    }
  };
  for (const int most_words : {kFewWords, 12, 16}) {
    if (most_words <= kMostWords<T, kCentered>) consider(most_words, false);
  }
  if (kCentered) consider(kFewWords, true);
  if (plan.words == 0) return cudaSuccess;
  const int64_t rows_per_sm = (params.rows + device.sm_count - 1) / device.sm_count;
  plan.rows_per_block = static_cast<int>(std::min<int64_t>(plan.rows_per_block, rows_per_sm));
  // More than half of an SM's, so that two blocks cannot pile up on one that is free early.
  plan.shared_bytes = std::max<size_t>(bytes * plan.rows_per_block + weights, device.shared_bytes / 2 + 1024);
  blocks = std::min<int64_t>(params.rows, device.sm_count);
  return cudaSuccess;
}

template <typename T, bool kCentered>
cudaError_t launch_words(const BackwardWordPlan& plan, int64_t blocks, const NormBackwardParams& params,
                         cudaStream_t stream) {
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const int operands = params.grad_sum ? 4 : 3;
  const bool keep = keeps_inputs(device, params.rows * params.cols * sizeof(T) * operands);
  const LaunchShape shape{blocks, dim3(plan.threads, plan.rows_per_block), plan.shared_bytes};
  return dispatch_int<4, 8, 12, 16>(plan.words, [&](auto words) {
    constexpr int kWords = decltype(words)::value;
    constexpr bool kMayShare = kCentered && kWords <= kFewWords, kMayRound = sizeof(T) == 2 && !kCentered;
    if constexpr (kWords > kMostWords<T, kCentered>) {
      return cudaErrorInvalidValue;  // no such plan
    } else {
      auto kernel = norm_backward_words_kernel<T, kWords, kCentered, false, false>;
      if (params.options.cast_before_weight) {
        kernel = norm_backward_words_kernel<T, kWords, kCentered, kMayRound, false>;
      }
      if (plan.shares_weights) kernel = norm_backward_words_kernel<T, kWords, kCentered, false, kMayShare>;
      return launch(kernel, shape, stream, params, plan, keep);
    }
  });
}

}  // namespace llmk::kernels::norm
