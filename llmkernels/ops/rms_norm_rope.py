"""RMSNorm of queries and keys and rotary embedding, fused: public function, fakes, autograd.

Kernels: csrc/kernels/rope/rms_norm_rope.cu, csrc/cpu/rms_norm_rope.cpp.
"""

import torch
from torch import Tensor

from llmkernels.ops._common import (
    caller,
    common_dtype,
    differentiable_once,
    public,
    refuse_gradients,
    register_autograd,
    register_fake,
    register_vmap,
)
from llmkernels.ops.rms_norm import check_weight, rms_norm
from llmkernels.ops.rope import HEADS_FIRST, at_once, count_writes, empty_like, rope

_ops = torch.ops.llmkernels
_rms_norm_rope = caller("rms_norm_rope")

_NO_GRADIENT = "rms_norm_rope: cos and sin must not require a gradient, there is none for them; detach() them"


@public
def rms_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
    row_wise: bool = False,
    layout: str = "bthd",
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""QK-norm: RMSNorm of queries and keys, then their rotation by their positions, all in one launch.

    Of every head x of a token, or of all its heads as one row if ``row_wise``:

    .. math:: n = x / \sqrt{\mathrm{mean}(x^2) + \mathrm{eps}}, \qquad y = n \cdot (\mathrm{weight\_offset} + w)

    and then for each pair (a, b) of the first R = ``rotary_dim`` elements of a head of y, as in :func:`rope`:

    .. math:: a' = a \cos_a - b \sin_a, \qquad b' = b \cos_b + a \sin_b

    Args:
        q: (B, T, H, D) for layout "bthd", (B, H, T, D) for "bhtd"; float32, float16 or bfloat16, on the CPU also
            float64.
        k: likewise, with any number of heads of its own.
        q_weight, k_weight: (D,), or (H * D,) with the H of ``q`` and of ``k`` if ``row_wise``; or None to only
            normalize.
        cos, sin, position_ids, layout, interleaved, rotary_dim: as in :func:`rope`.
        eps, weight_offset, cast_before_weight: as in :func:`rms_norm`.
        row_wise: whether the norm is taken of all heads of a token together, as OLMo 2 has it, or of each head.
        inplace: write into ``q`` and ``k``, which must not need a gradient, nor overlap themselves, each other or
            another input. They may be slices of one packed q|k|v.

    Returns:
        (q', k') in the memory order of ``q`` and ``k``, or these tensors themselves when ``inplace``. The dtype is that
        of ``q``, also where cos and sin are float32 and ``q`` is not: the rotation is then computed in float32 and
        rounded once. With a weight of another dtype it is that of :func:`rms_norm` (not possible in place).

    Layout: any strides with contiguous heads, so transposed views and slices of a packed q|k|v are read in place.
    Arithmetic: float32 (float64 for float64); y is rounded to the dtype, then each product and each sum of the
        rotation.
    Differentiable: once, in ``q``, ``k`` and both weights (not in ``cos`` and ``sin``), when not in place; saves its
        inputs, nothing else.
    Deterministic: yes, gradients included. A row's bits do not depend on the other rows.
    Matches: ``q_norm``, ``k_norm`` and ``apply_rotary_pos_emb`` of transformers' Qwen3 (the default), Gemma 3
        (``weight_offset=1, cast_before_weight=False``) and OLMo 2 (``row_wise=True, cast_before_weight=False``, and
        float32 cos and sin), rounded where these round.
    Raises: ValueError for an unknown layout, a ``rotary_dim`` that is odd or too large, an ``eps`` that is negative or
        not finite, or such a ``weight_offset``; RuntimeError for shapes, dtypes and devices that do not fit, each by
        name.
    Source: Henry et al. 2020, "Query-Key Normalization for Transformers", with RMSNorm as in Qwen3; Su et al. 2021,
        "RoFormer".

    >>> q = k = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    >>> weight = torch.tensor([1.0, 2.0])
    >>> rms_norm_rope(q, k, weight, weight, cos=torch.zeros(1, 2), sin=torch.ones(1, 2))[0]
    tensor([[[[-2.2627,  0.8485]]]])
    """
    heads_first = HEADS_FIRST.get(layout)
    if heads_first is None:
        raise ValueError(f"rms_norm_rope: layout must be 'bthd' or 'bhtd', got {layout!r}")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise RuntimeError(_NO_GRADIENT)
    options = (eps, weight_offset, cast_before_weight, row_wise, heads_first, interleaved, rotary_dim)
    is_mixed = any(weight is not None and weight.dtype != q.dtype for weight in (q_weight, k_weight))
    if cos.dtype != q.dtype and cos.is_floating_point():
        common = common_dtype("rms_norm_rope", q=q, cos=cos)
        if common == q.dtype or common == torch.float32:
            cos, sin = cos.to(common), sin.to(common)
        else:  # float64
            is_mixed = True
    if inplace:
        message = "inplace must be False where an input requires a gradient, got True"
        weights = {"q_weight": q_weight, "k_weight": k_weight}
        weights = {name: weight for name, weight in weights.items() if weight is not None}
        refuse_gradients("rms_norm_rope", message, q=q, k=k, **weights)
        _ops.rms_norm_rope_(q, k, q_weight, k_weight, cos, sin, position_ids, *options)
        count_writes(q, k)
        return q, k
    if is_mixed and q.is_floating_point() and q.dim() == k.dim() == 4:
        return _mixed(q, k, q_weight, k_weight, cos, sin, position_ids, options, layout)
    return _rms_norm_rope(q, k, q_weight, k_weight, cos, sin, position_ids, *options)


def _mixed(q, k, q_weight, k_weight, cos, sin, position_ids, options, layout) -> tuple[Tensor, Tensor]:
    """Other dtypes than the kernels take: composed of two ops, with the types that eager PyTorch arrives at."""
    eps, weight_offset, cast_before_weight, row_wise, heads_first, interleaved, rotary_dim = options

    def normalize(x: Tensor, name: str, weight: Tensor | None) -> Tensor:
        def norm(rows: Tensor) -> Tensor:
            if weight is not None:
                check_weight("rms_norm_rope", name, weight, rows, "heads * head_dim" if row_wise else "head_dim")
            return rms_norm(rows, weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight)

        if not row_wise:
            return norm(x)
        rows = x.transpose(1, 2) if heads_first else x
        rows = norm(rows.flatten(2)).unflatten(2, rows.shape[2:])
        return rows.transpose(1, 2) if heads_first else rows

    q, k = normalize(q, "q_weight", q_weight), normalize(k, "k_weight", k_weight)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, cos, sin, position_ids, layout=layout, interleaved=interleaved, rotary_dim=rotary_dim)

    # Where the weights have other dtypes than each other, so have q and k now.
    results = rotate(q, k) if q.dtype == k.dtype else [rotate(x, x)[0] for x in (q, k)]
    return tuple(result.to(x.dtype) for result, x in zip(results, (q, k), strict=True))


def _fake(q, k, *options, **named):
    return empty_like(q), empty_like(k)


register_fake("rms_norm_rope", _fake)
register_fake("rms_norm_rope_", lambda *arguments, **named: None, overloads=("",))


def _fake_backward(grad_q, grad_k, q, k, q_weight, k_weight, *others):
    def grad_weight(weight, is_wanted):
        return q.new_empty(weight.shape if weight is not None and is_wanted else (0,))

    *_, needs_grad_q_weight, needs_grad_k_weight = others
    weights = grad_weight(q_weight, needs_grad_q_weight), grad_weight(k_weight, needs_grad_k_weight)
    return *_fake(q, k), *weights


register_fake("rms_norm_rope_backward", _fake_backward, overloads=("",))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]
    ctx.needs_grad_weights = ctx.needs_input_grad[2:4]


@differentiable_once
def _backward(ctx, grad_q, grad_k):
    if any(ctx.needs_input_grad[4:6]):  # rms_norm_rope() cannot see it inside two transforms of torch.func
        raise RuntimeError(_NO_GRADIENT)
    saved = ctx.saved_tensors  # once: under checkpointing they can not be read again
    wanted = [weight is not None and needed for weight, needed in zip(saved[2:4], ctx.needs_grad_weights, strict=True)]
    grad_q, grad_k, *grad_weights = _ops.rms_norm_rope_backward(grad_q, grad_k, *saved, *ctx.options, *wanted)
    grad_weights = (grad if is_wanted else None for grad, is_wanted in zip(grad_weights, wanted, strict=True))
    return grad_q, grad_k, *grad_weights, *(None for _ in range(10))


register_autograd("rms_norm_rope", _backward, _setup_context)


def _at_once(op, size, dims, q, k, q_weight, k_weight, *others):
    """As rope's, where all of the batch share the weights."""
    if dims[2:4] != (None, None):
        return None

    def normed(q, k, *others):
        return op(q, k, q_weight, k_weight, *others)

    return at_once(normed, size, dims[:2] + dims[4:], q, k, *others)


register_vmap("rms_norm_rope", _at_once)
register_vmap("rms_norm_rope_backward", lambda *arguments: None)  # one by one: sums over rows are not of the batch
