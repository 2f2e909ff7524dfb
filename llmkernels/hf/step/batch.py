"""A batch of continuous batching by the same description as the decode step: tokens of many requests in a row, whose
keys and values are in pages.

one token of each     the decode step, over pages: on CUDA by a graph for so many requests, or some more, which repeat
                      the first one and write what that writes
others                prompts, or chunks of them, and tokens between: launch by launch. Keys and values go to their
                      pages, from which those of all requests are gathered in a row
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.description import Description
from . import compose, prompt
from .compose import InPages, LayerCache, Places, Tokens, make_tables
from .place import Place

_ROWS = 64  # requests for which one token each runs by a graph


@dataclass(frozen=True)
class Batch:
    """What one forward has.

    `ids` and `positions` (T,) are those of the tokens. `begins` and `key_begins` int32 (N + 1,) say where the tokens of
    each request begin in this row, and its keys in that of `reads`; `longest` is how many keys the longest request has.
    `reads`, of all keys, and `writes`, of the new ones (T,), are pages and the places in these; there are no `reads`
    where all keys are new. `pages` are the keys and values of each layer, (pages, tokens, kv_heads, D).
    """

    ids: Tensor
    positions: Tensor
    begins: Tensor
    key_begins: Tensor
    longest: int
    reads: Places | None
    writes: Places
    pages: list[tuple[Tensor, Tensor]]

    @property
    def has_one_token_each(self) -> bool:
        return len(self.begins) == len(self.ids) + 1 and self.reads is not None


def run(parts: Description, batch: Batch, kept: Tensor | None, lend: prompt.Lend) -> Tensor:
    """The logits (kept, V) behind the tokens `kept`, or behind all. `lend`: that of a Decoder."""
    if batch.has_one_token_each and len(batch.ids) <= _ROWS:
        logits = _run_step(parts, batch, lend)
        return logits.clone() if kept is None else logits[kept]
    hidden = _run_layers(parts, batch)
    return compose.head(parts, hidden if kept is None else hidden[kept])


def _run_step(parts: Description, batch: Batch, lend: prompt.Lend) -> Tensor:
    """The logits (T, V), which the next run overwrites."""
    count, page_size = len(batch.ids), batch.pages[0][0].shape[1]
    rows = _rows(count)
    width = 1 << (-(-batch.longest // page_size) - 1).bit_length()
    table = _page_table(batch, width, page_size)
    lengths = batch.key_begins.diff()
    device, weight = batch.ids.device, parts.weight
    with lend(("batch", width), batch.ids.new_empty(rows), 1) as program:
        program.bind(parts)
        tokens = program.buffer("tokens", (rows,), torch.long, device)
        positions = program.buffer("positions", (rows, 1), torch.int32, device)
        seqlens = program.buffer("seqlens", (rows,), torch.int32, device)
        pages = program.buffer("pages", (rows, width), torch.int32, device)
        hidden = program.buffer("hidden", (rows, weight.shape[1]), weight.dtype, device)
        for buffer, values in (
            (tokens, batch.ids), (positions, batch.positions[:, None]), (seqlens, lengths), (pages, table)
        ):  # fmt: skip
            buffer[:count].copy_(values)
            if rows > count:
                buffer[count:].copy_(values[:1].expand_as(buffer[count:]))
        # A graph is for caches at the same addresses: transformers makes one for many calls, or finds the memory again.
        addresses = [(x.data_ptr(), x.shape, x.stride()) for pair in batch.pages for x in pair]
        place = Place(shape=(width, *addresses))
        where = Tokens(rows, 1, positions, program.tables(place, width * page_size), block_table=pages)

        def forward() -> Tensor:
            compose.embed(parts, tokens, hidden, positions)
            return compose.forward(parts, hidden, where, [LayerCache(k, v, seqlens, None) for k, v in batch.pages])

        return program.run(forward, device, place)[:count]


def _rows(count: int) -> int:
    """The sequences of the graph for so many: at most an eighth more, or 3."""
    step = max(1, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


def _page_table(batch: Batch, width: int, page_size: int) -> Tensor:
    """(T, width): the pages of each request. Behind the last ones are pages of others, of which nothing is read."""
    first = torch.arange(0, width * page_size, page_size, device=batch.ids.device)
    pages = batch.reads[0]
    return pages[(batch.key_begins[:-1, None] + first).clamp_(max=len(pages) - 1)]


def _run_layers(parts: Description, batch: Batch) -> Tensor:
    """`hidden` (T, H) behind all layers."""
    count, device = len(batch.ids), batch.ids.device
    hidden = parts.weight.new_empty(count, parts.weight.shape[1])
    positions = batch.positions.int()
    compose.embed(parts, batch.ids.long(), hidden, positions)
    token = torch.arange(count, dtype=torch.int32, device=device)
    # Behind the last request there may be tokens of none, of which nothing is read.
    request = torch.bucketize(token, batch.begins[1:], right=True).clamp_(max=len(batch.begins) - 2)
    begin = batch.key_begins[request]
    end = batch.key_begins[1:][request] - batch.begins[1:][request] + token + 1
    in_pages = InPages(begin[None].int(), end[None].int(), batch.reads, batch.writes)
    tables = make_tables(parts, parts.positions[: batch.longest])
    tokens = Tokens(1, count, positions[None], tables, is_prompt=True, in_pages=in_pages)
    caches = (LayerCache(k, v, positions, None) for k, v in batch.pages)
    return compose.run_layers(parts, hidden, tokens, caches)
