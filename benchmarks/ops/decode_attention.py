"""Attention of one new token per sequence, or of a few, against a KV cache."""

import itertools
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case, Op, Provider, plain

QWEN = (28, 4, 128)  # query heads, key heads, elements of a head
OTHERS = (QWEN, (32, 8, 128), (40, 8, 128), (64, 8, 128), (32, 32, 128), (64, 8, 64), (14, 2, 64), (16, 8, 256))
WIDE_GROUPS = ((32, 2, 128), (64, 4, 128), (32, 1, 128))
PAGE = 64
SIZES = ((1, 512), (1, 1024), (1, 8192), (1, 32768), (8, 512), (8, 4096), (32, 4096), (64, 512))


def eager(q, k, v, lengths, block_table=None):
    """softmax(q k^T / sqrt(D)) v with every key head given to its group of query heads, q (B, 1, H, D)."""
    group = q.size(2) // k.size(2)
    k, v = (gathered(x, block_table).repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.transpose(2, 3) * q.size(3) ** -0.5
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def gathered(pages, block_table):
    return pages if block_table is None else pages[block_table.long()].flatten(1, 2)


def sdpa(backend, q, k, v, lengths):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True).transpose(1, 2)


def visible(q, k, lengths):
    """Which keys each query sees, (B, 1, T, keys): its own, which are the last of a sequence, and all before."""
    last = lengths[:, None] - q.size(1) + torch.arange(q.size(1), device=q.device)
    return (torch.arange(k.size(1), device=q.device) <= last[..., None])[:, None]


def masked(q, k, v, lengths):
    """By whatever backend takes a mask and heads in groups."""
    mask, heads = visible(q, k, lengths), (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, mask, enable_gqa=True).transpose(1, 2)


def ours():
    from llmkernels import decode_attention

    return lambda q, k, v, lengths, block_table=None: decode_attention(q, k, v, lengths, block_table=block_table)


def providers(case):
    if case.keys["cache"] == "paged":
        return {"llmkernels": Provider(ours)}
    return {
        "eager": plain(eager),
        "cudnn": plain(partial(sdpa, SDPBackend.CUDNN_ATTENTION)),
        "flash": plain(partial(sdpa, SDPBackend.FLASH_ATTENTION)),
        "llmkernels": Provider(ours),
    }


def inputs(case, device):
    batch, tokens = case.keys["batch"], case.keys["kv_tokens"]
    heads, kv_heads, head_dim = (case.keys[name] for name in ("heads", "kv_heads", "head_dim"))
    shape = (batch, tokens, kv_heads, head_dim)
    if case.keys["cache"] == "paged":
        shape = (batch * tokens // PAGE, PAGE, kv_heads, head_dim)
    q = torch.randn(batch, case.keys.get("tokens", 1), heads, head_dim, dtype=case.dtype, device=device)
    return q, *(torch.randn(shape, dtype=case.dtype, device=device) for _ in range(2))


def shared(case, device):
    batch, tokens = case.keys["batch"], case.keys["kv_tokens"]
    lengths = torch.tensor(lengths_of(case.keys), dtype=torch.int32, device=device)
    if case.keys["cache"] == "contiguous":
        return (lengths,)
    pages = torch.randperm(batch * tokens // PAGE, device=device).to(torch.int32)  # as a used cache has them
    return lengths, pages.view(batch, -1)


def lengths_of(keys):
    """Of all sequences: as long as the cache. With `shortest` one is, and the others have as many keys as that says."""
    first, others = keys["kv_tokens"], keys.get("shortest", keys["kv_tokens"])
    return [first] + [others] * (keys["batch"] - 1)


def case(batch, kv_tokens, cache="contiguous", of=QWEN, **more):
    """`more`: tokens, that each sequence has new; shortest, see lengths_of()."""
    heads, kv_heads, head_dim = of
    keys = {"batch": batch, "kv_tokens": kv_tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **more}
    moved = 2 * head_dim * (2 * kv_heads * sum(lengths_of(keys)) + 2 * heads * batch * more.get("tokens", 1))
    return Case(
        "decode_attention", {**keys, "cache": cache}, torch.bfloat16, moved, quick=(batch, kv_tokens) == (1, 512)
    )


OP = Op(
    name="decode_attention",
    cases=(*(case(*size) for size in SIZES), case(8, 4096, "paged"), case(32, 4096, "paged")),
    inputs=inputs,
    shared=shared,
    eager=eager,
    providers=providers,
    differentiable=3,
)

# Heads of many families. The eager formula would copy the keys for every head, so it is the reference and not timed.
OTHER_HEADS = Op(
    name="decode_attention_heads",
    cases=tuple(
        case(batch, tokens, of=of) for of, batch, tokens in itertools.product(OTHERS, (1, 5, 8, 32, 64), (2048, 8192))
    ),
    inputs=inputs,
    shared=shared,
    eager=eager,
    providers=lambda case: {name: one for name, one in providers(case).items() if name != "eager"},
    differentiable=3,
)

# Few keys, where a launch takes about as long as it takes to begin and to end it.
FEW_KEYS = replace(
    OTHER_HEADS,
    name="decode_attention_short",
    cases=tuple(case(batch, 300, of=of) for of, batch in itertools.product(OTHERS, (1, 5, 8, 32, 64))),
)

# The sequences and the keys that the ops above leave out; one long sequence among short ones; many query heads for each
# key head; and several new tokens of each sequence, as prompt lookup has them.
OTHER_SIZES = Op(
    name="decode_attention_sizes",
    cases=(
        *(
            case(batch, tokens, of=of)
            for of, batch, tokens in itertools.product((*OTHERS, (8, 4, 256)), (2, 24), (300, 512, 2048, 8192, 30000))
        ),
        *(case(24, 30000, of=of, tokens=1, shortest=300) for of in OTHERS),
        *(
            case(batch, tokens, of=of)
            for of, batch, tokens in itertools.product(WIDE_GROUPS, (1, 8, 32), (300, 2048, 8192))
        ),
        *(
            case(batch, keys, of=of, tokens=tokens, shortest=keys)
            for of, batch, keys, tokens in itertools.product(OTHERS[:2] + OTHERS[-2:-1], (1, 8), (512, 8192), (4, 8))
        ),
    ),
    inputs=inputs,
    shared=shared,
    eager=masked,
    providers=lambda case: (
        {"torch": plain(masked), "llmkernels": Provider(ours)} if "tokens" in case.keys else OTHER_HEADS.providers(case)
    ),
    differentiable=3,
)
