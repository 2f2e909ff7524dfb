"""The ops of a decode step in plain PyTorch, to test against.

Every function has the arguments of the op.
"""

import torch
from torch.nn import functional as F

import oracles


def rms_norm_linear(x, norm_weight, weight, bias=None, eps=1e-6, weight_offset=0.0, cast_before_weight=True):
    x = oracles.rms_norm(x, norm_weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight)
    return F.linear(x, weight, bias)


def decode_layer(
    hidden,
    input_norm,
    qkv_weight,
    qkv_bias,
    o_weight,
    o_bias,
    post_norm,
    gate_up_weight,
    down_weight,
    cos,
    sin,
    positions,
    cache_seqlens,
    cache_leftpad,
    k_cache,
    v_cache,
    block_table,
    heads,
    eps,
    weight_offset,
    cast_before_weight,
    softmax_scale,
    window_left,
    q_norm=None,
    k_norm=None,
):
    """One token for each sequence through one layer of Llama, Qwen2 or Qwen3. `hidden` (B, hidden) is changed in place.

    Heads of q and k are normalized where there is a weight.
    """
    norm = {"eps": eps, "weight_offset": weight_offset, "cast_before_weight": cast_before_weight}
    batch, kv_heads, dim = len(hidden), *k_cache.shape[2:]
    qkv = F.linear(oracles.rms_norm(hidden, input_norm, **norm), qkv_weight, qkv_bias)
    q, k, v = qkv.view(batch, -1, dim).split([heads, kv_heads, kv_heads], 1)
    q, k = (x if w is None else oracles.rms_norm(x, w, **norm) for x, w in ((q, q_norm), (k, k_norm)))
    q, k = rotate(q, k, cos[positions.long()], sin[positions.long()])
    out = torch.zeros_like(q)
    for b in range(batch):
        length = int(cache_seqlens[b])
        slot = length - 1
        if block_table is not None:
            page_size = k_cache.shape[1]
            pages = block_table[b].long()
            k_cache[pages[slot // page_size], slot % page_size] = k[b]
            v_cache[pages[slot // page_size], slot % page_size] = v[b]
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        else:
            k_cache[b, slot], v_cache[b, slot] = k[b], v[b]
            keys, values = k_cache[b, :length], v_cache[b, :length]
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        first = max(first, slot - window_left) if window_left >= 0 else first
        keys, values = (x[first:].repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("hd,shd->hs", q[b].to(wide), keys.to(wide))
        scores *= dim**-0.5 if softmax_scale is None else softmax_scale
        out[b] = torch.einsum("hs,shd->hd", scores.softmax(-1), values.to(wide)).to(out.dtype)
    hidden += F.linear(out.flatten(1), o_weight, o_bias)
    gate, up = F.linear(oracles.rms_norm(hidden, post_norm, **norm), gate_up_weight).chunk(2, -1)
    hidden += F.linear(F.silu(gate) * up, down_weight)


def decode_step(
    hidden,
    input_norms,
    qkv_weights,
    qkv_biases,
    o_weights,
    o_biases,
    post_norms,
    gate_up_weights,
    down_weights,
    norm,
    head,
    head_bias,
    cos,
    sin,
    positions,
    cache_seqlens,
    cache_leftpad,
    k_caches,
    v_caches,
    heads,
    eps,
    weight_offset,
    cast_before_weight,
    softmax_scale,
    windows_left,
    q_norms=None,
    k_norms=None,
):
    """One token for each sequence through a model, lists by layer. Returns the logits; `hidden` is changed in place."""
    none = [None] * len(input_norms)
    weights = (input_norms, qkv_weights, qkv_biases or none, o_weights, o_biases or none)
    weights += (post_norms, gate_up_weights, down_weights)
    places = (cos, sin, positions, cache_seqlens, cache_leftpad)
    options = (heads, eps, weight_offset, cast_before_weight, softmax_scale)
    attention = (k_caches, v_caches, windows_left, q_norms or none, k_norms or none)
    for *layer, k_cache, v_cache, window_left, q_norm, k_norm in zip(*weights, *attention, strict=True):
        decode_layer(hidden, *layer, *places, k_cache, v_cache, None, *options, window_left, q_norm, k_norm)
    return rms_norm_linear(hidden, norm, head, head_bias, eps, weight_offset, cast_before_weight)


def rotate(q, k, cos, sin):
    """(B, H, D) by cos and sin (B, D) or (B, D / 2), half-split."""
    if cos.shape[-1] < q.shape[-1]:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def half(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    return tuple(x * cos[:, None] + half(x) * sin[:, None] for x in (q, k))
