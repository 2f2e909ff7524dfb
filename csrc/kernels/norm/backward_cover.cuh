// The norms' backward (backward.cuh) for rows of any alignment that fit a block: a persistent grid and a ring of
// stages, as in backward_persistent.cuh, of the vectors that cover the rows (row_cover.cuh).
//
// Rows that lie a multiple of kVecWidth rows apart start at the same place of a vector, whatever their stride. A block
// takes such rows only. So a thread has the same columns of all its rows, and keeps its partial grad_w and grad_b in
// registers, element by element. The weights are cut out once per block, and lie in shared memory as float numbers.
//
// A thread copies what it will read itself, whole vectors. What is not the row's in the two that have its ends is
// masked before it is summed, and only there: what else is made of it is not used. Only in the first and the last row
// of a tensor may an end not be copied whole: the thread loads its elements, and waits.
//
// RMSNorm of 8192 x 4097 issues in half of the cycles; what warps wait for most are barriers and shared memory (ncu). A
// warp takes about 110 instructions for each vector, and 280 for each row besides, most of them for its sums: so few
// warps, with many vectors each, of which only those have a last one that need it. A LayerNorm takes more of both. Rows
// of bfloat16, an H200, us:
//
//   value                            | case                            | result
//   ---------------------------------|---------------------------------|---------------
//   5 vectors of a thread            | 8192 x 4097, RMSNorm, LayerNorm | 65.9, 82.4
//   4 vectors                        | the same                        | 69.1, 103
//   3 and 2 vectors                  | the same                        | 78.5, 130 (1)
//   5, another warp is first in each | the same                        | 67.8, 88.6
//     group                          |                                 |
//   5, two reductions of a LayerNorm | 8192 x 4097, LayerNorm          | 92.7
//   by words                         | 8192 x 4097, RMSNorm, LayerNorm | 86.6, 121 (2)
//   backward_persistent.cuh          | 8192 x 4096, RMSNorm, LayerNorm | 53.6, 58.5
//   2 vectors, 8 groups              | 8192 x 1001, RMSNorm, LayerNorm | 22.7, 25.6
//   4 vectors, 8 groups              | the same                        | 26.7, 27.6
//   4 vectors, 12 groups             | the same                        | 26.9, 29.6
//   2 vectors, 10 groups             | the same                        | 28.2, 31.0
//   by words                         | the same                        | 23.0, 30.5 (2)
//   backward_persistent.cuh          | 8192 x 1000, RMSNorm, LayerNorm | 17.1, 23.0
//
// (1) Ends loaded in line, addresses computed for each row, weights as they are, every vector of every warp. (2) A
// warp's part of a row in shared memory, and words of 4 bytes, wherever they start, in registers.
//
// Operands that start elsewhere in a vector than x (kAlike = false) are cut out as they are copied, while the thread
// waits. That is slow, and gives the same bits.
#pragma once
#include <algorithm>
#include <type_traits>

#include "backward_row.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/sector.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/row_cover.cuh"

namespace llmk::kernels::norm {

constexpr int kBackwardCoverVectors = 5;  // of a thread, at most

// Threads of a block, at most: what the registers have room for. A quarter of them, in whole warps, shares 16384: 96
// registers of a thread, 128 or 168. (Some kernels spill a few numbers that no row changes: without kAlike, and of
// float32 with five vectors.)
template <typename T>
__host__ __device__ constexpr int backward_cover_threads(int vectors, bool centered) {
  const int elements = vectors * static_cast<int>(16 / sizeof(T));
  if (centered) return elements <= 12 ? 640 : elements <= 20 ? 512 : 384;
  return elements <= 24 ? 640 : 512;
}

// What all lanes of a warp have: computed once, and not anew for each row.
__device__ inline int kept_uniform(int number) { return __shfl_sync(0xffffffffu, number, 0); }

// The same number, that nothing is computed from ahead: for what is rarely done.
__device__ inline int only_here(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// An address in shared memory that ptxas takes for any number of this lane. Of an address that is a sum, it would leave
// the part that is the same in all lanes to the instruction of cp.async; with those of ptxas 13.0, the kernel ended
// with an illegal instruction on an H200.
__device__ inline uint32_t lane_address(const void* shared) {
  return __shfl_sync(0xffffffffu, shared_address(shared), threadIdx.x % 32);
}

template <typename T>
__device__ T* bytes_on(T* address, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(address) + bytes);
}

// What the kernel need not compute.
struct BackwardCoverLaunch {
  int64_t x_step, grad_y_step, grad_sum_step, grad_x_step;  // bytes between the rows of a group
  int step, lead;  // rows: the same, and from the one that is worked on to the one that is copied
  int stage_bytes, ring_bytes;
  int last_warps;  // of a group, that have a last vector
  float eps, inverse_cols;
  bool is_narrow;  // vectors of any row may lie outside of a tensor
  bool three_stages, keep_inputs;
};

// A block for every SM, a multiple of N of them if there are more rows than blocks: all rows of a block start at the
// same place of a vector. What a thread does not have (columns behind the end, rows behind the last) is copied as
// zeros, as in backward_persistent.cuh. kRounds: round(n) is what the forward multiplied by the weight. kAlike: see
// rows_alike(). All but the last vector of a thread exist, and end in the row.
template <typename T, int kVectors, bool kCentered, bool kRounds, bool kAlike>
__global__ void __launch_bounds__(backward_cover_threads<T>(kVectors, kCentered))
    norm_backward_cover_kernel(const NormBackwardParams params, const BackwardCoverLaunch plan) {
  constexpr int N = kVecWidth<T>, kSums = kRowSums<T, kCentered>, kLast = kVectors - 1;
  constexpr int kWarps = backward_cover_threads<T>(kVectors, kCentered) / 32;
  constexpr int kSlot = 32 * 16;                        // bytes of a vector of each lane
  constexpr int kScaleBytes = kSlot * N / 4;            // the same of floats
  constexpr bool kReloads = kVectors > 2 || kCentered;  // after a reduction, since registers are scarce
  constexpr bool kOnce = kSumsOnce<T, kCentered>;
  using V = Vec<T, N>;
  const uint64_t policy = l2_policy(plan.keep_inputs);
  // [stage]([warp][operand][vector but the last][lane], [warp that has the last vector][operand][lane]), then
  // [warp of a group][vector but the last][part][lane], [warp that has the last vector][part][lane] of the weights:
  // from where a thread begins, every vector but the last is at a constant distance.
  extern __shared__ int4 ring[];
  __shared__ WarpSums<N> shared[2][kSums * kWarps];
  __shared__ Words keeps[3];  // what is the row's, by bits: of the first vector, of the last one, of the others
  const LooseGroup group{{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x), kept_uniform(threadIdx.y)}};
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int warps = blockDim.x / 32, warp = kept_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int rows = static_cast<int>(params.rows), cols = static_cast<int>(params.cols);
  const int operands = params.grad_sum ? 3 : 2;
  const int main_bytes = warps * operands * kLast * kSlot, last_bytes = plan.last_warps * operands * kSlot;
  const int begin = group.index * main_bytes + warp * operands * kLast * kSlot + lane * 16;  // in a stage
  // All rows of a block begin in the same half of a sector where the grid is a multiple of 2 N.
  char* const first_stage = reinterpret_cast<char*>(ring + vectors_to_sector(ring, Rows<T>(params, blockIdx.x).x));
  char* const memory = first_stage + begin;
  char* const last_memory = first_stage + static_cast<int>(blockDim.y) * main_bytes + group.index * last_bytes +
                            warp * operands * kSlot + lane * 16;
  const auto slot = [&](int stage, int operand, int v) {
    return reinterpret_cast<T*>(v < kLast ? memory + stage + (operand * kLast + v) * kSlot
                                          : last_memory + stage + operand * kSlot);
  };

  // Of turn t, t = blockIdx.x, blockIdx.x + step, ..., the group has row t + ahead, if t < turns_end.
  const int ahead = group.index * static_cast<int>(gridDim.x), turns_end = rows - ahead;
  const int shift = kept_uniform(misalignment(Rows<T>(params, blockIdx.x).x));  // of all rows of the block
  const int vector_step = group.threads * N, first_column = group.rank * N - shift;
  const auto column = [&](int v) { return first_column + v * vector_step; };
  // Of the first vectors, one may be the row's in part, and of the last ones another; others may not exist.
  const bool warp_has_last = kept_uniform(column(kLast)) < cols;
  const bool has_head = warp == 0 && shift > 0, is_head = shift > 0 && group.rank == 0;
  const bool has_tail = warp_has_last && kept_uniform(column(kLast)) + 32 * N > cols;  // or some that do not exist
  const int tail_elements = min(max(cols - column(kLast), 0), N);
  const bool is_tail = tail_elements > 0 && tail_elements < N;
  const int tail_lane = (cols + shift) / N - kLast * group.threads - warp * 32;
  const bool is_partial_tail = (cols + shift) % N != 0 && tail_lane >= 0 && tail_lane < 32;  // of the warp
  const auto warp_has = [&](int v) { return v < kLast || warp_has_last; };
  const auto has_foreign = [&](int v) { return (v == 0 && has_head) || (v == kLast && has_tail); };
  if (thread < 3) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (int e = 0; e < N / 4; ++e) {
        const int p = i * (N / 4) + e;
        const bool is_kept = thread == 0 ? p >= shift : thread == 1 ? p < (cols + shift) % N : true;
        if (is_kept) words[i] |= (0xffffffffu >> (32 - 8 * sizeof(T))) << (e * 8 * static_cast<int>(sizeof(T)));
      }
    }
    keeps[thread] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  const int head_keep = is_head ? 0 : 2, tail_keep = is_tail ? 1 : 2;
  const auto keep = [&](V& vector, const Words& bits) {
    const Words words = words_of(vector);
    vector = of_words<T>(make_uint4(words.x & bits.x, words.y & bits.y, words.z & bits.z, words.w & bits.w));
  };
  // Zeros in place of what is not the row's.
  const auto clear = [&](V& x, V& grad_y, int v) {
    if (v == 0 && has_head) {
      const Words bits = keeps[head_keep];
      keep(x, bits), keep(grad_y, bits);
    }
    if (v == kLast && has_tail) {
      const Words bits = keeps[tail_keep];
      keep(x, bits), keep(grad_y, bits);
    }
  };

  Rows<T> next(params, static_cast<int>(blockIdx.x) + ahead);  // to be copied, each from first_column on
  next.x += first_column, next.grad_y += first_column, next.grad_sum += first_column;
  T* grad_x = next.grad_x + first_column;
  // Operands from `from` on, also where they cannot be copied whole.
  const auto copy_slowly = [&](int stage, bool is_there, int from) {
    const int back = only_here(first_column);
#pragma unroll 1
    for (int i = from * kVectors; i < operands * kVectors; ++i) {
      const int operand = i / kVectors, v = i % kVectors, c = column(v);
      const T* const row = (operand == 0 ? next.x : operand == 1 ? next.grad_y : next.grad_sum) - back;
      T* const target = slot(stage, operand, v);
      if (!warp_has(v)) continue;
      V vector = of_words<T>(make_uint4(0, 0, 0, 0));
      if (c < cols && is_there) {
        vector = kAlike || operand == 0 ? load_aligned(row, c, 0, cols) : load_shifted(row, c, 0, cols);
      }
      vector.assign_to(target);
    }
  };
  const auto copy_next = [&](int stage, int turn) {
    const uint32_t target = lane_address(memory + stage), last_target = lane_address(last_memory + stage);
    const bool is_there = turn < turns_end;
    const int bytes = is_there ? 16 : 0;
    // The vectors of all rows but the first and the last one lie in the tensors, unless rows lie upon each other.
    if (is_there && (turn == 0 || turn + 1 == turns_end || plan.is_narrow)) {
      copy_slowly(stage, is_there, 0);
    } else {
      const auto copy_operand = [&](int operand, const T* source) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (!warp_has(v)) continue;
          const uint32_t to = v < kLast ? target + (operand * kLast + v) * kSlot : last_target + operand * kSlot;
          cp_async_16(__cvta_shared_to_generic(to), source + v * vector_step,
                      v < kLast || tail_elements > 0 ? bytes : 0, policy);
        }
      };
      copy_operand(0, next.x);
      if constexpr (kAlike) {
        copy_operand(1, next.grad_y);
        if (params.grad_sum) copy_operand(2, next.grad_sum);
      } else {
        copy_slowly(stage, is_there, 1);
      }
    }
    cp_async_commit();
    next.x = bytes_on(next.x, plan.x_step);
    next.grad_y = bytes_on(next.grad_y, plan.grad_y_step);
    next.grad_sum = bytes_on(next.grad_sum, plan.grad_sum_step);
  };

  // For number_near(), an element of each lane, a row ahead.
  [[maybe_unused]] const T* first_elements = Rows<T>(params, static_cast<int>(blockIdx.x) + ahead).x + lane;
  [[maybe_unused]] Vec<T, 1> element{};
  const auto load_element = [&](int turn) {
    if (turn < turns_end) element = Vec<T, 1>::load(first_elements);
    first_elements = bytes_on(first_elements, plan.x_step);
  };

  pdl_wait();
  if constexpr (kOnce) load_element(blockIdx.x);
#pragma unroll 1
  for (int rows_on = 0, stage = 0; rows_on < plan.lead; rows_on += plan.step, stage += plan.stage_bytes) {
    copy_next(stage, static_cast<int>(blockIdx.x) + rows_on);
  }

  // offset + w, of all groups: their rows start at the same place.
  char* const all_scales = reinterpret_cast<char*>(ring + 1) + plan.ring_bytes + lane * 16;
  float* const scales = reinterpret_cast<float*>(all_scales + warp * kLast * kScaleBytes);
  float* const last_scales = reinterpret_cast<float*>(all_scales + (warps * kLast + warp) * kScaleBytes);
  const auto scale_of = [&](int v, int i) {  // of elements i to i + 3
    return reinterpret_cast<float4*>((v < kLast ? scales + v * (kScaleBytes / 4) : last_scales) + i * 32);
  };
  {
    const auto* const weights = static_cast<const T*>(params.weight);
    const float weight_offset = weights ? static_cast<float>(params.options.weight_offset) : 0.f;
#pragma unroll 1
    for (int v = group.index; v < kVectors; v += blockDim.y) {
      if (!warp_has(v)) continue;
      const V weight = weights ? load_shifted(weights, column(v), 0, cols) : V::of([](int) { return 1.f; });
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        *scale_of(v, i) = make_float4(weight_offset + weight[i], weight_offset + weight[i + 1],
                                      weight_offset + weight[i + 2], weight_offset + weight[i + 3]);
      }
    }
  }
  __syncthreads();
  struct Scales {
    float4 parts[N / 4];
    __device__ float operator[](int i) const {
      const float4& part = parts[i / 4];
      return i % 4 == 0 ? part.x : i % 4 == 1 ? part.y : i % 4 == 2 ? part.z : part.w;
    }
  };
  const auto load_scales = [&](int v) {
    Scales result;
#pragma unroll
    for (int i = 0; i < N; i += 4) result.parts[i / 4] = *scale_of(v, i);
    return result;
  };
  float grad_weight[kVectors][N] = {};
  [[maybe_unused]] float grad_bias[kVectors][N] = {};

  int stage = 0, free_stage = plan.ring_bytes - plan.stage_bytes, parity = 0;
  // As many turns for every group of a block: racecheck takes warps that met less often at barriers for earlier ones.
  for (int turn = blockIdx.x; turn < rows; turn += plan.step) {
    float mean = 0.f, mean_g = 0.f;
    if constexpr (kOnce) {
      mean = number_near<T>(element);
      load_element(turn + plan.step);
    }
    copy_next(free_stage, turn + plan.lead);
    if (plan.three_stages) {
      cp_async_wait<2>();
    } else {
      cp_async_wait<1>();
    }
    const auto load = [&](int operand, int v) { return V::load(slot(stage, operand, v)); };
    V x[kVectors], grad_y[kVectors];
    const auto load_to_sum = [&](int v) {
      x[v] = load(0, v), grad_y[v] = load(1, v);
      const Scales scale = load_scales(v);
      clear(x[v], grad_y[v], v);
      return scale;
    };
    // What the compiler may contract is said outright: kernels with and without kAlike give the same bits.
    if constexpr (kCentered && !kOnce) {
      float of_elements[2][N] = {}, sums[2];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!warp_has(v)) continue;
        const Scales scale = load_to_sum(v);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          of_elements[0][i] += x[v][i];
          of_elements[1][i] = fmaf(grad_y[v][i], scale[i], of_elements[1][i]);
        }
      }
      sum_covering(of_elements, shift, sums, group, shared[1]);
      mean = __fmul_rn(sums[0], plan.inverse_cols), mean_g = __fmul_rn(sums[1], plan.inverse_cols);
    }
    float of_elements[kSums][N] = {}, sums[kSums];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!warp_has(v)) continue;
      const Scales scale = load_to_sum(v);
      float d[N];
#pragma unroll
      for (int i = 0; i < N; ++i) d[i] = centered<kCentered>(x[v][i], mean);
      if constexpr (kCentered) {  // the difference of no number from the mean is not 0
        if (has_foreign(v)) clear_outside(d, column(v), cols, 0.f);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        of_elements[0][i] = fmaf(d[i], d[i], of_elements[0][i]);
        const float g = __fmul_rn(grad_y[v][i], scale[i]);
        of_elements[1][i] = fmaf(g, d[i], of_elements[1][i]);
        if constexpr (kCentered) of_elements[2][i] += d[i];
        if constexpr (kOnce) of_elements[3][i] = fmaf(grad_y[v][i], scale[i], of_elements[3][i]);
      }
    }
    sum_covering(of_elements, shift, sums, group, shared[kCentered && !kOnce ? 0 : parity]);
    if constexpr (kOnce) mean_g = __fmul_rn(sums[3], plan.inverse_cols);
    Scalars scalars = row_scalars<kCentered>(sums, mean, mean_g, plan.inverse_cols, plan.eps);
    const bool is_there = turn < turns_end;
    if (!is_there) scalars = {};  // with an eps of 0, those of zeros would be infinite
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!warp_has(v)) continue;
      if constexpr (kReloads) x[v] = load(0, v), grad_y[v] = load(1, v);
      const Scales scale = load_scales(v);
      forget_floats(x[v]), forget_floats(grad_y[v]);
      float n[N], grad[N];
#pragma unroll
      for (int i = 0; i < N; ++i) n[i] = __fmul_rn(centered<kCentered>(x[v][i], scalars.mean), scalars.rstd);
      const V rounded = V::of([&](int i) { return n[i]; });
#pragma unroll
      for (int i = 0; i < N; ++i) {
        grad_weight[v][i] = fmaf(grad_y[v][i], kRounds ? rounded[i] : n[i], grad_weight[v][i]);
        if constexpr (kCentered) grad_bias[v][i] += grad_y[v][i];
        const float g = __fmul_rn(grad_y[v][i], scale[i]);
        const float difference = fmaf(-n[i], scalars.mean_gn, kCentered ? g - scalars.mean_g : g);
        grad[i] = __fmul_rn(scalars.rstd, difference);
      }
      if (params.grad_sum) {
        const V extra = load(2, v);
#pragma unroll
        for (int i = 0; i < N; ++i) grad[i] = __fadd_rn(grad[i], extra[i]);
      }
      const V result = V::of([&](int i) { return grad[i]; });
      if constexpr (kAlike) {
        const bool is_whole = (v > 0 || !is_head) && (v < kLast || column(v) + N <= cols);
        if (is_there && is_whole) result.store(grad_x + v * vector_step);
        using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
        const auto store_part = [&](int of_lane) {
          const Words own = words_of(result);
          store_end<Bits>({own.x, own.y, own.z, own.w}, of_lane, column(v) + (of_lane - lane) * N,
                          reinterpret_cast<Bits*>(grad_x - only_here(first_column)), is_there ? cols : 0);
        };
        if (v == 0 && has_head) store_part(0);
        if (v == kLast && is_partial_tail) store_part(tail_lane);
      } else {
        store_elsewhere(result, grad_x - only_here(first_column), column(v), is_there ? cols : 0);
      }
    }
    grad_x = bytes_on(grad_x, plan.grad_x_step);
    parity ^= 1;
    free_stage = stage;
    stage = stage + plan.stage_bytes < plan.ring_bytes ? stage + plan.stage_bytes : 0;
  }

  pdl_launch_dependents();
  // One row of each partial sum per block: its groups are added up in shared memory, in a fixed order. Each lies there
  // as in its vectors.
  cp_async_wait<0>();
  auto* const group_sums = reinterpret_cast<float*>(ring);  // [group][vector][thread of the group][element]
  auto* partial = static_cast<float*>(params.partials) + blockIdx.x * params.cols;
  const int size = kVectors * group.threads * N;
  const auto add_groups = [&](const float(&of_thread)[kVectors][N]) {
    __syncthreads();  // what lies there has been read
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      auto* const mine =
          reinterpret_cast<float4*>(group_sums + group.index * size + (group.rank + v * group.threads) * N);
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float* const g = &of_thread[v][i];
        mine[i / 4] = make_float4(g[0], g[1], g[2], g[3]);
      }
    }
    __syncthreads();
    for (int c = thread; c < cols; c += threads) {
      float sum = group_sums[shift + c];
#pragma unroll 4
      for (int g = 1; g < blockDim.y; ++g) sum += group_sums[g * size + shift + c];
      partial[c] = sum;
    }
    partial += params.partial_rows * params.cols;
  };
  if (params.grad_weight) add_groups(grad_weight);
  if constexpr (kCentered) {
    if (params.grad_bias) add_groups(grad_bias);
  }
}

struct BackwardCoverPlan : CoverPlan {
  size_t shared_bytes;
  bool alike;
  BackwardCoverLaunch launch;
};

// The plan of a row, and the grid; no vectors when the row is not for this kernel. Whatever the vectors of a thread, a
// row takes as many instructions for them, but each warp takes as many as for two or three vectors besides: so as few
// threads as possible, as long as a block has kThreadsAtWork, over all of its rows, at most kMostGroups at a time: with
// more, a block has few turns, and loads and work take turns as well (rms_norm 8192x1001, 16 rows of a warp each: 27.7
// us). (If it never has, as many as possible.) That does not depend on the number of rows, nor on where they start.
template <typename T, bool kCentered>
cudaError_t plan_backward_cover(const NormBackwardParams& params, BackwardCoverPlan& plan, int64_t& blocks) {
  constexpr int N = kVecWidth<T>;
  constexpr int64_t kThreadsAtWork = 320, kMostGroups = 8;
  DeviceInfo device;
  if (const cudaError_t status = device_info(device); status != cudaSuccess) return status;
  const int64_t count = covering_vectors(params.cols, N);
  if (count < kLeastCover) return cudaSuccess;
  const int operands = params.grad_sum ? 3 : 2;
  const int64_t padded = (count + 31) / 32 * 32;  // to whole warps
  const int64_t stage_bytes = static_cast<int64_t>(sizeof(int4)) * operands * padded;
  BackwardCoverPlan best{};
  int64_t room = 0;  // of shared memory, for stages
  for (int vectors = kBackwardCoverVectors; vectors > 0; --vectors) {
    const int most_threads = backward_cover_threads<T>(vectors, kCentered);
    const int64_t threads = (count + 32 * vectors - 1) / (32 * vectors) * 32;
    // All but the last vector of a thread exist, and end in the row.
    if ((vectors - 1) * threads > params.cols / N) continue;
    const int64_t others = 2 * kRowSums<T, kCentered> * sizeof(WarpSums<N>) * (most_threads / 32) + 1024 +
                           sizeof(int4) + static_cast<int64_t>(sizeof(float)) * N * padded;  // reductions and weights
    const int64_t rest = static_cast<int64_t>(device.shared_bytes) - others;
    const int64_t rows = std::min({most_threads / threads, rest / (2 * stage_bytes), kMostGroups});
    if (rows <= 0 || rows * threads <= best.rows_per_block * best.threads) continue;
    best.vectors = vectors;
    best.threads = static_cast<int>(threads);
    best.rows_per_block = static_cast<int>(rows);
    room = rest;
    if (rows * threads >= kThreadsAtWork) break;
  }
  if (best.vectors == 0) return cudaSuccess;
  plan = best;
  // No more blocks than SMs, and no more rows at a time than it takes to be done after as many turns.
  const int64_t most_blocks = std::max(device.sm_count / N, 1) * N;
  blocks = params.rows <= device.sm_count ? params.rows : most_blocks;
  const int64_t rows_per_block = (params.rows + blocks - 1) / blocks;  // in all
  const int64_t turns = (rows_per_block + plan.rows_per_block - 1) / plan.rows_per_block;
  plan.rows_per_block = static_cast<int>((rows_per_block + turns - 1) / turns);
  const int64_t step = blocks * plan.rows_per_block, step_bytes = step * static_cast<int64_t>(sizeof(T));
  BackwardCoverLaunch& launch = plan.launch;
  launch.three_stages = room / (stage_bytes * plan.rows_per_block) > 2;
  launch.x_step = step_bytes * params.x_stride;
  launch.grad_y_step = step_bytes * params.grad_y_stride;
  launch.grad_sum_step = step_bytes * params.grad_sum_stride;
  launch.grad_x_step = step_bytes * params.cols;
  launch.step = static_cast<int>(step);
  launch.lead = launch.step * (launch.three_stages ? 2 : 1);
  launch.stage_bytes = static_cast<int>(stage_bytes * plan.rows_per_block);
  launch.ring_bytes = launch.stage_bytes * (launch.three_stages ? 3 : 2);
  launch.last_warps = static_cast<int>((padded - (plan.vectors - 1) * plan.threads) / 32);
  launch.eps = static_cast<float>(params.options.eps);
  launch.inverse_cols = 1.f / static_cast<float>(params.cols);
  // More than half of an SM's, so that two blocks cannot pile up on one that is free early.
  plan.shared_bytes =
      std::max<size_t>(sizeof(int4) + launch.ring_bytes + sizeof(float) * N * padded, device.shared_bytes / 2 + 1024);
  plan.alike = rows_alike<T>(params.rows, {{params.x, params.x_stride},
                                           {params.grad_y, params.grad_y_stride},
                                           {params.grad_sum, params.grad_sum_stride},
                                           {params.grad_x, params.cols}});
  const int64_t least_stride =
      std::min(params.grad_y_stride, params.grad_sum ? params.grad_sum_stride : params.grad_y_stride);
  launch.is_narrow = std::min(params.x_stride, plan.alike ? least_stride : params.x_stride) < N;
  launch.keep_inputs = keeps_inputs(device, params.rows * params.cols * sizeof(T) * (operands + 1));
  return cudaSuccess;
}

template <typename T, bool kCentered>
cudaError_t launch_cover(const BackwardCoverPlan& plan, int64_t blocks, const NormBackwardParams& params,
                         cudaStream_t stream) {
  const LaunchShape shape{blocks, dim3(plan.threads, plan.rows_per_block), plan.shared_bytes};
  constexpr bool kMayRound = sizeof(T) == 2 && !kCentered;
  const auto launch_with = [&](auto vectors, auto alike) {
    constexpr int kVectors = decltype(vectors)::value;
    constexpr bool kAlike = decltype(alike)::value;
    const auto kernel = params.options.cast_before_weight
                            ? norm_backward_cover_kernel<T, kVectors, kCentered, kMayRound, kAlike>
                            : norm_backward_cover_kernel<T, kVectors, kCentered, false, kAlike>;
    return launch(kernel, shape, stream, params, plan.launch);
  };
  return dispatch_int<1, 2, 3, 4, 5>(plan.vectors, [&](auto vectors) {
    return plan.alike ? launch_with(vectors, std::true_type{}) : launch_with(vectors, std::false_type{});
  });
}

}  // namespace llmk::kernels::norm
