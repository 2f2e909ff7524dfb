"""Softmax and its logarithm: public functions, fakes, autograd.

Kernels: csrc/kernels/softmax, csrc/cpu/softmax.cpp.
"""

import torch
from torch import Tensor

from llmkernels.ops._common import (
    batched_rows,
    caller,
    common_dtype,
    contiguous_like,
    differentiable_once,
    public,
    register_autograd,
    register_fake,
    register_vmap,
    widened_by_autocast,
)

_ops = torch.ops.llmkernels
_softmax, _log_softmax = caller("softmax"), caller("log_softmax")


@public
def softmax(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    r"""Softmax over the last dimension, of a scaled and masked input.

    .. math:: z = \mathrm{scale} \cdot x + \mathrm{mask}, \qquad y_j = e^{z_j} / \sum_k e^{z_k}

    Args:
        x: (..., N); float32, float16 or bfloat16, on the CPU also float64. N of any size.
        mask: of a shape that broadcasts to that of ``x``. Bool: True where an element takes part. Otherwise it is added
            to the scaled ``x``; a different dtype is promoted first, as in eager PyTorch. Masks as in
            ``torch.nn.functional.scaled_dot_product_attention``.
        scale: factor of ``x``.
        causal: row i of each matrix (R, N) of the last two dimensions takes part up to column i + N - R, the last row
            as a whole, as in flash-attn. Elements beyond are not read.

    Returns:
        y with the shape and device of ``x``, contiguous, in its dtype, or the promoted one where a mask of another is
        added. A row of which nothing takes part, or all of which is -inf, is zero.

    Layout: rows any constant distance apart are read in place; any other layout is copied first, as is a mask whose
        last dimension is not contiguous.
    Arithmetic: float32 (float64 for float64), rounded once.
    Differentiable: once, in ``x``; saves y, nothing else.
    Deterministic: yes. A row's bits do not depend on the other rows.
    Matches: ``torch.softmax(x * scale + mask, -1)``, in which a row without elements is NaN.
    Autocast: on a GPU y is float32, as PyTorch's own is.
    Raises: RuntimeError for other dtypes, a mask that does not broadcast or that requires a gradient, a causal mask of
        less than two dimensions, tensors on different devices; ValueError for a ``scale`` that is not finite.
    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".

    >>> softmax(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([True, False, True]))
    tensor([0.1192, 0.0000, 0.8808])
    """
    if mask is not None and mask.is_floating_point() and mask.dtype != x.dtype:
        common = common_dtype("softmax", x=x, mask=mask)
        x, mask = x.to(common), mask.to(common)
    x, mask = widened_by_autocast(x, mask)
    return _softmax(x, mask, scale, causal)


@public
def log_softmax(x: Tensor, *, scale: float = 1.0) -> Tensor:
    r"""Logarithm of the softmax over the last dimension.

    .. math:: z = \mathrm{scale} \cdot x, \qquad y_j = z_j - \log \sum_k e^{z_k}

    Args:
        x, scale: as in :func:`softmax`.

    Matches: ``torch.log_softmax(x * scale, -1)``, a row that is all -inf included, which is NaN.
    Everything else as in :func:`softmax`.

    >>> log_softmax(torch.tensor([0.0, 0.0]))
    tensor([-0.6931, -0.6931])
    """
    return _log_softmax(*widened_by_autocast(x), scale)


register_fake("softmax", lambda x, *options, **named: contiguous_like(x))
register_fake("log_softmax", lambda x, *options, **named: contiguous_like(x))
register_fake("softmax_backward", lambda grad_y, y, scale: contiguous_like(y), overloads=("",))
register_fake("log_softmax_backward", lambda grad_y, y, scale: contiguous_like(y), overloads=("",))


def _setup_softmax(ctx, inputs, output):
    if any(ctx.needs_input_grad[1:2]):  # torch.library leaves out a mask that is not given
        raise RuntimeError("softmax: mask must not require a gradient")
    _x, _mask, ctx.scale, _causal = inputs
    ctx.save_for_backward(output)


def _setup_log_softmax(ctx, inputs, output):
    _x, ctx.scale = inputs
    ctx.save_for_backward(output)


@differentiable_once
def _softmax_backward(ctx, grad_y):
    return _ops.softmax_backward(grad_y, *ctx.saved_tensors, ctx.scale), None, None, None


@differentiable_once
def _log_softmax_backward(ctx, grad_y):
    return _ops.log_softmax_backward(grad_y, *ctx.saved_tensors, ctx.scale), None


register_autograd("softmax", _softmax_backward, _setup_softmax)
register_autograd("log_softmax", _log_softmax_backward, _setup_log_softmax)


def _batched(op, size, dims, x, mask, scale, causal):
    """At once where x alone has the batch, as its first dimension; a row of its own has no causal mask to see, and a
    mask of more dimensions than a sample would be one for the batch."""
    if dims[0] is None or dims[1] is not None or x.dim() < (3 if causal else 2):
        return None
    if mask is not None and mask.dim() >= x.dim():
        return None
    return op(x.movedim(dims[0], 0), mask, scale, causal), 0


register_vmap("softmax", _batched)
register_vmap("softmax_backward", batched_rows(0, 1))
register_vmap("log_softmax", batched_rows(0))
register_vmap("log_softmax_backward", batched_rows(0, 1))
