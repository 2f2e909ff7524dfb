"""Linear, y = x W^T, and the same behind an RMSNorm: every call has a weight of its own."""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain
from benchmarks.ops import rms_norm

QWEN_SHAPES = (
    (37888, 3584),
    (3584, 18944),
    (4608, 3584),
    (3584, 3584),
    (152064, 3584),
)  # gate|up, down, q|k|v, o, head
FEW_TOKENS = (1, 2, 4, 8, 16, 32, 64)
SMALL_SHAPES = ((896, 4864), (896, 896))  # down and o of Qwen2.5-0.5B
SIZES = (
    *((m, n, k) for n, k in QWEN_SHAPES for m in FEW_TOKENS),
    *((2048, n, k) for n, k in QWEN_SHAPES[:4]),
    *((m, n, k) for n, k in SMALL_SHAPES for m in (24, 48)),
)
NORM_TOKENS = (1, 4, 16, 64, 65, 128, 256, 512, 1024, 2048, 4096, 8192)


def cublas(weight, x):
    return F.linear(x, weight)


def in_step(case):
    """Whether the op is called as a decode step does. For more rows a step hands the norm over from one linear to the
    next, so that one alone is not a part of it: there the op is called as anyone does, and may take cuBLAS."""
    return case.keys["m"] <= 16


def ours(case):
    import llmkernels  # noqa: F401, the ops

    op = partial(torch.ops.llmkernels.linear, in_step=in_step(case))
    return lambda weight, x: op(x, weight)


def sm80(case):
    """The kernel of GPUs without TMA."""
    import ctypes

    from llmkernels import _library

    force = ctypes.CDLL(str(_library.PATH)).llmk_force_linear_sm80
    call = ours(case)

    def forced(weight, x):
        force(1)
        try:
            return call(weight, x)
        finally:
            force(0)

    return forced


def providers(case):
    found = {"cublas": plain(cublas), "llmkernels": Provider(partial(ours, case))}
    return {**found, "llmkernels_sm80": Provider(partial(sm80, case))} if case.keys["m"] <= 16 else found


def norm_eager(weight, x, norm_weight):
    return F.linear(rms_norm.eager(x, norm_weight), weight)


def norm_torch(weight, x, norm_weight):
    return F.linear(rms_norm.fused(x, norm_weight), weight)


def norm_ours(case):
    import llmkernels  # noqa: F401, the ops

    op = partial(torch.ops.llmkernels.rms_norm_linear, eps=rms_norm.EPS, in_step=in_step(case))
    return lambda weight, x, norm_weight: op(x, norm_weight, weight)


def case(op, m, n, k, chained=False):
    keys = {"m": m, "n": n, "k": k, **({"chained": True} if chained else {})}
    moved = (n * k + m * k + m * n) * 2
    return Case(op, keys, torch.bfloat16, moved, quick=(n, m) == (3584, 1), flops=2 * m * n * k)


def weight(case, device):
    keys = case.keys
    return (torch.randn(keys["n"], keys["k"], dtype=case.dtype, device=device).mul_(keys["k"] ** -0.5),)


def tokens(case, device):
    return (torch.randn(case.keys["m"], case.keys["k"], dtype=case.dtype, device=device),)


LINEAR = Op(
    name="linear",
    cases=tuple(case("linear", *size, chained=True) for size in SIZES),
    inputs=weight,
    shared=tokens,
    eager=cublas,
    providers=providers,
    differentiable=2,
)

RMS_NORM_LINEAR = Op(
    name="rms_norm_linear",
    cases=tuple(case("rms_norm_linear", m, 18944, 3584) for m in NORM_TOKENS),
    inputs=weight,
    shared=lambda case, device: (*tokens(case, device), *rms_norm.weight(case.keys["k"], case.dtype, device)),
    eager=norm_eager,
    providers=lambda case: {
        "eager": plain(norm_eager),
        "torch": plain(norm_torch),
        "compile": compiled(norm_eager),
        "cublas": plain(lambda weight, x, norm_weight: F.linear(x, weight), approximate=True),
        "llmkernels": Provider(partial(norm_ours, case)),
    },
    differentiable=3,
)
