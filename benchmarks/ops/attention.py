"""Attention over a prompt, causal, and its gradients."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case, Op, Provider, plain

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128
SIZES = ((1, 512), (1, 2048), (1, 4096), (1, 8192), (4, 2048))


def eager(q, k, v):
    """softmax(q k^T / sqrt(D)) v with every key head given to its group of query heads, q (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))))
    scores = q @ k.transpose(2, 3) * HEAD_DIM**-0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, float("-inf"))
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def sdpa(backend, q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def ours():
    from llmkernels import attention

    return partial(attention, causal=True)


def providers(case):
    return {
        "eager": plain(eager),
        "cudnn": plain(partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
        "flash": plain(partial(sdpa, SDPBackend.FLASH_ATTENTION)),
        "llmkernels": Provider(ours),
    }


def inputs(case, device):
    """Slices of a packed projection, as a model has them."""
    shape = case.keys["batch"], case.keys["tokens"], HEADS + 2 * KV_HEADS, HEAD_DIM
    return torch.randn(shape, dtype=case.dtype, device=device).split((HEADS, KV_HEADS, KV_HEADS), 2)


def case(batch, tokens, direction="fwd"):
    keys = {"batch": batch, "tokens": tokens, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    moved = 2 * batch * tokens * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    flops = 4 * batch * HEADS * HEAD_DIM * (tokens * (tokens + 1) // 2)  # of the keys that are seen
    if direction == "bwd":  # q, k, v, y and its gradient in, three gradients out; five products, the scores once more
        moved, flops = 2 * moved, flops * 5 // 2
    return Case("attention", keys, torch.bfloat16, moved, direction, (batch, tokens) == (1, 512), flops)


OP = Op(
    name="attention",
    cases=tuple(case(*size, direction) for direction in ("fwd", "bwd") for size in SIZES),
    inputs=inputs,
    eager=eager,
    providers=providers,
    differentiable=3,
)
