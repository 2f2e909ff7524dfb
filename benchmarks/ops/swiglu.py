"""SwiGLU: y = silu(gate) * up, from two tensors or from one packed [gate | up]."""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain


def eager(gate, up):
    return F.silu(gate) * up


def eager_packed(gate_up):
    return eager(*gate_up.chunk(2, -1))


def triton_forward():
    from benchmarks.triton_kernels import glu

    return lambda *inputs: glu(*inputs, activation="silu")


def triton_backward():
    from benchmarks.triton_kernels import glu_backward

    return lambda grads, outputs, gate, up: glu_backward(grads[0], gate, up, activation="silu")


def liger():
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


def liger_packed():
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply


def ours():
    from llmkernels import swiglu

    return swiglu


def providers(case):
    packed = case.keys["packed"]
    formula = eager_packed if packed else eager
    return {
        "eager": plain(formula),
        "compile": compiled(formula),
        "triton": Provider(triton_forward, triton_backward),
        # Its backward writes the gradients over gate and up.
        "liger": Provider(liger_packed if packed else liger, mutates=("bwd",)),
        "llmkernels": Provider(ours),
    }


def inputs(case, device):
    rows, cols, packed = (case.keys[key] for key in ("rows", "cols", "packed"))
    widths = (2 * cols,) if packed else (cols, cols)
    return tuple(torch.randn(rows, width, dtype=case.dtype, device=device) for width in widths)


def case(op, rows, cols, direction="fwd", packed=False, quick=False):
    dtype = torch.bfloat16
    moved = (3 if direction == "fwd" else 5) * rows * cols * dtype.itemsize
    return Case(op, {"rows": rows, "cols": cols, "packed": packed}, dtype, moved, direction, quick)


OP = Op(
    name="swiglu",
    cases=(
        *(case("swiglu", 2048, cols, quick=cols == 18944) for cols in (4096, 8192, 11008, 14336, 18944)),
        case("swiglu", 4096, 18944, packed=True),
        case("swiglu", 2048, 18944, "bwd", quick=True),
    ),
    inputs=inputs,
    eager=lambda *inputs: eager(*inputs) if len(inputs) == 2 else eager_packed(*inputs),
    providers=providers,
    differentiable=2,
)
