"""Softmax over the last dimension."""

import torch

from benchmarks.cases import Case, Op, Provider, compiled, plain


def eager(x):
    """In float32, rounded once, as eager PyTorch computes it."""
    return torch.softmax(x, -1)


def written_out(x):
    """What torch.compile gets: it leaves a single op of PyTorch as it is."""
    wide = x.float()
    e = torch.exp(wide - wide.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def liger():
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def ours():
    from llmkernels import softmax

    return softmax


def providers(case):
    return {
        "eager": plain(eager),
        "compile": compiled(written_out),
        "liger": Provider(liger),
        "llmkernels": Provider(ours),
    }


def case(rows, cols, dtype, direction="fwd", quick=False):
    passes = 2 if direction == "fwd" else 3
    return Case("softmax", {"rows": rows, "cols": cols}, dtype, passes * rows * cols * dtype.itemsize, direction, quick)


OP = Op(
    name="softmax",
    cases=(
        case(2048, 4096, torch.float32, quick=True),
        case(16384, 32768, torch.float32),
        case(16384, 131072, torch.float32),
        case(8192, 32768, torch.bfloat16),
        case(2048, 4096, torch.float32, "bwd", quick=True),
        case(8192, 32768, torch.bfloat16, "bwd"),
    ),
    inputs=lambda case, device: (torch.randn(case.keys["rows"], case.keys["cols"], dtype=case.dtype, device=device),),
    eager=eager,
    providers=providers,
    differentiable=1,
)
