"""QK-norm and rotary embedding: every head of q and k normalized as Qwen3 does it, then rotated, in Hugging Face's
layout: (B, H, T, D) views of (B, T, H, D) memory."""

from functools import partial

import torch

from benchmarks.cases import Case, Op, Provider, compiled, plain
from benchmarks.ops import rope

EPS = 1e-6


def norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def eager(q, k, q_weight, k_weight, cos, sin):
    return rope.eager(norm(q, q_weight), norm(k, k_weight), cos, sin)


def liger():
    """Its norm for q, its norm for k, and its rotation, which writes over what the norms return."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction

    def call(q, k, q_weight, k_weight, cos, sin):
        q, k = (
            LigerRMSNormFunction.apply(x.transpose(1, 2), weight, EPS, 0.0, "llama", False, None).transpose(1, 2)
            for x, weight in ((q, q_weight), (k, k_weight))
        )
        return LigerRopeFunction.apply(q, k, cos, sin)

    return call


def ours():
    from llmkernels import rms_norm_rope

    return partial(rms_norm_rope, eps=EPS, layout="bhtd")


def ours_in_place():
    from llmkernels import rms_norm_rope

    return partial(rms_norm_rope, eps=EPS, layout="bhtd", inplace=True)


def providers(case):
    if case.keys["in_place"]:
        return {"llmkernels": Provider(ours_in_place, mutates=("fwd",))}
    return {
        "eager": plain(eager),
        "compile": compiled(eager),
        "liger": Provider(liger, mutates=("bwd",)),
        "llmkernels": Provider(ours),
    }


def weights_and_angles(case, device):
    weights = (torch.rand(rope.HEAD_DIM, dtype=case.dtype, device=device) + 0.5 for _ in range(2))
    return *weights, *rope.cos_sin(case, device)


def case(tokens, heads=32, kv_heads=8, direction="fwd", in_place=False, quick=False):
    keys = {"batch": 1, "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": rope.HEAD_DIM}
    dtype = torch.bfloat16
    passes = 3 if direction == "bwd" else 2  # cos and sin, 1-3% of that, left out
    moved = passes * tokens * (heads + kv_heads) * rope.HEAD_DIM * dtype.itemsize
    return Case("rms_norm_rope", {**keys, "in_place": in_place}, dtype, moved, direction, quick)


OP = Op(
    name="rms_norm_rope",
    cases=(
        *(case(tokens, quick=tokens == 2048) for tokens in (512, 2048, 8192)),
        case(2048, in_place=True),
        case(2048, direction="bwd", quick=True),
        case(8192, direction="bwd"),
    ),
    inputs=rope.inputs,
    shared=weights_and_angles,
    eager=eager,
    providers=providers,
    differentiable=4,
)
