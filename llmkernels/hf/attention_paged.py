"""Our attention for transformers' continuous batching (`generate_batch`): `attn_implementation="paged|llmkernels"`.

Tokens of all requests, of prompts or chunks of them and of single steps, lie in a row. Their keys and values are in the
pages of transformers' PagedAttentionCache. Where each request has one token, these are read where they are; else the
cache gathers them in a row, too.

That is for transformers 5.17 and 5.18. Newer ones refuse all attentions but their own there, by name.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.generation.continuous_batching import PagedAttentionCache

from llmkernels.ops.attention import decode_attention
from llmkernels.ops.attention_varlen import attention_varlen

_NO_WINDOW = 1  # of the cache's sliding_windows


def is_supported() -> bool:
    """Whether this transformers takes other attentions than its own for continuous batching."""
    return "read_index" in inspect.signature(PagedAttentionCache.update).parameters


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int = 1,
    max_seqlen_k: int | dict[str, int] = 0,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer: query (1, H, T, D), key and value (1, Hkv, T, D) of the new tokens to y (T, H, D).

    Args:
        cache: transformers' PagedAttentionCache.
        cu_seq_lens_q, cu_seq_lens_k: (N + 1,): where the tokens of each request begin, and its keys, those in the cache
            included; of the latter one for each type of layer, if there are several. So with ``max_seqlen_k``.
        max_seqlen_q: the most tokens of a request. Where batches are padded, requests behind the last one have none.
        read_index, write_index: for each group of layers, the places in the cache of all keys, and of the new ones.
    """
    if cache is None:
        raise ValueError(
            'paged|llmkernels: cache must be that of continuous batching, got None; use "llmkernels" for a forward'
        )
    window = cache.sliding_windows[module.layer_idx]
    if isinstance(cu_seq_lens_k, dict):
        kind = "full_attention" if window == _NO_WINDOW else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    one_token_each = max_seqlen_q == 1 and len(cu_seq_lens_q) == query.shape[2] + 1
    in_pages = window == _NO_WINDOW and read_index[group].numel() > 0 and key.shape == value.shape
    if one_token_each and in_pages and s_aux is None:
        keys, values = cache.key_cache[layer], cache.value_cache[layer]
        for tensor, new in ((keys, key), (values, value)):  # as the cache's update() does, which then gathers all
            tensor.index_copy_(0, write_index[group], new.transpose(1, 2)[0])
        pages = (tensor.unflatten(0, (-1, cache.block_size)) for tensor in (keys, values))
        table = _page_table(read_index[group], cu_seq_lens_k, max_seqlen_k, cache.block_size)
        lengths = cu_seq_lens_k.diff().int()
        y = decode_attention(query.permute(2, 0, 1, 3), *pages, lengths, block_table=table, **options)
        return y[:, 0], None
    places = {"read_index": read_index, "write_index": write_index}
    k, v = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **places)
    q, head_dim = query.transpose(1, 2)[0], value.shape[-1]
    if head_dim < k.shape[-1]:
        v = F.pad(v, (0, k.shape[-1] - head_dim))
    y = attention_varlen(
        q,
        k,
        v,
        cu_seq_lens_q.int(),
        cu_seq_lens_k.int(),
        causal=True,
        window_size=(-1 if window == _NO_WINDOW else window - 1, 0),
        sinks=None if s_aux is None else s_aux.to(q.dtype),
        **options,
    )
    return y[..., :head_dim], None


def _page_table(places: Tensor, begins: Tensor, most: int, page_size: int) -> Tensor:
    """int32 (N, pages): of each request the pages that its keys are in, one after the other. Behind the last ones are
    pages of others, of which nothing is read."""
    first = torch.arange(0, most, page_size, device=places.device)
    keys = (begins[:-1, None] + first).clamp(max=places.numel() - 1)
    return (places[keys] // page_size).int()
