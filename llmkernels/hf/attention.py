"""Our attention as an implementation of transformers: `attn_implementation="llmkernels"`.

An attention layer of transformers gets its mask from the function that is registered with its implementation. Ours says
in a small tensor of int32 what the kernel has to know, where that is enough:

    None            causal (or all to all, of a model that is not causal), without padding
    (B, W, S, 1)    causal; the first key of each sequence that is not padding. There are S keys, of which a query sees
                    W, its own included; without a window W is S. They are sizes alone, the values do not vary there.

It has 4 dimensions, since generate makes the masks of static caches itself, and gives them to the model: one of fewer
dimensions would be taken for the padding there.

All else is the mask of 4 dimensions that PyTorch's attention takes. Where that of a prompt lets each query see the keys
of one range, and the ranges rise with the queries (padding behind the tokens, packed sequences, chunks, prefixes), the
mask carries the ranges along, and the kernel takes these. A model that makes another mask of it loses them, and is
right. Other masks (padding amid the tokens, masks of the caller, static caches, which are longer than what they hold)
go to PyTorch's attention, which takes less time for them; but with a softcap or sinks, where PyTorch would need all
scores in memory, the kernel takes them, too. To PyTorch goes what the kernel does not do: dropout, values with heads of
another size than the keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from llmkernels.ops._common import narrowed_by_autocast
from llmkernels.ops.attention import attention, decode_attention

from . import attention_paged

NAME = "llmkernels"
PAGED = f"paged|{NAME}"  # of continuous batching
MAX_HEAD_DIM = 256  # of the kernel on a GPU
_RANGES = "_llmkernels_ranges"  # of a mask: an attribute of the tensor, which no tensor made of it has
MAX_DECODE_QUERIES = 16  # of a key head and sequence, which decode_attention reads the keys once for


def register_attention() -> None:
    """Makes `attn_implementation="llmkernels"` known to transformers, for models that are loaded, or set, from now on.

    >>> register_attention()
    >>> from transformers import AttentionInterface
    >>> "llmkernels" in AttentionInterface()
    True
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    if attention_paged.is_supported():
        AttentionInterface.register(PAGED, attention_paged.paged_attention_forward)  # which takes no mask


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """The mask of a forward, as the module says; see `transformers.masking_utils.sdpa_mask` for the arguments."""
    mask_function = mask_function or causal_mask_function
    simple = allow_is_causal_skip and isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if simple and not torch.compiler.is_compiling() and _sees_window(mask_function, local_size):
        device = options.get("device", "cpu")
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].to(device)
        starts, known = _starts(padding)
        window = kv_length if local_size is None else min(local_size, kv_length)
        if known and starts is None and window < kv_length:
            starts = torch.zeros(batch_size, dtype=torch.int32, device=device)
        if known:
            return None if starts is None else starts.view(-1, 1, 1, 1).expand(-1, window, kv_length, 1)
    mask = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        local_size=local_size,
        # Without a mask, PyTorch's attention is not told of a window.
        allow_is_causal_skip=allow_is_causal_skip and simple and q_length == kv_length,
        **options,
    )
    if mask is not None and q_length == kv_length and q_length > 1 and not _is_recorded(mask):
        _attach_ranges(mask)
    return mask


def _is_recorded(tensor: Tensor) -> bool:
    """Whether nobody may look at values: a compiler traces, or a CUDA graph is captured."""
    return torch.compiler.is_compiling() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _attach_ranges(mask: Tensor) -> None:
    """Notes at a mask (B, 1, Tq, Tk) which keys each query sees, if they are a range, and neither end of it falls from
    one query to the next: int32 (B, Tq) each. Not at one of inference mode, to which anybody may write unnoticed."""
    if mask.is_inference() or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        return
    rows, keys = mask[:, 0], torch.arange(mask.shape[3], device=mask.device)
    begin = rows.to(torch.uint8).argmax(-1)
    end = begin + rows.sum(-1)
    is_range = (rows == ((keys >= begin[..., None]) & (keys < end[..., None]))).all()
    rises = (begin.diff(dim=1) >= 0).all() & (end.diff(dim=1) >= 0).all()
    if bool(is_range & rises):
        setattr(mask, _RANGES, (begin.to(torch.int32), end.to(torch.int32), mask._version))


def _ranges(mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The ranges that a mask carries, if nobody has written to it since."""
    if mask is None or torch.compiler.is_compiling():
        return None
    begin, end, version = getattr(mask, _RANGES, (None, None, -1))
    return None if begin is None or version != mask._version else (begin, end)


def _sees_window(mask_function: Callable, local_size: int | None) -> bool:
    """Whether query q sees the keys k with q - local_size < k <= q, or all k <= q without a size: what a few of them
    see tells, since a mask function is one of positions alone where no mask may be left out."""
    if local_size is None:
        return mask_function is causal_mask_function
    with torch.device("cpu"):  # whatever the default device is: nothing waits for it, or needs its memory
        queries = torch.tensor([0, 1, local_size - 1, local_size, local_size + 1, 2 * local_size, 3 * local_size + 1])
        near = torch.tensor([-local_size - 1, -local_size, 1 - local_size, -1, 0, 1])
        zero = torch.zeros((), dtype=torch.int64)
    q, k = queries.repeat_interleave(len(near)), (queries[:, None] + near).flatten()
    q, k = q[k >= 0], k[k >= 0]
    try:
        sees = mask_function(zero, zero, q, k)
    except (RuntimeError, IndexError, TypeError):
        return False
    return bool((sees == ((k <= q) & (k > q - local_size))).all())


def _starts(padding: Tensor | None) -> tuple[Tensor | None, bool]:
    """The first token of each sequence, None if it is the first of all; and whether that says all of the padding."""
    if padding is None or bool(padding.all()):
        return None, True
    starts = padding.to(torch.int32).argmax(1)
    columns = torch.arange(padding.shape[1], device=padding.device)
    return starts.to(torch.int32), bool((padding == (columns >= starts[:, None])).all())


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer: query (B, H, T, D), key and value (B, Hkv, keys, D) to y (B, T, H, D)."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    starts = window = None
    if _is_small(attention_mask) and key.shape[2] > 1:
        _, window, keys, _ = attention_mask.shape
        if keys != key.shape[2]:
            raise RuntimeError(f"attention_forward: attention_mask must be for {key.shape[2]} keys, got {keys}")
        causal, starts = True, attention_mask[:, 0, 0, 0]
        window = window if window < keys else None
        attention_mask = None
    ranges = _ranges(attention_mask)
    if ranges is not None and attention_mask.shape != (query.shape[0], 1, query.shape[2], key.shape[2]):
        ranges = None  # PyTorch may know what is meant
    query, key, value = narrowed_by_autocast(query, key, value)
    sinks = None if s_aux is None else s_aux.to(query.dtype)
    any_mask = attention_mask is not None and ranges is None
    takes_mask = any_mask and bool(softcap or sinks is not None) and _takes(attention_mask, query)
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
    if (
        (any_mask and not takes_mask)
        or position_bias is not None
        or dropout > 0
        or key.shape[-1] != value.shape[-1]
        or (query.is_cuda and query.shape[-1] > MAX_HEAD_DIM)
        or any(t.dtype != query.dtype for t in tensors)
    ):
        y = _by_torch(
            query, key, value, attention_mask, position_bias, causal, starts, window, scaling, softcap, sinks, dropout
        )
        return y.transpose(1, 2).contiguous(), None
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if ranges is not None or takes_mask:
        begin, end = ranges or (None, None)
        mask = attention_mask if takes_mask else None
        options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": sinks}
        return attention(q, k, v, k_begin=begin, k_end=end, attn_mask=mask, **options), None
    options = {
        "softmax_scale": scaling,
        "window_size": (-1 if window is None else window - 1, 0 if causal else -1),
        "softcap": softcap or 0.0,
    }
    few = q.shape[1] * q.shape[2] // k.shape[2] <= MAX_DECODE_QUERIES
    if few and q.is_cuda and causal and sinks is None and not (torch.is_grad_enabled() and _requires_grad(q, k, v)):
        lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        return decode_attention(q, k, v, lengths, cache_leftpad=starts, **options), None
    return attention(q, k, v, k_begin=starts, sinks=sinks, **options), None


def _is_small(mask: Tensor | None) -> bool:
    """Whether it is one with the first keys and the sizes: others are of bool or floats, and have all keys last."""
    return mask is not None and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[3] == 1


def _takes(mask: Tensor, query: Tensor) -> bool:
    """Whether the kernel takes a mask of 4 dimensions."""
    return mask.dtype in (torch.bool, torch.float32, query.dtype) and not mask.requires_grad


def _requires_grad(*tensors: Tensor) -> bool:
    return any(t.requires_grad for t in tensors)


def _by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    starts: Tensor | None,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """The same by PyTorch, with its gradients and dropout: y (B, H, T, D)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if mask is None and (causal or starts is not None):
        keys = torch.arange(key.shape[2], device=query.device)
        positions = keys[key.shape[2] - query.shape[2] :, None]
        mask = keys <= positions
        if window is not None:
            mask = mask & (keys > positions - window)
        if starts is not None:
            mask = mask & (keys >= starts[:, None, None, None])
    if not softcap and sinks is None:
        if bias is not None and mask is not None:
            mask = torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias
        mask = bias if mask is None else mask
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].nan_to_num(0.0)
    return F.dropout(weights.to(query.dtype), dropout) @ value


# What is registered under each name.
ATTENTIONS = {NAME: attention_forward, PAGED: attention_paged.paged_attention_forward}
MASKS = {NAME: attention_mask}
