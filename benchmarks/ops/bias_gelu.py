"""Bias and GELU: y = gelu(x + bias), the tanh approximation."""

from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain


def eager(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def ours():
    from llmkernels import bias_gelu

    return partial(bias_gelu, approximate="tanh")


def providers(case):
    return {"eager": plain(eager), "compile": compiled(eager), "llmkernels": Provider(ours)}


def case(rows, cols, direction="fwd", quick=False):
    dtype = torch.bfloat16
    matrices, vectors = (2, 1) if direction == "fwd" else (3, 2)
    moved = (matrices * rows + vectors) * cols * dtype.itemsize
    return Case("bias_gelu", {"rows": rows, "cols": cols}, dtype, moved, direction, quick)


OP = Op(
    name="bias_gelu",
    cases=(
        *(case(2048, cols, quick=cols == 16384) for cols in (3072, 16384)),
        *(case(2048, cols, "bwd") for cols in (3072, 16384)),
    ),
    inputs=lambda case, device: (torch.randn(case.keys["rows"], case.keys["cols"], dtype=case.dtype, device=device),),
    shared=lambda case, device: (torch.randn(case.keys["cols"], dtype=case.dtype, device=device),),
    eager=eager,
    providers=providers,
    differentiable=2,
)
