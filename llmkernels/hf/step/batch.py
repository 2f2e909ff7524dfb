"""A batch of continuous batching by the same description as the decode step: tokens of many requests in a row, whose
keys and values are in pages.

one token of each     the decode step, over pages: on CUDA by a graph for so many requests, or some more, which repeat
                      the first one and write what that writes. Not where pages are those of windows, which come round
others                prompts, or chunks of them, and tokens between: launch by launch. The keys and values of all
                      requests are gathered from their pages in a row
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.description import Description
from . import compose, prompt
from .attend import InPages, LayerCache, Places, Tokens
from .compose import tables_at
from .place import Place

_ROWS = 64  # requests for which one token each runs by a graph


@dataclass(frozen=True)
class Group:
    """Layers whose keys are at the same places.

    `begins` int32 (N + 1,) say where the keys of each request begin, in a row of what is at `reads`: first those that
    are in the pages, then the new ones. At its end is one that no request has. There are no `reads` where all keys are
    new. `writes` are where the new ones go; of windows these may be read before. `longest` is how many keys the longest
    request has.
    """

    begins: Tensor
    reads: Places | None
    writes: Places
    longest: int


@dataclass(frozen=True)
class Batch:
    """What one forward has.

    `ids` and `positions` (T,) are those of the tokens, `begins` int32 (N + 1,) where those of each request begin.
    `layers` are the group of each layer, and its keys and values (pages, tokens, kv_heads, D); `place` says where all
    of these are.
    """

    ids: Tensor
    positions: Tensor
    begins: Tensor
    layers: list[tuple[Group, Tensor, Tensor]]
    place: Hashable

    def is_step(self, parts: Description) -> bool:
        """Whether all requests have one token, and each layer the pages of a whole text."""
        group = self.layers[0][0]
        return (
            len(self.begins) == len(self.ids) + 1 <= _ROWS + 1
            and group.reads is not None
            and all(of_layer is group for of_layer, *_ in self.layers)
            and all(layer.attention.window_left < 0 for layer in parts.layers)
        )


def run(parts: Description, batch: Batch, kept: Tensor | None, lend: prompt.Lend) -> Tensor:
    """The logits (kept, V) behind the tokens `kept`, or behind all. `lend`: that of a Decoder."""
    if batch.is_step(parts):
        return _run_step(parts, batch, kept, lend)
    hidden = _run_layers(parts, batch)
    return compose.head(parts, hidden if kept is None else hidden[kept])


def _run_step(parts: Description, batch: Batch, kept: Tensor | None, lend: prompt.Lend) -> Tensor:
    group, k, _ = batch.layers[0]
    count, page_size = len(batch.ids), k.shape[1]
    rows = _rows(count)
    width = 1 << (-(-group.longest // page_size) - 1).bit_length()
    device, weight = batch.ids.device, parts.weight
    with lend(("batch", width), batch.ids.new_empty(rows), 1) as program:
        program.bind(parts)
        tokens = program.buffer("tokens", (rows,), torch.long, device)
        positions = program.buffer("positions", (rows, 1), torch.int32, device)
        seqlens = program.buffer("seqlens", (rows,), torch.int32, device)
        table = program.buffer("table", (rows, width), torch.int32, device)
        hidden = program.buffer("hidden", (rows, weight.shape[1]), weight.dtype, device)
        for buffer, values in (
            (tokens, batch.ids),
            (positions, batch.positions[:, None]),
            (seqlens, group.begins.diff()),
            (table, _page_table(group, width, page_size)),
        ):
            buffer[:count].copy_(values)
            if rows > count:
                buffer[count:].copy_(values[:1].expand_as(buffer[count:]))
        # A graph is for caches at the same addresses: transformers makes one for many calls, or finds the memory again.
        place = Place(shape=(width, batch.place))
        where = Tokens(rows, 1, positions, program.tables(place, width * page_size), block_table=table)

        def forward() -> Tensor:
            compose.embed(parts, tokens, hidden, positions)
            return compose.forward(parts, hidden, where, [LayerCache(k, v, seqlens, None) for _, k, v in batch.layers])

        logits = program.run(forward, device, place)[:count]
        return logits.clone() if kept is None else logits[kept]  # before another thread may run the program


def _rows(count: int) -> int:
    """The sequences of the graph for so many: at most a quarter more."""
    step = max(1, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


def _page_table(group: Group, width: int, page_size: int) -> Tensor:
    """(N, width): the pages of each request. Behind the last ones are pages of others, of which nothing is read."""
    pages, _ = group.reads
    first = torch.arange(0, width * page_size, page_size, device=pages.device)
    return pages[(group.begins[:-1, None] + first).clamp_(max=len(pages) - 1)]


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
