"""RMSNorm, alone or after a residual add: public functions, fakes, autograd.

Kernels: csrc/kernels/norm, csrc/cpu/norm.cpp.
"""

import torch
from torch import Tensor

from llmkernels.ops._common import (
    added,
    batched_rows,
    caller,
    common_dtype,
    contiguous_like,
    differentiable_once,
    public,
    register_autograd,
    register_fake,
    register_vmap,
)

_ops = torch.ops.llmkernels
_rms_norm, _add_rms_norm = caller("rms_norm"), caller("add_rms_norm")


@public
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
) -> Tensor:
    r"""Root-mean-square normalization over the last dimension.

    .. math:: n = x / \sqrt{\mathrm{mean}(x^2) + \mathrm{eps}}, \qquad y = n \cdot (\mathrm{weight\_offset} + w)

    Args:
        x: (..., N); float32, float16 or bfloat16, on the CPU also float64. N of any size.
        weight: (N,), or None to only normalize.
        eps: added to the mean of the squares.
        weight_offset: 1 for Gemma's (1 + w), else 0.
        cast_before_weight: round n to the dtype of ``x`` before the multiplication by the weight.

    Returns:
        y with the shape and device of ``x``, contiguous. Its dtype is that of ``x``; with a weight of another dtype it
        is what eager PyTorch makes of it: their common type when ``cast_before_weight``, else that of ``x``.

    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Arithmetic: float32 (float64 for float64).
    Differentiable: once, in ``x`` and ``weight``; saves both, nothing else. The gradient of the weight is that of what
        it was multiplied by, n rounded or not, as in eager autograd.
    Deterministic: yes, gradients included. A row's bits do not depend on the other rows.
    Matches: with ``cast_before_weight`` (default) ``LlamaRMSNorm`` and ``Qwen2RMSNorm`` of transformers, which round
        before they multiply; without it ``torch.nn.functional.rms_norm``, and with ``weight_offset=1``
        ``GemmaRMSNorm``.
    Raises: RuntimeError for other dtypes, a weight that is not (N,), or tensors on different devices; ValueError for
        an ``eps`` that is negative or not finite, or such a ``weight_offset``.
    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]))
    tensor([0.8485, 2.2627])
    """
    if _is_mixed(x, weight):
        return _mixed(x, weight, eps, weight_offset, cast_before_weight)
    return _rms_norm(x, weight, eps, weight_offset, cast_before_weight)


@public
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""Residual add, then RMSNorm: ``s = x + residual``, ``y = rms_norm(s)``, in one pass over memory.

    Args:
        x, residual: (..., N), of one shape. Everything else as in :func:`rms_norm`.

    Returns:
        (y, s), both contiguous: the normalized output and the residual stream for the next block, in the order of
        flash-attn and vLLM. s is rounded to the dtype before it is normalized. ``x`` and ``residual`` are not changed;
        when their dtypes differ they are promoted first, as eager addition does.

    Matches: ``s = residual + x; y = rms_norm(s)``, s bit for bit.
    Differentiable, deterministic, layout, raises: as :func:`rms_norm`.

    >>> add_rms_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]))
    (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    if x.dtype != residual.dtype:
        common = common_dtype("add_rms_norm", x=x, residual=residual)
        x, residual = x.to(common), residual.to(common)
    if _is_mixed(x, weight):
        s = added("add_rms_norm", x, residual)
        return _mixed(s, weight, eps, weight_offset, cast_before_weight), s
    return _add_rms_norm(x, residual, weight, eps, weight_offset, cast_before_weight)


def _is_mixed(x: Tensor, weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype != x.dtype and x.is_floating_point()


def _mixed(x: Tensor, weight: Tensor, eps: float, weight_offset: float, cast_before_weight: bool) -> Tensor:
    """A weight of another dtype: composed of two ops, with the types that eager PyTorch arrives at."""
    common = common_dtype("rms_norm", x=x, weight=weight)
    wide = torch.promote_types(common, torch.float32)
    n = rms_norm(x if cast_before_weight else x.to(wide), None, eps, weight_offset=weight_offset)
    check_weight("rms_norm", "weight", weight, x)
    y = n.to(wide) * (weight_offset + weight.to(wide))
    return y.to(common if cast_before_weight else x.dtype)


def check_weight(op: str, name: str, weight: Tensor, x: Tensor, source: str = "x.size(-1)") -> None:
    """As the ops check a weight of the dtype of x. PyTorch would broadcast it."""
    if weight.shape != x.shape[-1:]:
        expected, got = list(x.shape[-1:]), list(weight.shape)
        raise RuntimeError(f"{op}: {name} must have shape {expected} ({source}), got {got}")
    if weight.device != x.device:
        raise RuntimeError(f"{op}: {name} must be on {x.device}, got {weight.device}")


register_fake("rms_norm", lambda x, *options, **named: contiguous_like(x))
register_fake("add_rms_norm", lambda x, *options, **named: (contiguous_like(x), contiguous_like(x)))


def _fake_backward(grad_y, x, weight, grad_sum, eps, weight_offset, cast_before_weight, needs_grad_weight):
    has_grad_weight = weight is not None and needs_grad_weight
    return contiguous_like(x), x.new_empty(weight.shape if has_grad_weight else (0,))


register_fake("rms_norm_add_", lambda *arguments, **named: None, overloads=("",))
register_fake("rms_norm_backward", _fake_backward, overloads=("",))


def _setup_rms_norm(ctx, inputs, output):
    x, weight, *ctx.options = inputs
    ctx.save_for_backward(x, weight)
    ctx.needs_grad_weight = ctx.needs_input_grad[1]


def _setup_add_rms_norm(ctx, inputs, output):
    _x, _residual, weight, *ctx.options = inputs
    _y, s = output
    ctx.save_for_backward(s, weight)
    ctx.needs_grad_weight = ctx.needs_input_grad[2]


def _gradients(ctx, grad_y, grad_sum):
    """(grad_x, grad_weight), None where it is not wanted."""
    x, weight = ctx.saved_tensors
    needs_grad_weight = weight is not None and ctx.needs_grad_weight
    grad_x, grad_weight = _ops.rms_norm_backward(grad_y, x, weight, grad_sum, *ctx.options, needs_grad_weight)
    return grad_x, grad_weight if needs_grad_weight else None


@differentiable_once
def _rms_norm_backward(ctx, grad_y):
    return *_gradients(ctx, grad_y, None), None, None, None


@differentiable_once
def _add_rms_norm_backward(ctx, grad_y, grad_sum):
    grad_x, grad_weight = _gradients(ctx, grad_y, grad_sum)
    return grad_x, grad_x, grad_weight, None, None, None


register_autograd("rms_norm", _rms_norm_backward, _setup_rms_norm)
register_autograd("add_rms_norm", _add_rms_norm_backward, _setup_add_rms_norm)


def _batched_backward(op, size, dims, *args):
    *_, needs_grad_weight = args
    found = None if needs_grad_weight else batched_rows(0, 1, 3)(op, size, dims, *args)
    return found and (found[0], (0, None))


register_vmap("rms_norm", batched_rows(0))
register_vmap("add_rms_norm", batched_rows(0, 1))
register_vmap("rms_norm_backward", _batched_backward)
