"""Linear of a weight in int8 with a scale per row, for few tokens: every call has a weight of its own.

`narrow` is the same weight as bfloat16, which cuBLAS multiplies: twice the bytes.
"""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, plain
from benchmarks.ops.linear import QWEN_SHAPES, tokens

FEW_TOKENS = (1, 4, 16)


def eager(weight, scale, narrow_scale, narrow, x):
    return F.linear(x, (weight.float() * scale[:, None]).to(x.dtype))


def int8pack(weight, scale, narrow_scale, narrow, x):
    """torch's own product of such a weight; its scales have the dtype of x."""
    return torch._weight_int8pack_mm(x, weight, narrow_scale)


def ours():
    from llmkernels import int8_linear

    return lambda weight, scale, narrow_scale, narrow, x: int8_linear(x, weight, scale)


def sm80():
    """The kernel for more tokens, of one as well."""
    import ctypes

    from llmkernels import _library

    force = ctypes.CDLL(str(_library.PATH)).llmk_force_linear_sm80
    call = ours()

    def forced(*inputs):
        force(1)
        try:
            return call(*inputs)
        finally:
            force(0)

    return forced


def has_int8pack():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return hasattr(torch, "_weight_int8pack_mm") and has_kernel("aten::_weight_int8pack_mm", "CUDA")


def providers(case):
    found = {"cublas": plain(lambda weight, scale, narrow_scale, narrow, x: F.linear(x, narrow))}
    if has_int8pack():
        found["torch"] = plain(int8pack)
    found["llmkernels"] = Provider(ours)
    return {**found, "llmkernels_sm80": Provider(sm80)} if case.keys["m"] == 1 else found


def case(m, n, k):
    moved = n * k + 4 * n + 2 * (m * k + m * n)
    return Case(
        "int8_linear", {"m": m, "n": n, "k": k}, torch.bfloat16, moved, "fwd", (n, m) == (3584, 1), 2 * m * n * k
    )


def weights(case, device):
    from llmkernels import int8_quantize

    n, k = case.keys["n"], case.keys["k"]
    narrow = torch.randn(n, k, dtype=case.dtype, device=device).mul_(k**-0.5)
    weight, scale = int8_quantize(narrow)
    return weight, scale, scale.to(case.dtype), (weight * scale[:, None]).to(case.dtype)


LINEAR = Op(
    name="int8_linear",
    cases=tuple(case(m, n, k) for n, k in QWEN_SHAPES for m in FEW_TOKENS),
    inputs=weights,
    shared=tokens,
    eager=eager,
    providers=providers,
    differentiable=0,
)
