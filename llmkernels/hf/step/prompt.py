"""A prompt behind what a KVCache holds, by the same description as the decode step.

run           launch by launch: a GPU takes longer for a long prompt than the host; where prompts differ in length,
              packed one after the other, so that nothing is computed for padding
run_padded    a short one by a CUDA graph for its length and a little more
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..cache.kv_cache import KVCache
from ..errors import NoStep
from ..model.description import Description, Layer
from ..report import STEP, STEP_IN_FP8
from . import compose
from .attend import LayerCache, Packed, Tokens
from .compose import make_tables
from .place import Place
from .program import Program

_HEAD_DIMS = range(8, 257, 8)  # of attention by tensor cores
# Up to so many tokens of a sequence attention takes no longer than PyTorch's, on two cores; and with a head_dim of more
# than 128 on GPUs other than Hopper. In all other cases it never does.
_CPU_TOKENS, _LARGE_HEAD_TOKENS = 512, 1024
# A graph is of use as long as a GPU takes less time for a layer than the host for its launches, 0.3 to 0.7 ms.
_GRAPH_TOKENS = 4096
_GRAPH_PRODUCTS = 2.5e11  # multiplications of a layer
# From so many tokens on products are in FP8, where that was asked for. FP8 weights are half as large; but fewer tokens
# take a product with the norm before it and the add behind it in one launch.
_FP8_ROWS = 256
# How much of a batch is padding, from which on its prompts are packed: the host has to know their lengths then. Nothing
# is written to the caches for padding, where the modules write keys and values that nobody reads.
_LEAST_PADDING = 0.1
# What lends a program: by its kind, for these ids (B, T) and as many tokens of each.
Lend = Callable[[Hashable, Tensor, int], AbstractContextManager[Program]]
PACKED_DEVICES = {"cuda"}  # on a CPU caches are what they are unpatched, to the last key


def check_prompt(parts: Description, cache: Any, tokens: int) -> None:
    """Raise NoStep unless `tokens` more of each sequence can run so, and no slower than by the model's modules."""
    device, length = parts.weight.device, cache.length + tokens
    check_attention(parts)
    if device.type == "cpu" and length > _CPU_TOKENS:
        raise NoStep(f"attention over more than {_CPU_TOKENS} tokens is left to PyTorch")
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        if length > _LARGE_HEAD_TOKENS and layer.attention.head_dim > 128 and not _is_hopper(device):
            raise NoStep(f"attention over more than {_LARGE_HEAD_TOKENS} tokens is left to PyTorch")
        if buffers.is_sliding and buffers.length + tokens > buffers.end:
            raise NoStep("the prompt is longer than what a sliding window keeps")
    if not cache.is_even or not cache.has_room(tokens):
        raise NoStep("the cache has no room for the prompt")


def check_attention(parts: Description) -> None:
    """Raise NoStep where attention over prompts has no tensor cores."""
    if parts.weight.device.type != "cuda":
        return
    if parts.weight.dtype not in (torch.float16, torch.bfloat16):
        raise NoStep(f"attention over prompts is slow in {parts.weight.dtype}")
    for layer in parts.layers:
        if layer.attention.head_dim not in _HEAD_DIMS:
            raise NoStep(f"attention over prompts is slow with head_dim {layer.attention.head_dim}")


def is_in_fp8(parts: Description, tokens: int) -> bool:
    """Whether a prompt of so many tokens, of all sequences together, runs in FP8."""
    return parts.fp8 is not None and tokens >= _FP8_ROWS


def way(parts: Description, tokens: int) -> str:
    """How it runs, in the words of the report."""
    return STEP_IN_FP8 if is_in_fp8(parts, tokens) else STEP


def for_prompt(parts: Description, tokens: int) -> tuple[Description, Any]:
    """The description that such a prompt runs by, and what keeps its memory alive. Raises NoStep."""
    return parts.fp8() if is_in_fp8(parts, tokens) else (parts, None)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def allocate(parts: Description, cache: Any, batch: int) -> None:
    """Give an empty cache its tensors."""
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        if not buffers.is_initialized:
            _allocate(buffers, layer, parts, batch)


def _allocate(buffers: Any, layer: Layer, parts: Description, batch: int) -> None:
    like = parts.weight.new_empty(batch, layer.attention.kv_heads, 0, layer.attention.head_dim)
    buffers.lazy_initialization(like, like)


def cache_of_a_call(parts: Description, batch: int, tokens: int) -> Any:
    """A cache for a prompt that leaves none behind.

    Where no graph runs the prompt, layers alike have their buffers in common: each reads what it has just written.
    """
    cache = KVCache.growable([None] * len(parts.layers), batch * parts.token_bytes, tokens, tokens + tokens // 8 + 16)
    if padded_length(parts, cache, batch, tokens) is None:
        shared: dict[tuple[int, int], Any] = {}
        for layer, buffers in zip(parts.layers, cache.layers, strict=True):
            first = shared.setdefault((layer.attention.kv_heads, layer.attention.head_dim), buffers)
            if first is buffers:
                _allocate(buffers, layer, parts, batch)
            buffers.k, buffers.v = first.k, first.v
    return cache


def run(
    parts: Description,
    cache: Any,
    ids: Tensor,
    last: Tensor | int,
    leftpad: Tensor | None,
    kept: int,
    seen: list[Tensor] | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """The logits (B, kept, V) behind the last of the tokens `ids` (B, T), which are appended to the cache.

    `last` (B,) are the positions of the last tokens, or that of all; `leftpad` (B,) where each sequence starts, None
    for all at 0; `ends` (B,) where padding behind it begins, in an empty cache. `seen` receives the hidden states
    (B * T, H) that transformers returns.
    """
    batch, count = ids.shape
    allocate(parts, cache, batch)
    cache.make_room(count)
    past = cache.length
    may_be_packed = leftpad is not None and kept == 1 and seen is None and ends is None and past == 0
    if may_be_packed and ids.device.type in PACKED_DEVICES:
        padding = leftpad.tolist()
        if sum(padding) >= _LEAST_PADDING * ids.numel():
            return _run_packed(parts, cache, ids, last, leftpad, padding)
    cache.begin(last - count, leftpad)
    hidden = parts.weight.new_empty(batch * count, parts.weight.shape[1])
    positions = torch.empty(batch, count, dtype=torch.int32, device=ids.device)
    with cache.counting(count):
        compose.embed(parts, ids, hidden, positions, cache.counters, count, positions)
    caches = _caches(cache, past + count, leftpad)
    tables = make_tables(parts, parts.positions[: past + count])
    ends = None if ends is None else ends.int()
    tokens = Tokens(batch, count, positions, tables, is_prompt=True, ends=ends)
    hidden = compose.run_layers(parts, hidden, tokens, caches, seen)
    cache.advance(count)
    return _logits(parts, hidden.view(batch, count, -1)[:, count - kept :])


def _caches(cache: Any, end: int, leftpad: Tensor | None) -> Iterator[LayerCache]:
    """The keys and values of each layer up to the token at `end`."""
    for buffers, row in zip(cache.layers, cache.rows(), strict=True):
        k, v = (x[:, : end - buffers.offset] for x in (buffers.k, buffers.v))
        yield LayerCache(k, v, cache.counters[1 + row], None if leftpad is None else cache.leftpads[row])


def _run_packed(
    parts: Description, cache: Any, ids: Tensor, last: Tensor | int, leftpad: Tensor, padding: list[int]
) -> Tensor:
    """The same for an empty cache and the last token of each, of prompts one after the other without the padding."""
    batch, count = ids.shape
    cache.begin(last - count, leftpad)
    lengths = count - torch.tensor(padding, device="cpu")
    ends = lengths.cumsum(0)
    row = torch.arange(batch, device="cpu").repeat_interleave(lengths)
    begin = (ends - lengths)[row]
    column = torch.arange(len(row), device="cpu") - begin + (count - lengths)[row]
    row, begin, column, ends = (x.to(ids.device, non_blocking=True) for x in (row, begin, column, ends))
    positions = ((last[row] if isinstance(last, Tensor) else last) + column + (1 - count)).clamp_(min=0)
    hidden = parts.weight.new_empty(len(row), parts.weight.shape[1])
    with cache.counting(count):
        compose.embed(parts, ids[row, column], hidden, positions, cache.counters, count)
    packed = Packed(begin[None].int(), row[:, None].int(), (column + 1).int())
    tables = make_tables(parts, parts.positions[:count])
    tokens = Tokens(1, len(row), positions[None].int(), tables, is_prompt=True, packed=packed)
    hidden = compose.run_layers(parts, hidden, tokens, _caches(cache, count, leftpad))
    cache.advance(count)
    return compose.head(parts, hidden[ends - 1])[:, None]


def _logits(parts: Description, hidden: Tensor) -> Tensor:
    """The logits (B, T, V) of what the layers have made (B, T, H)."""
    if hidden.shape[1] == 1:  # rows at a distance
        return compose.head(parts, hidden[:, 0])[:, None]
    return compose.head(parts, hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


def padded_length(parts: Description, cache: Any, batch: int, count: int) -> int | None:
    """For how many tokens a graph runs a prompt of `count`: at most an eighth more, or 15. None: without a graph."""
    step = max(16, (1 << count.bit_length()) // 16)
    padded = -(-count // step) * step
    if parts.weight.device.type != "cuda" or cache.length or batch * padded > _GRAPH_TOKENS:
        return None
    if batch * padded * parts.layer_weights > _GRAPH_PRODUCTS * len(parts.layers) or padded > len(
        parts.positions[: cache.capacity]
    ):
        return None
    return padded if all(padded <= buffers.rows for buffers in cache.layers) else None


def run_padded(
    parts: Description,
    cache: Any,
    ids: Tensor,
    kept: int,
    place: Place,
    padded: int,
    lend: Lend,
) -> Tensor:
    """The same as `run` for an empty cache at this place, whose counters are set, with as many tokens behind the prompt
    that it has `padded`.

    No token of the prompt sees those, and what they write is behind the end of the cache. `lend`: that of a Decoder.
    """
    kind = "prompt", is_in_fp8(parts, ids.numel())
    parts, _memory = for_prompt(parts, ids.numel())
    (batch, count), device, weight = ids.shape, ids.device, parts.weight
    most = len(parts.positions[: cache.capacity]) - 1

    with lend(kind, ids, padded) as program:
        program.bind(parts)
        tables = program.tables(place, cache.capacity)
        tokens = program.buffer("tokens", (batch, padded), torch.long, device)
        positions = program.buffer("positions", (batch, padded), torch.int32, device)
        hidden = program.buffer("hidden", (batch * padded, weight.shape[1]), weight.dtype, device)
        tokens[:, :count].copy_(ids)
        caches = [] if program.has_graph(parts, place) else [*_caches(cache, padded, cache.leftpads)]
        where = Tokens(batch, padded, positions, tables, is_prompt=True)

        def run_layers() -> Tensor:
            compose.embed(parts, tokens, hidden, positions, cache.counters, padded, positions, most)
            return compose.run_layers(parts, hidden, where, caches or _caches(cache, padded, cache.leftpads))

        with cache.counting(padded):  # where they are written; the next to begin counts again
            made = program.run(run_layers, device, place, in_pieces=True)
        cache.advance(count)
        return _logits(parts, made.view(batch, padded, -1)[:, count - kept : count])
