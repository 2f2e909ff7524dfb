"""compose.forward in plain PyTorch, to test against: the same arguments, in whatever dtype the description has."""

import torch
from torch.nn import functional as F

import oracles
from llmkernels.hf.model.description import Attention


def forward(parts, hidden, tokens, caches):
    """The logits (B * T, V). `hidden` and the caches are changed in place."""
    for layer, cache in zip(parts.layers, caches, strict=True):
        given = hidden.clone()
        for branch in layer.branches:
            x = norm(given if layer.parallel else hidden, branch.pre)
            hidden += norm(block(branch.block, x, tokens, cache), branch.post) * branch.multiplier
    return softcap(product(norm(hidden, parts.norm), parts.head) * parts.logit_scale, parts.logit_softcap)


def norm(x, norm):
    if norm is None:
        return x
    if norm.options.kind == "layer_norm":
        return oracles.layer_norm(x, norm.weight, norm.bias, norm.eps, weight_offset=norm.options.weight_offset)
    options = {name: getattr(norm.options, name) for name in ("weight_offset", "cast_before_weight")}
    return oracles.rms_norm(x, norm.weight, norm.eps, **options)


def product(x, product):
    return F.linear(x, product.weight, product.bias)


def softcap(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def block(block, x, tokens, cache):
    if isinstance(block, Attention):
        return product(attend(block, product(x, block.qkv), tokens, cache), block.output)
    *gate, up = product(x, block.up).chunk(2 if block.gated else 1, -1)
    y = oracles.ACTIVATIONS[block.activation](*gate) * up if block.gated else oracles.ACTIVATIONS[block.activation](up)
    return product(y, block.down)


def attend(attention, qkv, tokens, cache):
    """Each new token (B * T, heads * D) against the keys up to its own."""
    q, k, v = heads(attention, qkv, tokens)
    group = attention.heads // attention.kv_heads
    out = torch.zeros_like(q)
    for b, length in enumerate(cache.seqlens.tolist()):
        first = 0 if cache.leftpad is None else int(cache.leftpad[b])
        for t in range(tokens.count):
            slot = length - tokens.count + t
            here = place(cache, b, slot)
            cache.k[here], cache.v[here] = k[b, t], v[b, t]
            start = first if attention.window_left < 0 else max(first, slot - attention.window_left)
            seen = place(cache, b, torch.arange(start, slot + 1, device=q.device))
            keys, values = (buffer[seen].repeat_interleave(group, 1) for buffer in (cache.k, cache.v))
            wide = torch.promote_types(q.dtype, torch.float32)
            scores = torch.einsum("hd,shd->hs", q[b, t].to(wide), keys.to(wide)) * attention.scale
            weights = softcap(scores, attention.softcap).softmax(-1)
            out[b, t] = torch.einsum("hs,shd->hd", weights, values.to(wide)).to(out.dtype)
    return out.flatten(0, 1).flatten(1)


def heads(attention, qkv, tokens):
    """q, k and v, each (B, T, heads, D), normalized and rotated."""
    dim = attention.head_dim
    counts = attention.heads, attention.kv_heads, attention.kv_heads
    rows = qkv.split([count * dim for count in counts], 1)
    found = []
    for row, weights in zip(rows, (attention.q_norm, attention.k_norm, None), strict=True):
        row = norm(row, weights) if attention.row_norms else row
        x = row.unflatten(0, (tokens.batch, -1)).unflatten(2, (-1, dim))
        found.append(x if attention.row_norms else norm(x, weights))
    if attention.table is not None:
        cos, sin = tokens.tables[attention.table]
        options = {"interleaved": attention.interleaved, "rotary_dim": 2 * cos.shape[1]}
        found[:2] = oracles.rope(*found[:2], cos, sin, tokens.positions, **options)
    return found


def place(cache, b, slot):
    """The index of slots of sequence b."""
    if cache.block_table is None:
        return b, slot
    size = cache.k.shape[1]
    return cache.block_table[b].long()[slot // size], slot % size
