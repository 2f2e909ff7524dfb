"""LayerNorm: y = (x - mean(x)) / std(x) * weight + bias."""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain
from benchmarks.ops import rms_norm

EPS = 1e-5


def eager(x, weight, bias):
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    normalized = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + EPS)
    return (normalized * weight.float() + bias.float()).to(x.dtype)


def fused(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def liger():
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def ours():
    from llmkernels import layer_norm

    return lambda x, weight, bias: layer_norm(x, weight, bias, EPS)


def providers(case):
    return {
        "eager": plain(eager),
        "torch": plain(fused),
        "compile": compiled(eager),
        "liger": Provider(liger),
        "llmkernels": Provider(ours),
    }


def parameters(case, device):
    bias = torch.randn(case.keys["cols"], dtype=case.dtype, device=device) / 16
    return *rms_norm.weight(case.keys["cols"], case.dtype, device), bias


def case(rows, cols, dtype, direction="fwd", quick=False):
    passes_over_x, vectors = (2, 2) if direction == "fwd" else (3, 3)
    moved = (passes_over_x * rows + vectors) * cols * dtype.itemsize
    return Case("layer_norm", {"rows": rows, "cols": cols}, dtype, moved, direction, quick)


OP = Op(
    name="layer_norm",
    cases=(
        case(1, 3584, torch.bfloat16),
        *(case(2048, cols, torch.bfloat16, quick=cols == 768) for cols in (768, 3584)),
        case(16384, 3584, torch.bfloat16),
        *(case(2048, cols, torch.bfloat16, "bwd", quick=cols == 768) for cols in (768, 3584)),
        case(16384, 3584, torch.bfloat16, "bwd"),
    ),
    inputs=lambda case, device: (torch.randn(case.keys["rows"], case.keys["cols"], dtype=case.dtype, device=device),),
    shared=parameters,
    eager=eager,
    providers=providers,
    differentiable=3,
)
