"""Attention of sequences that are packed in a row, by `attention` with a range of keys for each query."""

from typing import Literal, overload

import torch
from torch import Tensor

from llmkernels.ops._common import caller, narrowed_by_autocast, public

_attention = caller("attention")


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@public
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of sequences of any lengths, packed in a row without padding: each sees itself alone.

    The names and the meaning of the arguments are those of flash-attn's ``flash_attn_varlen_func``, which needs the
    longest lengths besides. Sequence n has the queries from ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1]`` and the keys
    from ``cu_seqlens_k[n]`` to ``cu_seqlens_k[n + 1]``; of these it is what :func:`attention` computes: its last query
    is at the position of its last key.

    .. math:: y = \sum_j \frac{e^{s_j}}{e^{sink} + \sum_i e^{s_i}}\, v_j, \qquad
              s_j = \mathrm{softmax\_scale}\; q \cdot k_j

    Args:
        q: (total_q, H, D); float32, float16 or bfloat16, on the CPU also float64. On a GPU D is at most 256.
        k, v: (total_k, Hkv, D). H is any multiple of Hkv: query head h belongs to kv head h // (H // Hkv).
        cu_seqlens_q: int32 (N + 1,), on the device of ``q``: where each of N sequences begins, and the last one ends.
            It begins with 0 and does not fall, which is not checked, since the host would have to wait. A sequence may
            be empty.
        cu_seqlens_k: the same of the keys. Default: ``cu_seqlens_q``.
        causal, softmax_scale, window_size, softcap, sinks: as in :func:`attention`.
        alibi_slopes: float32 (H,), as in :func:`attention`. Keys have to be those of the queries' sequences: with
            ``cu_seqlens_k``, if it is given, the same tensor as ``cu_seqlens_q``.
        return_lse: also return the log of the denominator.

    Returns:
        y, (total_q, H, D), contiguous; with ``return_lse`` (y, lse), lse (H, total_q), float32 (float64 for float64).
        For a query that sees no key, those behind the last sequence among them, y is zeros, and lse the sink, or -inf
        without one.

    Layout, Fast, Arithmetic, Deterministic, Differentiable, Autocast: as :func:`attention`. A tile of queries that has
        parts of several sequences goes over the keys of all of them, so that keys and values of neighbours have to be
        finite.
    CUDA graphs: the lengths are read on the device, so one capture serves any of the same totals.
    Matches: ``torch.nn.functional.scaled_dot_product_attention`` of each sequence, with the mask that
        :func:`attention` describes.
    Raises: ValueError for a ``window_size`` below -1, a negative ``softcap``, numbers that are not finite; RuntimeError
        for shapes, dtypes and devices that do not fit, each by name, and for slopes that need a gradient.
    Source: Dao 2023, "FlashAttention-2"; Press et al. 2021, "ALiBi".

    >>> q = k = v = torch.eye(3).view(3, 1, 3)
    >>> lengths = torch.tensor([0, 1, 3], dtype=torch.int32)  # one token, and two
    >>> attention_varlen(q, k, v, lengths, causal=True, softmax_scale=0.0)[:, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.0000, 1.0000, 0.0000],
            [0.0000, 0.5000, 0.5000]])
    """
    for name, x, axes in (("q", q, "(total_q, heads, head_dim)"), ("k", k, "(total_k, kv_heads, head_dim)")):
        if x.dim() != 3:
            raise RuntimeError(f"attention_varlen: {name} must have shape {axes}, got {list(x.shape)}")
    if v.shape != k.shape:
        raise RuntimeError(f"attention_varlen: v must have the shape of k, {list(k.shape)}, got {list(v.shape)}")
    if k.size(2) != q.size(2):
        raise RuntimeError(f"attention_varlen: k must have the head_dim of q, {q.size(2)}, got shape {list(k.shape)}")
    _check_lengths("cu_seqlens_q", cu_seqlens_q, q)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q, same_keys=cu_seqlens_k is cu_seqlens_q and k.size(0) == q.size(0))
    _check_lengths("cu_seqlens_k", cu_seqlens_k, q)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected, got = list(cu_seqlens_q.shape), list(cu_seqlens_k.shape)
        raise RuntimeError(f"attention_varlen: cu_seqlens_k must have the shape of cu_seqlens_q, {expected}, got {got}")
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(f"attention_varlen: window_size must be (left, right) of at least -1 each, got {window_size}")

    k_begin, k_end = _ranges(q.size(0), k.size(0), cu_seqlens_q, cu_seqlens_k, left, 0 if causal else right)
    q, k, v, sinks = narrowed_by_autocast(q, k, v, sinks)
    q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    y, lse = _attention(q, k, v, k_begin, k_end, sinks, softmax_scale, -1, -1, softcap, None, alibi_slopes)
    return (y.squeeze(0), lse.squeeze(0)) if return_lse else y.squeeze(0)


def _check_lengths(name: str, cu_seqlens: Tensor, q: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise RuntimeError(f"attention_varlen: {name} must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.size(0) == 0:
        got = list(cu_seqlens.shape)
        raise RuntimeError(f"attention_varlen: {name} must have shape (sequences + 1,), got {got}")
    if cu_seqlens.device != q.device:
        expected = f"the device of q, {q.device}"
        raise RuntimeError(f"attention_varlen: {name} must be on {expected}, got {cu_seqlens.device}")


def _check_slopes(slopes: Tensor, q: Tensor, same_keys: bool) -> None:
    """The distance of a query to a key is that of their places in the row, if each sequence has the same in both."""
    if slopes.shape != q.shape[1:2]:
        raise RuntimeError(
            f"attention_varlen: alibi_slopes must have shape [{q.size(1)}] (heads), got {list(slopes.shape)}"
        )
    if not same_keys:
        raise RuntimeError(
            "attention_varlen: alibi_slopes must come with the same sequences in q and k: cu_seqlens_k None or "
            "cu_seqlens_q itself, and as many tokens"
        )


def _ranges(
    q_tokens: int, k_tokens: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """The first key that each query sees, and the one behind the last: (1, total_q). A query behind the last sequence
    is of an empty one, which begins and ends where that ends."""
    query = torch.arange(q_tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), query, right=True)
    next_one = (sequence + 1).clamp(max=cu_seqlens_q.size(0) - 1)
    begin, end = cu_seqlens_k[sequence], cu_seqlens_k[next_one]
    position = query + (end - cu_seqlens_q[next_one])  # of its last query: that of the last key
    if right >= 0:
        behind = position + (min(right, q_tokens + k_tokens) + 1)
        end = torch.minimum(end, torch.maximum(begin, behind))
    if left >= 0:
        begin = torch.maximum(begin, position - min(left, k_tokens))
    return begin.unsqueeze(0), end.unsqueeze(0)
