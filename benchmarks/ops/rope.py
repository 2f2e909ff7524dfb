"""Rotary embedding of q and k, half-split, in Hugging Face's layout: (B, H, T, D) views of (B, T, H, D) memory."""

from functools import partial

import torch

from benchmarks.cases import Case, Op, Provider, compiled, plain

HEAD_DIM = 128
BASE = 1e6


def rotated_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def eager(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotated_half(q) * sin, k * cos + rotated_half(k) * sin


def triton_forward():
    from benchmarks.triton_kernels import rope

    return rope


def triton_backward():
    from benchmarks.triton_kernels import rope

    # The inverse of a rotation is the rotation by the negative angle.
    return lambda grads, outputs, q, k, cos, sin: rope(*grads, cos, sin, inverse=True)


def liger():
    from liger_kernel.ops import LigerRopeFunction

    return lambda q, k, cos, sin: LigerRopeFunction.apply(q, k, cos, sin)


def ours():
    from llmkernels import rope

    return partial(rope, layout="bhtd")


def ours_in_place():
    from llmkernels import rope

    return lambda q, k, cos, sin: rope(q, k, cos, sin, layout="bhtd", inplace=True)


def providers(case):
    # Liger's rotation always writes over q and k. It moves the same bytes, so it is also shown beside the others.
    liger_in_place = Provider(liger, mutates=("fwd", "bwd"))
    if case.keys["in_place"]:
        return {"liger": liger_in_place, "llmkernels": Provider(ours_in_place, mutates=("fwd",))}
    return {
        "eager": plain(eager),
        "compile": compiled(eager),
        "triton": Provider(triton_forward, triton_backward),
        "liger": liger_in_place,
        "llmkernels": Provider(ours),
    }


def inputs(case, device):
    keys = case.keys
    return tuple(
        torch.randn(1, keys["tokens"], heads, HEAD_DIM, dtype=case.dtype, device=device).transpose(1, 2)
        for heads in (keys["heads"], keys["kv_heads"])
    )


def cos_sin(case, device):
    frequencies = BASE ** -(torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.arange(case.keys["tokens"], device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos().to(case.dtype), angles.sin().to(case.dtype)


def case(tokens, heads=32, kv_heads=32, direction="fwd", in_place=False, quick=False):
    keys = {"batch": 1, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM}
    dtype = torch.bfloat16
    moved = 2 * tokens * (heads + kv_heads) * HEAD_DIM * dtype.itemsize  # cos and sin, 1-3% of that, left out
    return Case("rope", {**keys, "in_place": in_place}, dtype, moved, direction, quick)


OP = Op(
    name="rope",
    cases=(
        *(case(tokens, quick=tokens == 2048) for tokens in (512, 1024, 2048, 4096, 8192)),
        case(8192, kv_heads=8),
        case(2048, in_place=True),
        case(8192, kv_heads=8, in_place=True),
        case(2048, direction="bwd", quick=True),
        case(8192, kv_heads=8, direction="bwd"),
    ),
    inputs=inputs,
    shared=cos_sin,
    eager=eager,
    providers=providers,
    differentiable=2,
)
