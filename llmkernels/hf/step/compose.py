"""A forward of a few tokens per sequence, or of a prompt, composed of ops from a description of the model.

    hidden = embedding[tokens] * embed_scale (+ position_embedding[positions])
    for each branch of each layer:  hidden += multiplier * post(block(pre(hidden)))
    logits = head(norm(hidden))

What runs for a layer as Llama's, one token, on a GPU, is five launches:

    qkv = rms_norm(hidden) Wqkv^T + b              rms_norm_linear
    a = attention(rope(q), cache + rope(k), v)     rope_decode_attention: rotates, writes the cache, attends
    hidden += a Wo^T                               linear_add_scale_
    m = silu(g) u, [g | u] = rms_norm(hidden) W^T  rms_norm_glu_linear
    hidden += m Wdown^T                            linear_add_scale_

The norms are folded into the linears: for up to 16 rows the linear after a norm normalizes x itself; for up to 64, and
for up to 128 where the blocks that split K fill most of the GPU, the linear before it has done most of it. Then the
first norm of the first layer is a launch. So is a norm behind a block, as OLMo 2 and Gemma 2 have, but of one token:
there the next linear adds it to `hidden` as well (rms_norm_add_linear).

The launches overlap by programmatic dependent launch (`prefetch`): each requests its weights, or the keys and values of
earlier tokens, while the previous kernel still runs. This is correct because

    weights   were complete when the step began. The step does not write them, and a kernel that has just written them
              does not let the next one start before it has ended (PyTorch's kernels and our optimizers do not).
    cache     The keys and values of earlier tokens were written before `cache_seqlens` was last changed, and the kernel
              that changed it, embed_tokens_, does not let the next one start early either.

All of it is ops of llmkernels, so that it can be recorded into a CUDA graph: see graphs.py.

Products of layers that are in FP8, as prompts may have them, are fp8_linear, and what they read is quantized per token:

    fp8_linear of qkv, attention                          as above
    hidden, n = hidden + a Wo^T, norm of that             fp8_quantize, fp8_linear, add_rms_norm
    m = silu(g) u, [g | u] = n W^T                        fp8_quantize, fp8_linear, swiglu_fp8_quantize
    hidden, n = hidden + m Wdown^T, norm of that          fp8_linear, add_rms_norm

Where low-rank adapters are beside a product, it is a linear alone, with add_adapters_ behind it, and the norm or the
activation next to it is a launch of its own (rms_norm, add_rms_norm, glu_packed).

A single launch for a whole step, with barriers of the grid between the layers, was tried on an H200 with one sequence:

    value       | case                         | result
    ------------|------------------------------|------------
    one launch  | Llama, 8 billion parameters  | 2 % faster
    one launch  | Qwen2.5, 7 billion           | 4 % slower
    one launch  | Qwen2.5, half a billion      | 59 % slower
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..model.description import Attention, Branch, Description, Layer, Norm, Product
from .attend import UNROTATED, Cache, Tokens, attend
from .source import Quantized, Source, Sum, fp8_linear, normalize, options_of

_ops = torch.ops.llmkernels


def forward(
    parts: Description,
    hidden: Tensor,
    tokens: Tokens,
    caches: Iterable[Cache],
    seen: list[Tensor] | None = None,
) -> Tensor:
    """The logits (B * T, V) behind the tokens whose embeddings are in `hidden` (B * T, H), which may be overwritten.

    The new keys and values are written to `caches`, one for each layer. `seen`: as in run_layers().
    """
    last = _reader(parts.norm, parts.head, adds=seen is None)
    return _logits(parts, _run(parts, hidden, tokens, caches, seen, last)[1])


def run_layers(
    parts: Description,
    hidden: Tensor,
    tokens: Tokens,
    caches: Iterable[Cache],
    seen: list[Tensor] | None = None,
) -> Tensor:
    """`hidden` behind all layers: the one given, overwritten, or another one. `seen` receives what each layer is given,
    and what the last norm makes."""
    return _run(parts, hidden, tokens, caches, seen, _Reader())[0]


class _Reader(NamedTuple):
    """What reads `hidden` next: a product of its norm, with `gated` of [gate | up]. `adds`: its launch may first
    compute `hidden`, a sum."""

    norm: Norm | None = None
    product: Product | None = None
    adds: bool = False
    gated: bool = False


def _reader(norm: Norm | None, product: Product, adds: bool, gated: bool = False) -> _Reader:
    plain = product.scale is None and not product.adapters
    adds = adds and plain and (norm is None or norm.options.kind == "rms_norm")
    return _Reader(norm, product, adds, gated)


def _first_reader(branch: Branch, adds: bool = True) -> _Reader:
    return _reader(branch.pre, branch.first, adds, branch.gated)


def _run(parts: Description, hidden: Tensor, tokens: Tokens, caches, seen, last: _Reader) -> tuple[Tensor, Source]:
    """`hidden` behind all layers, and what `last` reads."""
    first = [_first_reader(layer.branches[0], seen is None and not layer.parallel) for layer in parts.layers]
    source = Source(hidden, first[0].norm)
    for layer, cache, following in zip(parts.layers, caches, [*first[1:], last], strict=True):
        if seen is not None:
            seen.append(hidden.clone())
        hidden, source = _layer(layer, hidden, source, tokens, cache, following)
    if seen is not None:
        seen.append(normalize(hidden, parts.norm))
    return hidden, source


def head(parts: Description, hidden: Tensor) -> Tensor:
    """The logits of what the layers have made, row by row."""
    return _logits(parts, Source(hidden, parts.norm))


def _logits(parts: Description, source: Source) -> Tensor:
    logits = source.linear(parts.head)
    if parts.logit_scale != 1 or parts.logit_softcap != 0:
        logits = _ops.scale_softcap(logits, parts.logit_scale, parts.logit_softcap)
    return logits


def embed(parts: Description, ids: Tensor, hidden: Tensor, positions: Tensor, *counts: Any) -> None:
    """Write the embeddings of the tokens to `hidden` (tokens, H), scaled, with those of their `positions` where a model
    has such, and count them: `counts` are `counters`, `advance`, `positions` and `max_position` of embed_tokens_, which
    may write `positions`."""
    _ops.embed_tokens_(hidden, parts.embedding, ids, parts.embed_scale, *counts)
    if parts.position_embedding is not None:
        table = parts.position_embedding[parts.first_position :]
        _ops.embed_tokens_(hidden, table, positions, accumulate=True)


def make_tables(parts: Description, positions: range, ahead: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin (P, pairs) of these positions, by name.

    `ahead`: the sequences are shorter. A module whose frequencies grow with the length keeps those of a longer sequence
    until it is asked for a shorter one than they begin to grow at, which is where the description's positions end.
    """
    ids = torch.arange(positions.start, positions.stop, device=parts.weight.device)
    return tables_at(parts, ids, ahead and len(positions) == len(parts.positions))


def tables_at(parts: Description, positions: Tensor, is_longest: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """The same at any positions (P,). Computed by the model's module, which repeats those of a pair."""
    weight, count = parts.weight, len(positions)
    found = {}
    attentions = [layer.attention for layer in parts.layers]
    alternates = attentions[0].alternates
    for name in parts.tables:
        kind = [name] if name else []
        given = positions[None] if parts.grids is None else positions.expand(3, 1, -1)
        if is_longest:
            parts.rotary(weight[:1], given[..., :1], *kind)
        pair = parts.rotary(weight[:1], given, *kind)
        rows = (table.reshape(count, -1) for table in pair)
        found[name] = tuple(_of_pairs(table, alternates).to(weight.dtype).contiguous() for table in rows)
    if any(attention.table is None for attention in attentions):
        cos = weight.new_ones(count, attentions[0].head_dim // 2)
        found[UNROTATED] = cos, torch.zeros_like(cos)
    return found


def _of_pairs(table: Tensor, alternates: bool) -> Tensor:
    return table[:, ::2] if alternates else table[:, : table.shape[1] // 2]


def _layer(
    layer: Layer, hidden: Tensor, source: Source, tokens: Tokens, cache, following: _Reader
) -> tuple[Tensor, Source]:
    """`hidden` with the layer's branches added, of which the first reads `source`; and what `following` reads."""
    if layer.parallel:
        sources = [source.normed(), *(Source(normalize(hidden, branch.pre)) for branch in layer.branches[1:])]
        pairs = zip(layer.branches, sources, strict=True)
        blocks = [_block(branch, source, tokens, cache) for branch, source in pairs]
        readers = [_Reader()] * (len(blocks) - 1) + [following]
        for branch, y, reader in zip(layer.branches, blocks, readers, strict=True):
            hidden, source = _add(hidden, y, branch, reader)
        return hidden, source
    readers = [*map(_first_reader, layer.branches[1:]), following]
    for branch, reader in zip(layer.branches, readers, strict=True):
        hidden, source = _add(hidden, _block(branch, source, tokens, cache), branch, reader)
    return hidden, source


def _block(branch: Branch, source: Source, tokens: Tokens, cache) -> Tensor | Quantized:
    """What the last product of a branch, or the norm before that, reads."""
    block = branch.block
    if isinstance(block, Attention):
        return attend(block, source, tokens, cache)
    if block.down.scale is not None and block.gated and block.activation == "silu" and branch.inner is None:
        return Quantized(*_ops.swiglu_fp8_quantize(source.linear(block.up)))
    if block.gated:
        return source.glu(block.up, block.activation)
    return _ops.bias_act(source.linear(block.up), None, block.activation)


def _add(hidden: Tensor, y: Tensor | Quantized, branch: Branch, following: _Reader) -> tuple[Tensor, Source]:
    """hidden + multiplier * post(last product of the branch (inner(y))), and what `following` reads."""
    product, post, norm = branch.last, branch.post, following.norm
    if post is not None:
        added = Sum(hidden, _last(y, branch, hidden.dtype), post, branch.multiplier)
        if following.adds and len(hidden) == 1:
            return (total := torch.empty_like(hidden)), Source(total, norm, sum=added)
        added.add_()
        return hidden, Source(hidden, norm)
    if product.scale is not None:
        return _sum(hidden, _last(y, branch, hidden.dtype), norm)
    if product.adapters:
        y = _last(y, branch, hidden.dtype)
        return _sum(hidden, y if branch.multiplier == 1 else _ops.scale_softcap(y, branch.multiplier, 0), norm)
    y = normalize(y, branch.inner)
    if norm is None or norm.options.kind != "rms_norm" or following.product.adapters:
        _ops.linear_add_(hidden, y, product.weight, product.bias, branch.multiplier, True)
        return hidden, Source(hidden, norm)
    weights = product.weight, product.bias, following.product.weight, norm.weight
    options = norm.options.weight_offset, branch.multiplier, True, following.gated
    return hidden, Source(hidden, norm, _ops.linear_add_scale_(hidden, y, *weights, *options))


def _last(y: Tensor | Quantized, branch: Branch, dtype: torch.dtype) -> Tensor:
    """The last product of a branch."""
    product = branch.last
    if product.adapters:
        return Source(y, branch.inner).linear(product)
    if product.scale is None:
        return _ops.linear(normalize(y, branch.inner), product.weight, product.bias, True)
    return fp8_linear(y if isinstance(y, Quantized) else Source(y, branch.inner).quantized(), product, dtype)


def _sum(hidden: Tensor, y: Tensor, norm: Norm | None) -> tuple[Tensor, Source]:
    """hidden + y, and the norm of that. No op adds alone: without a norm one is computed for nothing."""
    if norm is None:
        return (total := _ops.add_rms_norm(y, hidden)[1]), Source(total)
    if norm.options.kind == "rms_norm":
        normed, total = _ops.add_rms_norm(y, hidden, norm.weight, *options_of(norm))
    else:
        options = norm.weight, norm.bias, norm.eps, norm.options.weight_offset
        normed, total = _ops.add_layer_norm(y, hidden, *options)
    return total, Source(normed)
