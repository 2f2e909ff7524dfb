"""A batch of continuous batching by the same description as the decode step: tokens of many requests in a row, whose
keys and values are in pages.

one token of each     the decode step, over pages: on CUDA by a graph for so many requests, or some more, which repeat
                      the first one and write what that writes
others                prompts, or chunks of them, and tokens between: launch by launch. The keys and values of all
                      requests are gathered from their pages in a row
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.description import Description
from . import compose, prompt
from .attend import InPages, InRing, LayerCache, Places, Tokens
from .compose import tables_at
from .place import Place

_ROWS = 64  # requests for which one token each runs by a graph


@dataclass(frozen=True)
class Group:
    """Layers whose keys are at the same places.

    `begins` int32 (N + 1,) say where the keys of each request begin, in a row of what is at `reads`: first those that
    are in the pages, then the new ones. At its end is one that no request has. There are no `reads` where all keys are
    new. `writes` are where the new ones go; of windows these may be read before. `longest` is how many keys the longest
    request has. `window` is how many are kept, which come round in as many pages as they need; 0: all.
    """

    begins: Tensor
    reads: Places | None
    writes: Places
    longest: int
    window: int


@dataclass(frozen=True)
class Batch:
    """What one forward has.

    `ids` and `positions` (T,) are those of the tokens, `begins` int32 (N + 1,) where those of each request begin, and
    `most` is how many one of them has at most. `layers` are the group of each layer, and its keys and values (pages,
    tokens, kv_heads, D); `place` says where all of these are.
    """

    ids: Tensor
    positions: Tensor
    begins: Tensor
    most: int
    layers: list[tuple[Group, Tensor, Tensor]]
    place: Hashable

    def is_step(self, parts: Description) -> bool:
        """Whether all requests have one token and keys before, of which the pages keep as many as a layer sees."""
        return (
            self.most == 1
            and len(self.ids) <= _ROWS
            and all(
                group.reads is not None and group.window == layer.attention.window_left + 1
                for (group, *_), layer in zip(self.layers, parts.layers, strict=True)
            )
        )


def run(parts: Description, batch: Batch, longest: int, kept: Tensor | None, lend: prompt.Lend) -> Tensor:
    """The logits (kept, V) behind the tokens `kept`, or behind all. `longest`: how many tokens the longest text has;
    `lend`: that of a Decoder."""
    if batch.is_step(parts):
        return _run_step(parts, batch, longest, kept, lend)
    hidden = _run_layers(parts, batch)
    return compose.head(parts, hidden if kept is None else hidden[kept])


def _run_step(parts: Description, batch: Batch, longest: int, kept: Tensor | None, lend: prompt.Lend) -> Tensor:
    rows, page_size = _rows(len(batch.ids)), batch.layers[0][1].shape[1]
    capacity = page_size << (-(-longest // page_size) - 1).bit_length()
    device, weight = batch.ids.device, parts.weight
    with lend(("batch", capacity), batch.ids.new_empty(rows), 1) as program:
        program.bind(parts)

        def copied(name: str, values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
            buffer = program.buffer(name, (rows, *values.shape[1:]), dtype, device)
            buffer[: len(values)].copy_(values)
            buffer[len(values) :].copy_(values[:1].expand_as(buffer[len(values) :]))
            return buffer

        tokens, positions = copied("tokens", batch.ids, torch.long), copied("positions", batch.positions[:, None])
        hidden = program.buffer("hidden", (rows, weight.shape[1]), weight.dtype, device)
        places: dict[int, dict[str, Tensor]] = {}
        for group, k, _ in batch.layers:
            if id(group) not in places:
                tensors = _places(group, batch.positions, k.shape[1], capacity).items()
                places[id(group)] = {name: copied(f"{name} {len(places)}", values) for name, values in tensors}
        caches = [(InRing if group.window else LayerCache)(k, v, **places[id(group)]) for group, k, v in batch.layers]
        # A graph is for caches at the same addresses: transformers makes one for many calls, or finds the memory again.
        place = Place(shape=(capacity, batch.place))
        where = Tokens(rows, 1, positions, program.tables(place, capacity))

        def forward() -> Tensor:
            compose.embed(parts, tokens, hidden, positions)
            return compose.forward(parts, hidden, where, caches)

        logits = program.run(forward, device, place)[: len(batch.ids)]
        return logits.clone() if kept is None else logits[kept]  # before another thread may run the program


def _rows(count: int) -> int:
    """The sequences of the graph for so many: at most a quarter more."""
    step = max(1, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


def _places(group: Group, positions: Tensor, page_size: int, capacity: int) -> dict[str, Tensor]:
    """Where the keys of each request are, for a single token: of a LayerCache, or of an InRing."""
    pages, _ = group.reads
    seqlens, begins = group.begins.diff(), group.begins[:-1, None]
    first = torch.arange(0, group.window or capacity, page_size, device=pages.device)
    if not group.window:  # behind the last pages are those of others, of which nothing is read
        return {"seqlens": seqlens, "block_table": pages[(begins + first).clamp_(max=len(pages) - 1)]}
    own, offset = group.writes
    # What is read begins with the oldest key, which may be amid a page; the token's own is the last.
    index = (first - (positions - seqlens + 1)[:, None]) % group.window
    table = pages[(begins + index).clamp_(max=len(pages) - 1)]
    table = torch.where(index == seqlens[:, None] - 1, own[:, None], table)
    return {"seqlens": seqlens, "block_table": table, "ends": offset + 1, "own": own[:, None]}


def _run_layers(parts: Description, batch: Batch) -> Tensor:
    """`hidden` (T, H) behind all layers."""
    count, device = len(batch.ids), batch.ids.device
    hidden = parts.weight.new_empty(count, parts.weight.shape[1])
    compose.embed(parts, batch.ids.long(), hidden, batch.positions.int())
    token = torch.arange(count, dtype=torch.int32, device=device)
    # Behind the last request there may be tokens of none, of which nothing is read.
    is_none = token >= batch.begins[-1]
    request = torch.bucketize(token, batch.begins[1:], right=True).clamp_(max=len(batch.begins) - 2)
    behind = batch.begins[1:][request] - token - 1  # tokens of the same request
    seen: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def caches():
        for layer, (group, k, v) in zip(parts.layers, batch.layers, strict=True):
            key = id(group), (window := layer.attention.window_left)
            if key not in seen:
                begin, end = group.begins[request], group.begins[1:][request] - behind
                begin = begin if window < 0 else begin.maximum(end - 1 - window)
                new = end - 1 if group.reads is None else (end - 1).masked_fill(is_none, len(group.reads[0]) - 1)
                seen[key] = begin[None].int(), end[None].int(), new
            yield InPages(k, v, *seen[key], group.reads, group.writes)

    tokens = Tokens(1, count, token[None], tables_at(parts, batch.positions), is_prompt=True)
    return compose.run_layers(parts, hidden, tokens, caches())
