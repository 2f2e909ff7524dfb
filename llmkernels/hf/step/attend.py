"""Attention of a layer, as a forward is composed of ops: the new tokens, the keys and values that they see, and what is
launched for them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.description import Attention
from .source import Source, options_of

_ops = torch.ops.llmkernels
UNROTATED = "not rotated"  # the name of tables that rotate by 0


@dataclass(frozen=True)
class Packed:
    """Where tokens of sequences in a row belong: `begin` int32 (1, T) is the first token of the sequence of each, `row`
    int32 (T, 1) the sequence, and `seqlens` int32 (T,) how many keys the caches have of it with this token."""

    begin: Tensor
    row: Tensor
    seqlens: Tensor


@dataclass(frozen=True)
class Tokens:
    """The new tokens: the last `count` of each of `batch` sequences in the caches.

    `positions` int32 (B, T) are those of their rotation. `tables` has cos and sin of each position, by the names that
    layers have for them. `is_prompt`: there are many, all keys and values of the caches are live. `packed`: they are
    whole prompts, one after the other, and `batch` is 1. `ends` int32 (B,): from these keys on there is padding, which
    no token sees.
    """

    batch: int
    count: int
    positions: Tensor
    tables: dict[str, tuple[Tensor, Tensor]]
    is_prompt: bool = False
    packed: Packed | None = None
    ends: Tensor | None = None

    def tables_of(self, attention: Attention) -> tuple[Tensor, Tensor]:
        return self.tables[UNROTATED if attention.table is None else attention.table]


class LayerCache(NamedTuple):
    """The keys and values of a layer, as `decode_attention` takes them: `seqlens` int32 (B,) counts them with the new
    ones, `leftpad` int32 (B,) or None, `block_table` int32 (B, pages) where they are in pages. Where a layer keeps its
    window alone, seqlens and leftpad count from its first row."""

    k: Tensor
    v: Tensor
    seqlens: Tensor
    leftpad: Tensor | None = None
    block_table: Tensor | None = None


Places = tuple[Tensor, Tensor]  # pages, and where in these


class InPages(NamedTuple):
    """The keys and values of a layer in pages, (pages, tokens, kv_heads, D), for tokens of several requests in a row.

    Each sees those from `begin` to `end`, int32 (1, T), in a row of what is at `reads`, where its own is at `new`. The
    new ones go to `writes` then. Without `reads` they are all there are.
    """

    k: Tensor
    v: Tensor
    begin: Tensor
    end: Tensor
    new: Tensor
    reads: Places | None
    writes: Places


class InRing(NamedTuple):
    """The keys and values of a window in pages, (pages, tokens, kv_heads, D), in which they come round: for one token
    of each request.

    A token sees the first `seqlens` int32 (B,) of the pages `block_table` int32 (B, pages). Its own are among them: the
    last of the first `ends` int32 (B,) of the page `own` int32 (B, 1).
    """

    k: Tensor
    v: Tensor
    seqlens: Tensor
    block_table: Tensor
    ends: Tensor
    own: Tensor


Cache = LayerCache | InPages | InRing


def attend(attention: Attention, source: Source, tokens: Tokens, cache: Cache) -> Tensor:
    """What the output projection reads, (B * T, heads * D)."""
    qkv = source.linear(attention.qkv)
    if tokens.packed is not None:
        return _attend_packed(attention, qkv, tokens, cache, tokens.packed)
    if isinstance(cache, InPages):
        return _attend_in_pages(attention, qkv, tokens, cache)
    if isinstance(cache, InRing):
        return _attend_in_ring(attention, qkv, tokens, cache)
    tables = tokens.tables_of(attention)
    scores = attention.scale, attention.window_left, attention.softcap
    if tokens.count == 1 and not _is_interleaved(attention) and not attention.by_head and not tokens.is_prompt:
        cached = cache.seqlens, cache.leftpad, cache.k, cache.v, cache.block_table
        options = attention.heads, *scores, True, *_norms(attention)
        positions, rotary_dim = tokens.positions[:, 0], 2 * tables[0].shape[1]
        return _ops.rope_decode_attention(qkv, *tables, positions, *cached, *options, rotary_dim=rotary_dim)
    q = _rotated_and_written(attention, qkv, tokens, cache.k, cache.v, cache.seqlens, cache.block_table)
    if tokens.is_prompt:
        scale, window, softcap = scores
        y, _ = _ops.attention(q, cache.k, cache.v, cache.leftpad, tokens.ends, None, scale, window, 0, softcap)
    else:
        y = _ops.decode_attention(q, *cache, *scores)
    return y.view(len(qkv), -1)


def _attend_packed(attention: Attention, qkv: Tensor, tokens: Tokens, cache: LayerCache, packed: Packed) -> Tensor:
    """The same of sequences in a row: they attend to what is new, and their keys and values go to a row of the caches
    each, where every token counts as a sequence of its own."""
    q, k, v = _rotated(attention, qkv, tokens)
    alone = [x.transpose(0, 1) for x in (q, k, v, tokens.positions)]
    where = cache.k, cache.v, packed.seqlens, packed.row
    no_columns = (table[:, :0] for table in tokens.tables_of(attention))
    _ops.rope_kv_write(*alone[:3], *no_columns, alone[3], *where, rotary_dim=0)
    scale, window, softcap = attention.scale, attention.window_left, attention.softcap
    y, _ = _ops.attention(q, k, v, packed.begin, None, None, scale, window, 0, softcap)
    return y.view(len(qkv), -1)


def _attend_in_pages(attention: Attention, qkv: Tensor, tokens: Tokens, cache: InPages) -> Tensor:
    """The same of requests in a row, whose earlier keys and values are gathered from pages."""
    q, *new = _rotated(attention, qkv, tokens)
    seen = []
    for pages, x in zip((cache.k, cache.v), new, strict=True):
        if cache.reads is not None:
            row = pages[cache.reads]
            row[cache.new] = x[0]
            seen.append(row[None])
        pages[cache.writes] = x[0]
    k, v = seen or new
    y, _ = _ops.attention(q, k, v, cache.begin, cache.end, None, attention.scale, -1, -1, attention.softcap)
    return y.view(len(qkv), -1)


def _attend_in_ring(attention: Attention, qkv: Tensor, tokens: Tokens, cache: InRing) -> Tensor:
    """The same of one token for each request. The order of the keys, whose rotation is in them, does not matter."""
    q = _rotated_and_written(attention, qkv, tokens, cache.k, cache.v, cache.ends, cache.own)
    seen = cache.k, cache.v, cache.seqlens, None, cache.block_table
    return _ops.decode_attention(q, *seen, attention.scale, -1, attention.softcap).view(len(qkv), -1)


def _rotated_and_written(attention: Attention, qkv: Tensor, tokens: Tokens, *cached: Tensor | None) -> Tensor:
    """The queries (B, T, heads, D). Keys and values go to the end of those `cached`, as `rope_kv_write` takes them."""
    q, k, v = _heads(attention, qkv, tokens)
    tables = tokens.tables_of(attention)
    options = _is_interleaved(attention), *_norms(attention)
    _ops.rope_kv_write(q, k, v, *tables, tokens.positions, *cached, *options, rotary_dim=2 * tables[0].shape[1])
    return q


def _is_interleaved(attention: Attention) -> bool:
    return attention.interleaved and attention.table is not None


def _norms(attention: Attention) -> tuple:
    """The norms of q and k, as the ops take them."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return () if q_norm is None else (q_norm.weight, k_norm.weight, *options_of(q_norm), attention.row_norms)


def _rotated(attention: Attention, qkv: Tensor, tokens: Tokens) -> tuple[Tensor, ...]:
    """q, k and v with the norms of q and k, and their rotation: in place."""
    q, k, v = _heads(attention, qkv, tokens)
    if attention.table is None and attention.q_norm is None:
        return q, k, v
    cos, sin = tokens.tables_of(attention)
    layout = False, attention.interleaved, 2 * cos.shape[1]
    if attention.q_norm is None:
        _ops.rope_(q, k, cos, sin, tokens.positions, *layout)
    else:
        q_weight, k_weight, *options = _norms(attention)
        _ops.rms_norm_rope_(q, k, q_weight, k_weight, cos, sin, tokens.positions, *options, *layout)
    return q, k, v


def _heads(attention: Attention, qkv: Tensor, tokens: Tokens) -> tuple[Tensor, ...]:
    """q, k and v, each (B, T, heads, D)."""
    if attention.by_head:
        return qkv.view(tokens.batch, tokens.count, -1, 3, attention.head_dim).unbind(3)
    heads = qkv.view(tokens.batch, tokens.count, -1, attention.head_dim)
    return heads.split([attention.heads, attention.kv_heads, attention.kv_heads], 2)
