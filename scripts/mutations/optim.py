"""Mutations of the optimizers, on both devices."""

from .mutation import Mutation

ADAM, NORM, LIST = (f"csrc/kernels/optim/{name}" for name in ("adam.cu", "grad_norm.cu", "list.cuh"))
ARITHMETIC, PYTHON = "csrc/optim_arithmetic.h", "llmkernels/optim/adam.py"

OPTIM = [
    Mutation(
        "cpu_adam_without_bias_correction",
        "the root of the second moment is not corrected",
        ARITHMETIC,
        "root(largest) * bias_factor + eps",
        "root(largest) + eps",
        "tests/test_optim.py -k 'float64_is_as_torch'",
    ),
    Mutation(
        "cpu_adam_repeats_random_numbers",
        "tensors of a list get the same random numbers",
        ARITHMETIC,
        "index << 44 | static_cast<uint64_t>(i)",
        "index * 0 | static_cast<uint64_t>(i)",
        "tests/test_optim.py -k 'stochastic'",
    ),
    Mutation(
        "cpu_adam_draws_alike_in_every_step",
        "the random numbers of a parameter do not depend on its step",
        ARITHMETIC,
        "sampling::random_bits(seed, step, ",
        "sampling::random_bits(seed, 0, ",
        "tests/test_optim.py -k 'stochastic'",
    ),
    Mutation(
        "cpu_adam_clips_scaled_gradients",
        "the norm is compared before the scale is taken off",
        ARITHMETIC,
        "static_cast<A>(*grad_norm) * unscale",
        "static_cast<A>(*grad_norm)",
        "tests/test_optim.py -k 'scaled_gradients'",
    ),
    Mutation(
        "py_adam_rounds_loaded_moments",
        "loaded moments have the dtype of the parameter",
        PYTHON,
        "for name in _STATE if saved and own else ():",
        "for name in ():",
        "tests/test_optim_state.py -k 'moments_keep'",
    ),
    Mutation(
        "cuda_adam_int32_offset",
        "a block's first element is counted in 32 bits",
        LIST,
        "(static_cast<int64_t>(blockIdx.x) - first_block) * chunk;",
        "static_cast<int>((static_cast<int64_t>(blockIdx.x) - first_block) * chunk);",
        "tests/test_optim.py -k 'more_than'",
    ),
    Mutation(
        "cuda_adam_dropped_tail",
        "elements that fill no vector are not updated",
        ADAM,
        "for (i = middle + threadIdx.x; i < chunk.end; i += kListThreads) {",
        "for (i = middle + threadIdx.x; i < middle; i += kListThreads) {",
        "tests/test_optim.py -k 'sizes_and_alignments and cuda'",
    ),
    Mutation(
        "cuda_adam_lets_the_next_kernel_start_early",
        "a linear of a decode step reads parameters that are about to be written",
        ADAM,
        "  pdl_wait();\n",
        "  pdl_launch_dependents();\n  pdl_wait();\n",
        "tests/test_early_start.py -k weights_of_an_optimizer",
    ),
    Mutation(
        "cuda_adam_counter_is_not_reset",
        "no block of the next step is the last one",
        ADAM,
        "if (threadIdx.x == 0) *launch.counter = 0;",
        "",
        "tests/test_optim.py -k 'lists_of_any_length and cuda'",
    ),
    Mutation(
        "cuda_grad_norm_of_one_launch",
        "every launch writes the first partial sums",
        NORM,
        "float* const into = params.partials + partials;",
        "float* const into = params.partials;",
        "tests/test_clip_grad.py -k 'lists_of_any_length and cuda'",
    ),
]
