"""LayerNorm, alone or after a residual add: public functions, fakes, autograd.

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
    widened_by_autocast,
)

_ops = torch.ops.llmkernels
_layer_norm, _add_layer_norm = caller("layer_norm"), caller("add_layer_norm")


@public
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    r"""Layer normalization over the last dimension.

    .. math::
        y = \frac{x - m}{\sqrt{\mathrm{mean}((x - m)^2) + \mathrm{eps}}} \cdot (\mathrm{weight\_offset} + w) + b,
        \qquad m = \mathrm{mean}(x)

    Args:
        x: (..., N); float32, float16 or bfloat16, on the CPU also float64. N of any size.
        weight, bias: (N,), or None for 1 and 0; each of them without the other, too.
        eps: added to the variance.
        weight_offset: added to the weight, if there is one, and the sum rounded: 1 for Nemotron's (1 + w).

    Returns:
        y with the shape, dtype and device of ``x``, contiguous.

    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Arithmetic: float32 (float64 for float64), one rounding. Neither a large mean nor elements far from the others
        cost the variance accuracy; a row of equal numbers gives the bias exactly.
    Differentiable: once, in ``x``, ``weight`` and ``bias``; saves ``x`` and ``weight``, nothing else.
    Deterministic: yes, gradients included. A row's bits do not depend on the other rows.
    Matches: ``torch.nn.functional.layer_norm(x, x.shape[-1:], weight + weight_offset, bias, eps)``. A weight or bias of
        another dtype is computed with in the common type, and y rounded to that of ``x``.
    Autocast: on a GPU y is float32, as PyTorch's own is.
    Raises: RuntimeError for other dtypes, a weight or bias that is not (N,), or tensors on different devices;
        ValueError for an ``eps`` that is negative or not finite, or a ``weight_offset`` that is not finite.
    Source: Ba, Kiros and Hinton 2016, "Layer Normalization".

    >>> layer_norm(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
    tensor([-1.0000,  3.0000])
    """
    x, weight, bias = widened_by_autocast(x, weight, bias)
    if _is_mixed(x, weight, bias):
        return _mixed(x, weight, bias, eps, weight_offset)
    return _layer_norm(x, weight, bias, eps, weight_offset)


@public
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""Residual add, then LayerNorm: ``s = x + residual``, ``y = layer_norm(s)``, in one pass over memory.

    Args:
        x, residual: (..., N), of one shape. Everything else as in :func:`layer_norm`.

    Returns:
        (y, s), both contiguous: the normalized output and the residual stream for the next block. s is rounded to the
        dtype before it is normalized. ``x`` and ``residual`` are not changed; when their dtypes differ they are
        promoted first, as eager addition does.

    Matches: ``s = residual + x; y = layer_norm(s)``, s bit for bit.
    Differentiable, deterministic, layout, autocast, raises: as :func:`layer_norm`.

    >>> add_layer_norm(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
    (tensor([-1.0000,  1.0000]), tensor([1., 3.]))
    """
    if x.dtype != residual.dtype:
        common = common_dtype("add_layer_norm", x=x, residual=residual)
        x, residual = x.to(common), residual.to(common)
    (wide_x,) = widened_by_autocast(x)
    if wide_x.dtype != x.dtype or _is_mixed(x, weight, bias):
        s = added("add_layer_norm", x, residual)
        return layer_norm(s, weight, bias, eps, weight_offset=weight_offset), s
    return _add_layer_norm(x, residual, weight, bias, eps, weight_offset)


def _is_mixed(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    others = (weight is not None and weight.dtype != x.dtype) or (bias is not None and bias.dtype != x.dtype)
    return others and x.is_floating_point()


def _mixed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    """A weight or bias of another dtype: computed in the type that holds all of them."""
    common = common_dtype("layer_norm", x=x, weight=weight, bias=bias)
    weight, bias = (None if t is None else t.to(common) for t in (weight, bias))
    return layer_norm(x.to(common), weight, bias, eps, weight_offset=weight_offset).to(x.dtype)


register_fake("layer_norm", lambda x, *options, **named: contiguous_like(x))
register_fake("add_layer_norm", lambda x, *options, **named: (contiguous_like(x), contiguous_like(x)))


def _fake_backward(grad_y, x, weight, grad_sum, eps, weight_offset, needs_grad_weight, needs_grad_bias):
    sizes = (x.shape[-1:] if wanted else (0,) for wanted in (weight is not None and needs_grad_weight, needs_grad_bias))
    return contiguous_like(x), *(x.new_empty(size) for size in sizes)


register_fake("layer_norm_backward", _fake_backward, overloads=("",))


def _save(ctx, x, weight, bias, eps, weight_offset, first):
    """`first` is the index of the weight among the inputs of the op."""
    ctx.save_for_backward(x, weight)
    ctx.options = eps, weight_offset
    ctx.wanted = (
        weight is not None and ctx.needs_input_grad[first],
        bias is not None and ctx.needs_input_grad[first + 1],
    )


def _setup_layer_norm(ctx, inputs, output):
    _save(ctx, *inputs, first=1)


def _setup_add_layer_norm(ctx, inputs, output):
    _y, s = output
    _save(ctx, s, *inputs[2:], first=2)


def _gradients(ctx, grad_y, grad_sum):
    """(grad_x, grad_weight, grad_bias), None where it is not wanted."""
    x, weight = ctx.saved_tensors
    grad_x, *others = _ops.layer_norm_backward(grad_y, x, weight, grad_sum, *ctx.options, *ctx.wanted)
    return grad_x, *(grad if wanted else None for grad, wanted in zip(others, ctx.wanted, strict=True))


@differentiable_once
def _layer_norm_backward(ctx, grad_y):
    return *_gradients(ctx, grad_y, None), None, None


@differentiable_once
def _add_layer_norm_backward(ctx, grad_y, grad_sum):
    grad_x, *others = _gradients(ctx, grad_y, grad_sum)
    return grad_x, grad_x, *others, None, None


register_autograd("layer_norm", _layer_norm_backward, _setup_layer_norm)
register_autograd("add_layer_norm", _add_layer_norm_backward, _setup_add_layer_norm)


def _batched_backward(op, size, dims, *args):
    *_, needs_grad_weight, needs_grad_bias = args
    found = None if needs_grad_weight or needs_grad_bias else batched_rows(0, 1, 3)(op, size, dims, *args)
    return found and (found[0], (0, None, None))


register_vmap("layer_norm", batched_rows(0))
register_vmap("add_layer_norm", batched_rows(0, 1))
register_vmap("layer_norm_backward", _batched_backward)
