"""Attention over a prompt, and its gradients."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case, Op, Provider, plain

QWEN, MANY, SMALL = (28, 4, 128), (32, 32, 128), (14, 2, 64)  # heads, kv_heads, head_dim
CAUSAL, FULL = True, False
FORWARD = (
    *((1, tokens, *QWEN, CAUSAL) for tokens in (512, 1024, 2048, 4096, 8192, 16384)),
    (4, 2048, *QWEN, CAUSAL),
    (1, 16384, *MANY, FULL),
    (1, 8192, *SMALL, CAUSAL),
)
BACKWARD = (*((1, tokens, *QWEN, CAUSAL) for tokens in (512, 2048, 4096, 8192)), (4, 2048, *QWEN, CAUSAL))
BLOCK = 1024


def eager(q, k, v, causal=True):
    """softmax(q k^T / sqrt(D)) v with every key head given to its group of query heads, q (B, T, H, D)."""
    return eager_behind(q, k, v, 0 if causal else None)


def eager_behind(q, k, v, past):
    """With `past` keys before that of the first query; None: no query is masked."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, *(x.repeat_interleave(group, 2) for x in (k, v))))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if past is not None:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1 + past)
        scores = scores.masked_fill(later, float("-inf"))
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def by_blocks(q, k, v, causal):
    """The same for blocks of queries, each with the keys that it sees: the scores of all would take too much memory."""
    found = []
    for start in range(0, q.shape[1], BLOCK):
        rows = slice(start, start + BLOCK)
        keys = slice(0, start + BLOCK if causal else None)
        found.append(eager_behind(q[:, rows], k[:, keys], v[:, keys], start if causal else None))
    return torch.cat(found, 1)


def sdpa(backend, causal, q, k, v):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)


def ours(causal):
    from llmkernels import attention

    return partial(attention, causal=causal)


def providers(case):
    causal = case.keys["causal"]
    return {
        "eager": plain(partial(eager, causal=causal)),  # of 16384 tokens it takes 75 GiB
        "cudnn": plain(partial(sdpa, SDPBackend.CUDNN_ATTENTION, causal)),
        "flash": plain(partial(sdpa, SDPBackend.FLASH_ATTENTION, causal)),
        "llmkernels": Provider(partial(ours, causal)),
    }


def inputs(case, device):
    """Slices of a packed projection, as a model has them."""
    keys = case.keys
    heads = keys["heads"], keys["kv_heads"], keys["kv_heads"]
    shape = keys["batch"], keys["tokens"], sum(heads), keys["head_dim"]
    return torch.randn(shape, dtype=case.dtype, device=device).split(heads, 2)


def case(batch, tokens, heads, kv_heads, head_dim, causal, direction="fwd"):
    keys = {"batch": batch, "tokens": tokens, "kv_tokens": tokens, "heads": heads, "kv_heads": kv_heads}
    keys |= {"head_dim": head_dim, "causal": causal}
    moved = 2 * batch * tokens * head_dim * (2 * heads + 2 * kv_heads)
    pairs = tokens * (tokens + 1) // 2 if causal else tokens * tokens  # of a query and a key that it sees
    flops = 4 * batch * heads * head_dim * pairs
    if direction == "bwd":  # q, k, v, y and its gradient in, three gradients out; five products, the scores once more
        moved, flops = 2 * moved, flops * 5 // 2
    return Case("attention", keys, torch.bfloat16, moved, direction, (batch, tokens) == (1, 512), flops)


OP = Op(
    name="attention",
    cases=(*(case(*size) for size in FORWARD), *(case(*size, "bwd") for size in BACKWARD)),
    inputs=inputs,
    eager=eager,
    reference=lambda case: partial(by_blocks, causal=case.keys["causal"]),
    providers=providers,
    differentiable=3,
)
