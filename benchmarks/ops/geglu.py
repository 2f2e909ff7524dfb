"""GEGLU: y = gelu(gate) * up, the tanh approximation."""

from functools import partial

import torch.nn.functional as F

from benchmarks.cases import Op, Provider, compiled, plain
from benchmarks.ops import swiglu


def eager(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def triton_forward():
    from benchmarks.triton_kernels import glu

    return lambda gate, up: glu(gate, up, activation="gelu")


def triton_backward():
    from benchmarks.triton_kernels import glu_backward

    return lambda grads, outputs, gate, up: glu_backward(grads[0], gate, up, activation="gelu")


def liger():
    from liger_kernel.ops import LigerGELUMulFunction

    return LigerGELUMulFunction.apply


def ours():
    from llmkernels import geglu

    return partial(geglu, approximate="tanh")


def providers(case):
    return {
        "eager": plain(eager),
        "compile": compiled(eager),
        "triton": Provider(triton_forward, triton_backward),
        "liger": Provider(liger, mutates=("bwd",)),
        "llmkernels": Provider(ours),
    }


OP = Op(
    name="geglu",
    cases=(swiglu.case("geglu", 2048, 18944, quick=True), swiglu.case("geglu", 2048, 18944, "bwd")),
    inputs=swiglu.inputs,
    eager=eager,
    providers=providers,
    differentiable=2,
)
