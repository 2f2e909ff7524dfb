"""Residual add and RMSNorm: sum = x + residual, y = rms_norm(sum); both are returned."""

import torch

from benchmarks.cases import Case, Op, Provider, compiled, plain
from benchmarks.ops import rms_norm
from benchmarks.ops.rms_norm import EPS


def eager(x, residual, weight):
    total = x + residual
    return rms_norm.eager(total, weight), total


def fused(x, residual, weight):
    total = x + residual
    return rms_norm.fused(total, weight), total


def triton_forward():
    from benchmarks.triton_kernels import add_rms_norm

    return lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS)


def triton_backward():
    from benchmarks.triton_kernels import rms_norm_backward

    def backward(grads, outputs, x, residual, weight):
        grad_sum, grad_weight = rms_norm_backward(grads[0], grads[1], outputs[1], weight, EPS)
        return grad_sum, grad_sum, grad_weight

    return backward


def liger():
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", True)


def ours():
    from llmkernels import add_rms_norm

    return lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS)


def providers(case):
    return {
        "eager": plain(eager),
        "torch": plain(fused),
        "compile": compiled(eager),
        "triton": Provider(triton_forward, triton_backward),
        "liger": Provider(liger, mutates=("bwd",)),
        "llmkernels": Provider(ours),
    }


def case(rows, cols, dtype, direction="fwd", quick=False):
    moved = (4 * rows + (1 if direction == "fwd" else 2)) * cols * dtype.itemsize
    return Case("add_rms_norm", {"rows": rows, "cols": cols}, dtype, moved, direction, quick)


OP = Op(
    name="add_rms_norm",
    cases=(
        case(1, 3584, torch.bfloat16, quick=True),
        case(2048, 3584, torch.bfloat16, quick=True),
        case(16384, 3584, torch.bfloat16),
        case(2048, 3584, torch.bfloat16, "bwd", quick=True),
        case(16384, 3584, torch.bfloat16, "bwd"),
    ),
    inputs=lambda case, device: tuple(
        torch.randn(case.keys["rows"], case.keys["cols"], dtype=case.dtype, device=device) for _ in range(2)
    ),
    shared=rms_norm.OP.shared,
    eager=eager,
    providers=providers,
    differentiable=3,
)
