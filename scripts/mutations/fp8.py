"""Mutations of the quantization to FP8 and of its products."""

from .mutation import Mutation

ARITHMETIC, CPU_FP8, LINEAR = "csrc/fp8_arithmetic.h", "csrc/cpu/fp8.cpp", "csrc/torch/fp8_linear.cpp"
QUANTIZE, NORM = "csrc/kernels/quant/fp8_quantize.cu", "csrc/kernels/quant/rms_norm_fp8_quantize.cu"
TENSOR = "csrc/kernels/quant/fp8_quantize_tensor.cu"

FP8 = [
    Mutation(
        "cpu_fp8_zeros_have_no_scale",
        "the scale of zeros is 0, and their quotient NaN",
        ARITHMETIC,
        "quotient < kSmallest ? kSmallest : quotient",
        "quotient",
        "tests/test_fp8.py -k special_values",
    ),
    Mutation(
        "cpu_fp8_powers_of_two_are_rounded_down",
        "a scale as a power of two is too small, and large numbers saturate",
        ARITHMETIC,
        "(bits + 0x007fffffu) & 0xff800000u",
        "bits & 0xff800000u",
        "tests/test_fp8.py -k powers_of_two",
    ),
    Mutation(
        "cpu_fp8_ties_round_up",
        "what is halfway between two codes goes to the larger one",
        CPU_FP8,
        "(magnitude + almost_half + last_bit)",
        "(magnitude + almost_half + 1)",
        "tests/test_fp8.py -k every_code",
    ),
    Mutation(
        "cpu_fp8_subnormals_are_flushed",
        "what is smaller than a normal number of FP8 becomes zero",
        CPU_FP8,
        "magnitude < F::kSmallestNormal ? subnormal : normal",
        "magnitude < F::kSmallestNormal ? 0 * subnormal : normal",
        "tests/test_fp8.py -k every_code",
    ),
    Mutation(
        "cpu_fp8_nan_is_missing",
        "a NaN in a row is quantized to the largest number",
        CPU_FP8,
        "code = given > 0x7f800000 ? 0x7f : code;",
        "",
        "tests/test_fp8.py -k special_values",
    ),
    Mutation(
        "cpu_fp8_ignored_stride",
        "rows of x are taken for contiguous",
        CPU_FP8,
        "static_cast<const T*>(p.x) + row * p.x_stride;",
        "static_cast<const T*>(p.x) + row * p.out.cols;",
        "tests/test_fp8.py -k 'test_layouts'",
    ),
    Mutation(
        "cpu_fp8_linear_scales_of_the_first_part",
        "every part of the weight has the scales of the first",
        LINEAR,
        "floats(f.weight_scale) + begin;",
        "floats(f.weight_scale);",
        "tests/test_fp8_linear.py -k 'test_linear and cpu'",
    ),
    Mutation(
        "cuda_fp8_int32_offset",
        "offsets of the codes wrap at 2^31",
        QUANTIZE,
        "target = group.row * params.out.cols + first;",
        "target = static_cast<int>(group.row * params.out.cols) + first;",
        "tests/test_fp8.py -k more_than",
    ),
    Mutation(
        "cuda_fp8_maximum_of_a_warp",
        "a row's maximum is that of the threads of one warp",
        QUANTIZE,
        "scale_of(group_max_nan(amax, group.threads, shared), params.out);\n"
        "  if (group.threads.rank == 0 && count > 0)",
        "scale_of(warp_max_nan(amax, min(32, group.threads.threads)), params.out);\n"
        "  if (group.threads.rank == 0 && count > 0)",
        "tests/test_fp8.py -k 'equals_the_cast and cuda'",
    ),
    Mutation(
        "cuda_fp8_blocks_of_a_warp",
        "behind RMSNorm, blocks share the maximum of all lanes of a warp",
        NORM,
        "warp_max_nan(amax[v], kLanes)",
        "warp_max_nan(amax[v], 32)",
        "tests/test_fp8.py -k 'behind_rms_norm and cuda'",
    ),
    Mutation(
        "cuda_fp8_maximum_of_one_block",
        "the scale of a tensor is that of the first block's elements",
        TENSOR,
        "for (int i = threadIdx.x; i < count; i += kThreads) amax",
        "for (int i = threadIdx.x; i < 1; i += kThreads) amax",
        "tests/test_fp8.py -k 'row_lengths and cuda'",
    ),
]
