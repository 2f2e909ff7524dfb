"""A prompt behind what a KVCache holds, by the same description as the decode step.

It runs launch by launch, without a graph: a GPU takes longer than the host for a prompt of a few hundred tokens.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import NoStep
from ..model.description import Trunk
from . import compose
from .compose import LayerCache, Tokens, make_tables

_HEAD_DIMS = range(8, 257, 8)  # of attention by tensor cores
_CPU_TOKENS = 512  # in the cache, up to which attention takes no longer than PyTorch's there


def check_prompt(parts: Trunk, cache: Any, tokens: int) -> None:
    """Raise NoStep unless `tokens` more of each sequence can run so, and no slower than by the model's modules."""
    dtype, device = parts.weight.dtype, parts.weight.device
    if device.type == "cpu" and cache.length + tokens > _CPU_TOKENS:
        raise NoStep(f"more than {_CPU_TOKENS} tokens on the CPU")
    if device.type == "cuda" and dtype not in (torch.float16, torch.bfloat16):
        raise NoStep(f"attention over prompts is slow in {dtype}")
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        if device.type == "cuda" and layer.attention.head_dim not in _HEAD_DIMS:
            raise NoStep(f"attention over prompts is slow with head_dim {layer.attention.head_dim}")
        if buffers.is_sliding and buffers.length + tokens > buffers.end:
            raise NoStep("the prompt is longer than what a sliding window keeps")
    if not cache.is_even or not cache.has_room(tokens):
        raise NoStep("the cache has no room for the prompt")


def run_prompt(parts: Trunk, cache: Any, ids: Tensor, last: Tensor, leftpad: Tensor | None) -> Tensor:
    """The logits (B, V) behind the last of the tokens `ids` (B, T), which are appended to the cache.

    `last` (B,) are the positions of the last tokens, `leftpad` (B,) where each sequence starts, None for all at 0.
    """
    batch, count = ids.shape
    weight = parts.weight
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        if not buffers.is_initialized:
            like = weight.new_empty(batch, layer.attention.kv_heads, 0, layer.attention.head_dim)
            buffers.lazy_initialization(like, like)
    cache.make_room(count)
    past = cache.length
    cache.begin(last - count, leftpad)
    cache.count_ahead(count)
    offsets = torch.arange(1 - count, 1, dtype=torch.int32, device=ids.device)
    positions = (cache.counters[0][:, None] + offsets).clamp_(min=0)  # those of padding are negative
    places = [
        LayerCache(
            buffers.k[:, : past + count - buffers.offset],
            buffers.v[:, : past + count - buffers.offset],
            cache.counters[1 + row],
            None if leftpad is None else cache.leftpads[row],
        )
        for buffers, row in zip(cache.layers, cache.rows(), strict=True)
    ]
    hidden = weight.new_empty(batch * count, weight.shape[1])
    compose.embed(parts.embedding, parts.embed_scale, ids.flatten(), hidden)
    tokens = Tokens(batch, count, positions, make_tables(parts, parts.positions[: past + count]), is_prompt=True)
    logits = compose.forward(parts, hidden, tokens, places)
    cache.advance(count)
    return logits
