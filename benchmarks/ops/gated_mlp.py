"""Gated MLP: y = (silu(g) u) Wd^T with [g | u] = x W^T. Every call has weights of its own."""

import torch
import torch.nn.functional as F

from benchmarks.cases import Case, Op, Provider, compiled, plain
from benchmarks.ops import swiglu

QWEN = {"7b": (18944, 3584), "0.5b": (4864, 896)}  # intermediate, hidden
TOKENS = {"7b": (1, 16, 64, 65, 128, 256, 512, 1024, 2048, 4096, 8192), "0.5b": (1, 2048)}


def eager(gate_up_weight, down_weight, x):
    gate, up = F.linear(x, gate_up_weight).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down_weight)


def liger():
    glu = swiglu.liger_packed()
    return lambda gate_up_weight, down_weight, x: F.linear(glu(F.linear(x, gate_up_weight)), down_weight)


def ours():
    from llmkernels import gated_mlp

    return lambda gate_up_weight, down_weight, x: gated_mlp(x, gate_up_weight, down_weight)


def providers(case):
    return {
        "eager": plain(eager),
        "compile": compiled(eager),
        # Its backward writes over what the forward saved, so of the runs that are timed only the first one is right.
        "liger": Provider(liger, approximate=case.direction == "bwd"),
        "llmkernels": Provider(ours),
    }


def case(m, n, k, direction="fwd"):
    """`n` is the intermediate size. Moved: weights, x and y, and in the backward their gradients and the saved [g | u];
    what lies between the products may stay in the cache."""
    weights, rows = 3 * n * k, 2 * m * k
    moved = 2 * (weights + rows) if direction == "fwd" else 2 * (2 * weights + 3 * rows // 2 + 2 * m * n)
    flops = (2 if direction == "fwd" else 4) * m * weights
    quick = (m, n) == (1, QWEN["0.5b"][0])
    return Case("gated_mlp", {"m": m, "n": n, "k": k}, torch.bfloat16, moved, direction, quick, flops)


def inputs(case, device):
    n, k = case.keys["n"], case.keys["k"]
    shapes = ((2 * n, k), (k, n))
    return tuple(torch.randn(shape, dtype=case.dtype, device=device).mul_(shape[1] ** -0.5) for shape in shapes)


OP = Op(
    name="gated_mlp",
    cases=(
        *(case(m, *QWEN[model]) for model, tokens in TOKENS.items() for m in tokens),
        *(case(2048, *shape, "bwd") for shape in QWEN.values()),
    ),
    inputs=inputs,
    shared=lambda case, device: (torch.randn(case.keys["m"], case.keys["k"], dtype=case.dtype, device=device),),
    eager=eager,
    providers=providers,
    differentiable=3,
)
