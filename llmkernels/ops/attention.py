"""Attention over prompts; that of a decode step against a KV cache, and what fills the cache: public functions, fakes.

Kernels: csrc/kernels/attention, csrc/cpu/flash_attention.cpp, flash_attention_backward.cpp, decode_attention.cpp and
rope_kv_write.cpp. Only attention over prompts has gradients.
"""

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor

from llmkernels.ops._common import (
    caller,
    contiguous_like,
    differentiable_once,
    narrowed_by_autocast,
    public,
    refuse_gradients,
    register_autograd,
    register_fake,
    register_vmap,
)

_ops = torch.ops.llmkernels
_attention = caller("attention")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    k_begin: Tensor | None = None,
    k_end: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    k_begin: Tensor | None = None,
    k_end: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@public
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    k_begin: Tensor | None = None,
    k_end: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention of all tokens of a prompt, or of its last ones, without the matrix of scores in memory.

    The names and the meaning of the arguments are those of flash-attn's ``flash_attn_func``, 2.1 and later. Query i of
    Tq is at position ``p = i + Tk - Tq``, so the last query is at the last key. It sees the keys j with
    ``max(k_begin, p - left) <= j < min(k_end, p + right + 1)``, of which ``k_begin`` and ``k_end`` are numbers of its
    sequence, or its own:

    .. math:: y = \sum_j \frac{e^{s_j}}{e^{sink} + \sum_i e^{s_i}}\, v_j, \qquad
              s_j = \mathrm{softmax\_scale}\; q \cdot k_j + mask_j - slope\, |p - j|

    Args:
        q: (B, Tq, H, D); float32, float16 or bfloat16, on the CPU also float64. On a GPU D is at most 256.
        k, v: (B, Tk, Hkv, D). H is any multiple of Hkv: query head h belongs to kv head h // (H // Hkv).
        causal: a query sees no key after its own position: ``right`` is 0.
        softmax_scale: default 1 / sqrt(D).
        window_size: (left, right): how many keys before and after its own position a query sees; -1: all of them.
        softcap: scores become ``softcap * tanh(score / softcap)``, as in Gemma 2; 0: unchanged.
        k_begin, k_end: int32 (B,) or (B, Tq), on the device of ``q``: the first key that the queries of a sequence see,
            or that each of them sees, and the one behind the last. Default 0 and Tk. One number for a sequence says
            what is padding, before its keys or behind them; one for a query says of which part of the keys it is:
            sequences in a row (:func:`attention_varlen`), chunks, a prefix that all of it sees. Of (B, Tq), neither may
            fall from one query to the next: the sums of those that do are over fewer keys, or other ones. That is not
            checked, since the host would have to wait.
        sinks: (H,), of the dtype of ``q``: a score of every query of a head that has no value, as in gpt-oss. Neither
            ``softmax_scale`` nor ``softcap`` applies to it. Default: none, and no :math:`e^{sink}`.
        attn_mask: anything that can be expanded to (B, H, Tq, Tk), of any strides, as PyTorch takes it, beside what
            the other arguments hide. Of bool: False hides a key. Of float32 or the dtype of ``q``: is added to the
            scores, behind the softcap; a number below -1e30 hides the key, as -inf does.
        alibi_slopes: float32 (H,) or (B, H): what each unit of distance between a query and a key takes from the
            score, as in BLOOM and MPT, behind the softcap.
        return_lse: also return the log of the denominator.

    Returns:
        y, (B, Tq, H, D), contiguous; with ``return_lse`` (y, lse), lse (B, H, Tq), float32 (float64 for float64): the
        natural logarithm of the sum of :math:`e^{s_j}` over the keys that a query sees, and of :math:`e^{sink}`. For a
        query that sees no key y is zeros, and lse the sink, or -inf without one.

    Layout: any strides with contiguous heads, so q, k and v may be slices of a packed projection, or (B, H, T, D)
        transposed; others are copied. Keys and values outside of ``k_begin`` and ``k_end`` of all queries of a sequence
        may be anything, NaN too; those that some see and others do not have to be finite.
    Fast: float16 and bfloat16, by tensor cores; float32 works, slowly. Gradients likewise. With ``attn_mask`` or
        ``alibi_slopes`` the backward on Hopper is that for 8.0. Where a mask lets each query see a range of keys,
        ``k_begin`` and ``k_end`` say the same for less time.
    Arithmetic: float32 (float64 for float64); with tensor cores probabilities are rounded to the dtype before they meet
        the values, and in the backward they and the gradients of scores before they meet another matrix. Rounded once.
    Deterministic: yes, gradients too.
    Differentiable: once, in ``q``, ``k``, ``v`` and ``sinks``, from y and from lse; saves these and the inputs. Not in
        ``attn_mask`` and ``alibi_slopes``, which must not require a gradient. With
        :math:`p_j = e^{s_j - lse}` and :math:`\delta = dy \cdot y - dlse`

        .. math:: dv_j = \sum p_j\, dy, \qquad ds_j = p_j (dy \cdot v_j - \delta), \qquad
                  dsink = -\sum e^{sink - lse}\, \delta

        where the sums are over queries and over the query heads of a kv head; dq and dk follow from ds. A query that
        sees no key gives no gradient but that of its sink.
    Autocast: casts q, k, v and sinks, as it does for ``torch.nn.functional.scaled_dot_product_attention``.
    Matches: ``torch.nn.functional.scaled_dot_product_attention`` with the mask described; its ``is_causal`` aligns the
        first query with the first key instead.
    Raises: ValueError for a ``window_size`` below -1, a negative ``softcap``, numbers that are not finite; RuntimeError
        for shapes, dtypes and devices that do not fit, each by name, and for a mask or slopes that need a gradient.
    Source: Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2"; Press et al. 2021, "ALiBi".

    >>> q = k = v = torch.eye(2).view(1, 2, 1, 2)
    >>> attention(q, k, v, causal=True, softmax_scale=0.0)[0, :, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(f"attention: window_size must be (left, right) of at least -1 each, got {window_size}")
    window = left, 0 if causal else right
    q, k, v, sinks = narrowed_by_autocast(q, k, v, sinks)
    if attn_mask is not None and attn_mask.dtype != torch.float32:  # which is as good with any q
        (attn_mask,) = narrowed_by_autocast(attn_mask)
    y, lse = _attention(q, k, v, k_begin, k_end, sinks, softmax_scale, *window, softcap, attn_mask, alibi_slopes)
    return (y, lse) if return_lse else y


@public
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    r"""Attention of the last tokens of each sequence to all of its keys and values in a cache.

    The names and the meaning of the arguments are those of flash-attn's ``flash_attn_with_kvcache`` with
    ``causal=True``. Query token t of T of sequence b is at position ``i = cache_seqlens[b] - T + t``, and sees the keys
    j with ``max(cache_leftpad[b], i - left) <= j <= i``:

    .. math:: y = \sum_j \mathrm{softmax}_j(\mathrm{softmax\_scale}\; q \cdot k_j)\, v_j

    Args:
        q: (B, T, H, D), rotated; float32, float16 or bfloat16, on the CPU also float64. On a GPU D is at most 512.
        k_cache, v_cache: (B, capacity, Hkv, D); or pages (pages, page_size, Hkv, D) with a ``block_table``. H is any
            multiple of Hkv: query head h belongs to kv head h // (H // Hkv).
        cache_seqlens: int32 (B,), on the device of ``q``: how many keys each sequence has, the T new ones included. If
            there are more than the capacity it raises on the CPU; on a GPU the capacity counts, since the host would
            have to wait for a check.
        cache_leftpad: int32 (B,): the index of the first key after left padding. Default 0.
        block_table: int32 (B, pages of a sequence): key j is in page ``block_table[b, j // page_size]``. A page that
            does not exist raises on the CPU; on a GPU its keys and values are zeros.
        softmax_scale: default 1 / sqrt(D).
        window_size: (left, right): a query sees ``left`` keys before its own; -1: all of them. It sees none after its
            own, so ``right`` is 0, or -1, which means the same here.
        softcap: scores become ``softcap * tanh(score / softcap)``, as in Gemma 2; 0: unchanged.

    Returns:
        y, (B, T, H, D), contiguous. Zeros for a query that sees no key.

    Layout: any strides with contiguous heads. Keys and values from ``cache_seqlens`` on are not read.
    Fast: float16 and bfloat16, D of 64, 96, 128 or 256, every head aligned to 16 bytes, pages a multiple of 16 keys,
        few tokens (H / Hkv * T up to 16 queries share one reading of the keys). Many tokens of a sequence run on the
        kernels of :func:`attention`: with any D that is a multiple of 8 up to 256, and pages of any size, fastest of 8
        keys times a power of two. Everything else works, slowly. :func:`explain` says what runs.
    Arithmetic: float32 (float64 for float64); on the fast path probabilities are rounded to the dtype before they meet
        the values. Rounded once.
    CUDA graphs: cache_seqlens, cache_leftpad and pages are read on the device, so one capture serves all of them; time
        follows the live keys. Launches on several streams, in several graphs or in branches of one may run at the same
        time (they count arrivals in memory of their own, of which there is enough for 2048 streams and captures).
    Deterministic: yes. But which kernel runs and how the keys are split depends on the batch, so the bits of a sequence
        do, too.
    Differentiable: no.
    Matches: ``torch.nn.functional.scaled_dot_product_attention`` with the mask described.
    Raises: ValueError for a ``window_size`` that looks ahead, a negative ``softcap``, numbers that are not finite;
        RuntimeError for shapes, dtypes and devices that do not fit, each by name, and for inputs that need a gradient.
    Source: Dao et al. 2022, "FlashAttention"; Dao et al. 2023, "Flash-Decoding"; Kwon et al. 2023, "PagedAttention".

    >>> k = v = torch.eye(2).view(1, 2, 1, 2)
    >>> decode_attention(torch.zeros(1, 1, 1, 2), k, v, torch.tensor([2], dtype=torch.int32))
    tensor([[[[0.5000, 0.5000]]]])
    """
    refuse_gradients("decode_attention", _NO_GRADIENT, q=q, k_cache=k_cache, v_cache=v_cache)
    left, right = window_size
    if left < -1 or right not in (-1, 0):
        raise ValueError(
            "decode_attention: window_size must be (left, right) with left at least -1 and right -1 or 0, "
            f"got {window_size}"
        )
    return _ops.decode_attention(
        q, k_cache, v_cache, cache_seqlens, cache_leftpad, block_table, softmax_scale, left, softcap
    )


@public
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    row_wise: bool = False,
    rotary_dim: int | None = None,
) -> None:
    r"""Rotate new queries in place and new keys into a KV cache, and copy the values there: one launch.

    With QK-norm each row x of q, or of k, is normalized before its rotation: a head, or all heads of a token together.

    .. math:: n = x / \sqrt{\mathrm{mean}(x^2) + \mathrm{eps}}, \qquad y = n \cdot (\mathrm{weight\_offset} + w)

    Args:
        q: (B, T, H, D), rotated in place; float32, float16 or bfloat16, on the CPU also float64. D is even.
        k, v: (B, T, Hkv, D), not changed.
        cos, sin: tables (P, R), or (P, R/2) with one angle per pair.
        position_ids: (T,), (1, T) or (B, T), int32 or int64: rows of the tables, as in :func:`llmkernels.rope`. A
            position outside [0, P) raises on the CPU; on a GPU it makes that token NaN.
        k_cache, v_cache, block_table: as in :func:`decode_attention`; written in place.
        cache_seqlens: int32 (B,): how many keys each sequence has with the T new ones, as in
            :func:`decode_attention`: token t of sequence b becomes key ``cache_seqlens[b] - T + t``. A token with a
            negative index, or one beyond the capacity, is not written.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + R/2).
        q_norm_weight, k_norm_weight: (D,), w for the heads of ``q`` and of ``k``; with ``row_wise`` (H * D,) and
            (Hkv * D,). Those without a weight are not normalized (unlike in :func:`rms_norm_rope`); a norm without
            weights has ones.
        eps, weight_offset, cast_before_weight: of the norms, as in :func:`rms_norm`.
        row_wise: normalize all heads of a token together instead of each by itself, as OLMo 2 does.
        rotary_dim: R, even: the first R elements of a head are rotated, as Phi-4-mini has it; default D.

    Layout: any strides with contiguous heads, so q, k and v may be slices of a packed projection.
    Arithmetic: float32 (float64 for float64); y is rounded to the dtype, then each product and the sum of the rotation.
    Deterministic: yes.
    Differentiable: no.
    Matches: ``apply_rotary_pos_emb`` of transformers' Llama and Qwen2, bit for bit; with norms that of Qwen3 (the
        default) and Gemma 3 (``weight_offset=1, cast_before_weight=False``) after ``q_norm`` and ``k_norm``, rounded
        where these round, as in :func:`rms_norm_rope`; that of OLMo 2 (``row_wise=True, cast_before_weight=False``)
        where its cos and sin have the dtype of ``q``.
    Raises: ValueError for an ``eps`` that is negative or not finite, a ``weight_offset`` that is not, or a
        ``rotary_dim`` that is odd or too large; RuntimeError for shapes, dtypes and devices that do not fit, each by
        name, for ``q`` or caches that overlap themselves, each other or another input, and for inputs that need a
        gradient.
    """
    weights = {"q_norm_weight": q_norm_weight, "k_norm_weight": k_norm_weight}
    tensors = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache}
    tensors |= {name: weight for name, weight in weights.items() if weight is not None}
    refuse_gradients("rope_kv_write", _NO_GRADIENT, **tensors)
    options = (*weights.values(), eps, weight_offset, cast_before_weight, row_wise, rotary_dim)
    places = (k_cache, v_cache, cache_seqlens, block_table)
    _ops.rope_kv_write(q, k, v, cos, sin, position_ids, *places, interleaved, *options)
    if not torch.compiler.is_compiling():  # nobody else tells autograd of the writes
        torch.autograd.graph.increment_version([x for x in (q, k_cache, v_cache) if not x.is_inference()])


_NO_GRADIENT = "{name} must not require a gradient, there is none for it; use no_grad()"


def _lse_like(q: Tensor) -> Tensor:
    sizes = q.shape[0], q.shape[2], q.shape[1]
    return q.new_empty(sizes, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


register_fake("attention", lambda q, *others, **named: (contiguous_like(q), _lse_like(q)))
register_fake(
    "attention_backward",
    lambda grad_y, grad_lse, q, k, v, y, lse, k_begin, k_end, sinks, *options, **named: (
        *map(contiguous_like, (q, k, v)),
        q.new_empty(0 if sinks is None else q.shape[2]),
    ),
    overloads=("",),
)


def _setup(ctx, inputs, output):
    tensors, ctx.options, bias = inputs[:6], inputs[6:10], inputs[10:]  # the last may lack those that were not given
    for name, needed in zip(("attn_mask", "alibi_slopes"), ctx.needs_input_grad[10:], strict=False):
        if needed:
            raise RuntimeError(f"attention: {_NO_GRADIENT.format(name=name)}")
    ctx.set_materialize_grads(False)
    q, k, v, *others = tensors
    ctx.save_for_backward(q, k, v, *output, *others, *bias)


@differentiable_once
def _backward(ctx, grad_y, grad_lse):
    q, k, v, y, lse, k_begin, k_end, sinks, *bias = ctx.saved_tensors
    if grad_y is None and grad_lse is None:
        return (None,) * (10 + len(bias))
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    options = k_begin, k_end, sinks, *ctx.options, *bias
    *grads, grad_sinks = _ops.attention_backward(grad_y, grad_lse, q, k, v, y, lse, *options)
    return (*grads, None, None, None if sinks is None else grad_sinks, *(None,) * (4 + len(bias)))


register_autograd("attention", _backward, _setup)
register_vmap("attention", lambda *call: None)  # one by one
register_vmap("attention_backward", lambda *call: None)


def _fake(name: str, fake: Callable) -> None:
    register_fake(name, fake, overloads=("",))


_fake("decode_attention", lambda q, *others, **named: contiguous_like(q))
_fake("rope_kv_write", lambda *arguments, **named: None)
_fake(
    "rope_decode_attention",
    lambda qkv, cos, sin, positions, seqlens, leftpad, k_cache, v_cache, block_table, heads, *options, **named: (
        qkv.new_empty(qkv.shape[0], heads * k_cache.shape[3])
    ),
)
