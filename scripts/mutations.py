"""The ways in which scripts/mutate.py breaks the sources: each one bug that such libraries have had, as an exact
replacement of text, and the tests that must notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    what: str  # is broken
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # pytest arguments
    tool: str = ""  # of compute-sanitizer, where only that can see it

    @property
    def device(self) -> str:
        return "cuda" if self.name.startswith("cuda_") else "cpu"

    @property
    def compiled(self) -> bool:
        return self.file.startswith("csrc/")


CPU_ATTENTION, CPU_SAMPLING = "csrc/cpu/attention.cpp", "csrc/cpu/sampling.cpp"
NORM, BACKWARD = "csrc/kernels/norm/rms_norm.cu", "csrc/kernels/norm/rms_norm_backward.cu"
ROPE, GLU, REDUCE = "csrc/kernels/rope/rope.cu", "csrc/kernels/activation/glu.cu", "csrc/device/reduce.cuh"

CUDA = [
    Mutation(
        "cuda_skipped_reduction",
        "a row's sum of squares is that of one thread",
        NORM,
        "rsqrtf(row_sum(squares, group, shared) * inverse_cols + eps)",
        "rsqrtf(squares[0] * inverse_cols + eps)",
        "tests/test_rms_norm.py -k 'forward_and_backward and cuda'",
    ),
    Mutation(
        "cuda_missing_barrier",
        "warps read each other's sums without waiting for them",
        REDUCE,
        "slots[lane / kLanes * warps + group.rank / 32] = sum;\n  __syncthreads();",
        "slots[lane / kLanes * warps + group.rank / 32] = sum;",
        "tests/test_memory.py -k 'every_kernel_path and rms_norm-bfloat16-10000'",
        tool="racecheck",
    ),
    Mutation(
        "cuda_reused_buffer",
        "one buffer for the sums of successive rows, with no barrier in between",
        BACKWARD,
        "group_sum(sums, group, shared[parity]);\n    const Scalars scalars = finish(sums, inverse_cols, eps);\n    T*",
        "group_sum(sums, group, shared[0]);\n    const Scalars scalars = finish(sums, inverse_cols, eps);\n    T*",
        "tests/test_memory.py -k 'every_kernel_path and rms_norm-float16-2048x900'",
        tool="racecheck",
    ),
    Mutation(
        "cuda_sums_depend_on_the_batch",
        "the order in which a row is summed depends on how many rows there are",
        REDUCE,
        "slots[lane / kLanes * warps + group.rank / 32] = sum;",
        "slots[group.rank / 32 * kVectors + lane / kLanes] = sum;",
        "tests/test_execution.py -k 'every_row_alone and cuda'",
    ),
    Mutation(
        "cuda_int32_row_offset",
        "offsets of rows wrap at 2^31",
        NORM,
        "static_cast<const T*>(params.x) + row * params.x_stride)",
        "static_cast<const T*>(params.x) + static_cast<int>(row * params.x_stride))",
        "tests/test_memory.py -k 'large and (2_31 or 2_32) and not rope and not swiglu'",
    ),
    Mutation(
        "cuda_int32_output_offset",
        "offsets of output rows wrap at 2^31",
        NORM,
        "static_cast<T*>(params.y) + row * params.cols)",
        "static_cast<T*>(params.y) + static_cast<int>(row * params.cols))",
        "tests/test_memory.py -k 'large and 2_32_elements_rms_norm'",
    ),
    Mutation(
        "cuda_ignored_stride",
        "rows of x are taken for contiguous",
        NORM,
        "static_cast<const T*>(params.x) + row * params.x_stride)",
        "static_cast<const T*>(params.x) + row * params.cols)",
        "tests/test_rms_norm.py -k 'layouts and cuda'",
    ),
    Mutation(
        "cuda_ignored_gradient_stride",
        "rows of grad_y are taken for contiguous",
        BACKWARD,
        "static_cast<const T*>(params.grad_y) + row * params.grad_y_stride)",
        "static_cast<const T*>(params.grad_y) + row * params.cols)",
        "tests/test_rms_norm.py -k 'gradients_that_autograd_makes and cuda'",
    ),
    Mutation(
        "cuda_dropped_tail",
        "what does not fill a block is left out",
        GLU,
        "const int64_t blocks_per_row = (params.cols + per_block - 1) / per_block;",
        "const int64_t blocks_per_row = params.cols < per_block ? 1 : params.cols / per_block;",
        "tests/test_memory.py tests/test_glu.py -k 'cuda and (every_output or forward_and_backward) and swiglu'",
    ),
    Mutation(
        "cuda_misaligned_vectors",
        "16-byte accesses whatever the alignment",
        "csrc/kernels/launch.h",
        "return is_aligned(pointer, 16) && (rows <= 1 || stride * element_bytes % 16 == 0);",
        "return (void)pointer, rows >= 0 && stride >= 0 && element_bytes > 0;",
        "tests/test_rms_norm.py -k 'layouts and cuda'",
    ),
    Mutation(
        "cuda_swapped_rounding",
        "multiplies by the weight before it rounds",
        NORM,
        "if (has_weight && !cast_before_weight) {",
        "if (has_weight) {",
        "tests/test_rms_norm.py -k 'rounding_order and cuda'",
    ),
    Mutation(
        "cuda_eps_outside_the_mean",
        "eps is added before the division by the row length",
        NORM,
        "rsqrtf(row_sum(squares, group, shared) * inverse_cols + eps)",
        "rsqrtf((row_sum(squares, group, shared) + eps) * inverse_cols)",
        "tests/test_rms_norm.py -k 'cuda and (variants or eps)'",
    ),
    Mutation(
        "cuda_ignored_grad_sum",
        "the gradient of the residual sum is lost",
        BACKWARD,
        "V::of([&](int i) { return grad(i) + extra[i]; })",
        "V::of(grad)",
        "tests/test_add_rms_norm.py -k 'forward_and_backward and cuda'",
    ),
    Mutation(
        "cuda_lost_last_partial",
        "the last partial sum of the weight's gradient is left out",
        BACKWARD,
        "row < params.partial_rows; row += 32",
        "row < params.partial_rows - 1; row += 32",
        "tests/test_rms_norm.py -k 'cuda and (forward_and_backward or many_rows)'",
    ),
    Mutation(
        "cuda_unrotated_kv_head",
        "the last key head is left as it was",
        ROPE,
        "half = params.rotary_dim / 2;\n  const int heads = static_cast<int>(params.q.heads",
        "half = params.rotary_dim / 2;\n  const int heads = static_cast<int>(-1 + params.q.heads",
        "tests/test_rope.py -k 'equals_eager and cuda'",
    ),
    Mutation(
        "cuda_sin_sign_in_backward",
        "the backward rotates forward",
        ROPE,
        "params.transposed ? 1.f : -1.f",
        "params.transposed ? -1.f : -1.f",
        "tests/test_rope.py -k 'equals_eager and cuda'",
    ),
    Mutation(
        "cuda_backward_not_transposed",
        "the backward takes sin from its own element of the pair",
        ROPE,
        "    sin_low = other_low;\n    sin_high = other_high;\n",
        "",
        "tests/test_rope.py -k 'equals_eager and cuda'",
    ),
    Mutation(
        "cuda_batched_angles_shared",
        "every batch entry is turned by the angles of the first",
        ROPE,
        "cos += b * params.cos_batch + t * params.cos_token;",
        "cos += t * params.cos_token;",
        "tests/test_rope.py -k 'per_batch and cuda'",
    ),
    Mutation(
        "cuda_unchecked_position",
        "positions outside the table read whatever is there",
        ROPE,
        "if (position < 0 || position >= params.table_rows) return false;",
        "",
        "tests/test_rope.py -k 'outside_the_table and cuda'",
    ),
    Mutation(
        "cuda_no_wait_for_predecessor",
        "programmatic dependent launch without the wait",
        "csrc/device/ptx.cuh",
        'asm volatile("griddepcontrol.wait;" ::: "memory");',
        "",
        "tests/test_execution.py -k 'overlapping_launches'  -m gpu",
    ),
    Mutation(
        "cuda_default_stream",
        "launches on the default stream instead of the current one",
        "csrc/torch/backend.h",
        "check_cuda(op, cuda(static_cast<cudaStream_t>(stream)));",
        "check_cuda(op, cuda(cudaStream_t{}));",
        "tests/test_execution.py -k 'side_stream or cuda_graph' -m gpu",
    ),
    Mutation(
        "cuda_fast_exponential",
        "an approximate exponential in the activation",
        GLU,
        "const float e = expf(-x);",
        "const float e = __expf(-x);",
        "tests/test_glu.py -k '(every_gate or equals_eager) and (cuda or gpu)'",
    ),
]

CPU_NORM, CPU_ROPE, CPU_GLU = "csrc/cpu/norm.cpp", "csrc/cpu/rope.cpp", "csrc/cpu/glu.cpp"

CPU = [
    Mutation(
        "cpu_skipped_reduction",
        "a row's sum of squares is that of its last block",
        CPU_NORM,
        "squares += sum_of<A>(count, [=](int64_t i) { return widen(v[i]) * widen(v[i]); });\n    });\n    const A rstd",
        "squares = sum_of<A>(count, [=](int64_t i) { return widen(v[i]) * widen(v[i]); });\n    });\n    const A rstd",
        "tests/test_rms_norm.py -k forward_and_backward",
    ),
    Mutation(
        "cpu_dropped_tail",
        "a row's last elements, which fill no vector, are not summed",
        CPU_NORM,
        "for (; i < count; ++i) lanes[0] += term(i);",
        "",
        "tests/test_rms_norm.py -k forward_and_backward",
    ),
    Mutation(
        "cpu_ignored_stride",
        "rows of residual are taken for contiguous",
        CPU_NORM,
        "static_cast<const T*>(p.residual) + row * p.residual_stride",
        "static_cast<const T*>(p.residual) + row * p.cols",
        "tests/test_add_rms_norm.py -k layouts",
    ),
    Mutation(
        "cpu_swapped_rounding",
        "multiplies by the weight before it rounds",
        CPU_NORM,
        "(cast_before_weight ? rounded<T>(n) : n) * (offset + widen(w[i]))",
        "(cast_before_weight ? n : n) * (offset + widen(w[i]))",
        "tests/test_rms_norm.py -k rounding_order",
    ),
    Mutation(
        "cpu_eps_outside_the_root",
        "eps is added to the root instead of under it",
        CPU_NORM,
        "std::sqrt(static_cast<double>(sum_of_squares) / static_cast<double>(cols) + eps)",
        "(std::sqrt(static_cast<double>(sum_of_squares) / static_cast<double>(cols)) + eps)",
        "tests/test_rms_norm.py -k 'variants or eps'",
    ),
    Mutation(
        "cpu_ignored_grad_sum",
        "the gradient of the residual sum is lost",
        CPU_NORM,
        "narrow<T>(rstd * (g - n * projection) + widen(ds[i]))",
        "narrow<T>(rstd * (g - n * projection) + 0 * widen(ds[i]))",
        "tests/test_add_rms_norm.py -k forward_and_backward",
    ),
    Mutation(
        "cpu_lost_last_partial",
        "the last partial sum of the weight's gradient is left out",
        CPU_NORM,
        "for (int64_t row = 0; row < p.partial_rows; ++row) {",
        "for (int64_t row = 0; row + 1 < p.partial_rows; ++row) {",
        "tests/test_rms_norm.py -k forward_and_backward",
    ),
    Mutation(
        "cpu_sin_sign_in_backward",
        "the backward rotates forward",
        CPU_ROPE,
        "p.transposed ? -sin_b : sin_a",
        "p.transposed ? sin_b : sin_a",
        "tests/test_rope.py -k gradcheck",
    ),
    Mutation(
        "cpu_unrotated_kv_head",
        "the last head of a tensor is left as it was",
        CPU_ROPE,
        "for (int64_t head = 0; head < x.heads; ++head, in += x.in_head, out += x.out_head) {\n    const auto from",
        "for (int64_t head = 0; head + 1 < x.heads; ++head, in += x.in_head, out += x.out_head) {\n    const auto from",
        "tests/test_rope.py -k equals_eager",
    ),
    Mutation(
        "cpu_single_rounding",
        "the activation is not rounded before the product",
        CPU_GLU,
        "narrow<T>(rounded<T>(Act::value(widen(g[i]), e[i])) * widen(u[i]))",
        "narrow<T>(Act::value(widen(g[i]), e[i]) * widen(u[i]))",
        "tests/test_glu.py -k rounds_where",
    ),
    Mutation(
        "ignored_irregular_strides",
        "rows that no single stride describes are taken as if one did",
        "csrc/torch/binding.h",
        "regular = regular && strides[i] == stride * rows;",
        "",
        "tests/test_rms_norm.py -k no_single_stride",
    ),
    Mutation(
        "unchecked_overlap",
        "tensors that overlap themselves are rotated in place",
        "csrc/torch/rope.cpp",
        "if (stride <= reach) return true;",
        "",
        "tests/test_rope.py -k errors",
    ),
    Mutation(
        "gradient_of_the_sum_not_passed_on",
        "autograd forgets one of two gradients",
        "llmkernels/ops/rms_norm.py",
        "grad_x, grad_weight = _gradients(ctx, grad_y, grad_sum)",
        "grad_x, grad_weight = _gradients(ctx, grad_y, None)",
        "tests/test_add_rms_norm.py -k gradcheck",
    ),
    Mutation(
        "frozen_weight_trained",
        "a weight that takes no gradient gets one computed",
        "llmkernels/ops/rms_norm.py",
        "ctx.needs_grad_weight = ctx.needs_input_grad[2]",
        "ctx.needs_grad_weight = not ctx.needs_input_grad[2]",
        "tests/test_add_rms_norm.py -k gradcheck",
    ),
    Mutation(
        "fake_of_another_shape",
        "the compiler is told another output shape",
        "llmkernels/ops/glu.py",
        "gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))",
        "gate_up.new_empty(gate_up.shape)",
        "tests/test_compile.py -k 'opcheck or meta'",
    ),
    Mutation(
        "cpu_attention_ignores_starts",
        "padding on the left is attended to",
        CPU_ATTENTION,
        "int64_t begin = p.starts != nullptr ? std::max<int64_t>(p.starts[b], 0) : 0;",
        "int64_t begin = 0;",
        "tests/test_decode_attention.py tests/test_decode_layer.py",
    ),
    Mutation(
        "cpu_attention_window_of_one_more",
        "a sliding window holds one key too many",
        CPU_ATTENTION,
        "begin = std::max(begin, end - p.window);",
        "begin = std::max(begin, end - p.window - 1);",
        "tests/test_decode_attention.py tests/test_decode_layer.py",
    ),
    Mutation(
        "cpu_attention_is_not_causal",
        "the first of several query tokens sees the last key",
        CPU_ATTENTION,
        "end = p.lengths[b] - p.tokens + t + 1;",
        "end = p.lengths[b];",
        "tests/test_decode_attention.py",
    ),
    Mutation(
        "cpu_attention_interleaves_kv_heads",
        "query heads take turns at the kv heads instead of sharing them in groups",
        CPU_ATTENTION,
        "kv_head = head / (p.heads / p.kv_heads), end",
        "kv_head = head % p.kv_heads, end",
        "tests/test_decode_attention.py",
    ),
    Mutation(
        "cpu_attention_forgets_to_rescale",
        "the sum of the weights is not scaled down when a larger score comes",
        CPU_ATTENTION,
        "        total *= shrink;\n",
        "",
        "tests/test_decode_attention.py",
    ),
    Mutation(
        "cpu_top_p_drops_the_crossing_token",
        "the token that crosses top-p is not kept",
        CPU_SAMPLING,
        "const bool keep = above < target;",
        "const bool keep = above + weights_[index] <= target;",
        "tests/test_sampling.py -k 'not vocab_152064'",
    ),
    Mutation(
        "cpu_min_p_is_ignored",
        "tokens below min_p are drawn",
        CPU_SAMPLING,
        "total += weight = weight >= least ? weight : 0;",
        "total += weight;",
        "tests/test_sampling.py",
    ),
    Mutation(
        "cpu_linear_forgets_the_bias",
        "PyTorch's linear is called without the bias",
        "csrc/torch/linear.cpp",
        'call<Tensor>("aten::linear", "", matrix, weight, bias);',
        'call<Tensor>("aten::linear", "", matrix, weight, std::optional<Tensor>());',
        "tests/test_linear.py -k 'forward and cpu'",
    ),
    Mutation(
        "cpu_step_skips_a_layer",
        "a decode step leaves out the first layer",
        "csrc/torch/decode.cpp",
        "for (size_t i = 0; i < step.layers(); ++i) {",
        "for (size_t i = 1; i < step.layers(); ++i) {",
        "tests/test_decode_step.py -k against_float64",
    ),
    Mutation(
        "cpu_step_shares_a_cache",
        "all layers of a decode step write to the values of the first",
        "csrc/torch/decode.cpp",
        "k_caches[i], v_caches[i], std::nullopt, heads",
        "k_caches[i], v_caches[0], std::nullopt, heads",
        "tests/test_decode_step.py -k against_float64",
    ),
    Mutation(
        "cpu_step_normalizes_by_another_weight",
        "the head takes the norm of the last layer",
        "csrc/torch/decode.cpp",
        "return rms_norm_linear(hidden, norm, head,",
        "return rms_norm_linear(hidden, post_norms.back(), head,",
        "tests/test_decode_step.py -k against_float64",
    ),
    Mutation(
        "py_graph_outlives_the_weights",
        "a graph is used again though the lists of the step hold other tensors",
        "llmkernels/hf/decode.py",
        "used += argument if isinstance(argument, list) else [argument]",
        "used += [] if isinstance(argument, list) else [argument]",
        "tests/test_generate.py -k bound_to_its_addresses",
    ),
    Mutation(
        "py_cache_is_filled_past_its_end",
        "one token more than the capacity is let in",
        "llmkernels/hf/cache.py",
        "        if needed <= self.capacity:\n            return\n",
        "        if needed <= self.capacity + 1:\n            return\n",
        "tests/test_kv_cache.py",
    ),
    Mutation(
        "py_step_does_not_advance",
        "every decode step writes to the same place of the cache",
        "llmkernels/hf/decode.py",
        "        self.cache.counters.add_(1)\n",
        "",
        "tests/test_generate.py -k greedy",
    ),
]

MUTATIONS = CUDA + CPU
