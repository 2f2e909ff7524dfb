"""Linear layers for few tokens, with or without an RMSNorm before: public functions, fakes, autograd.

Kernels: csrc/kernels/linear; composition of the rest: csrc/torch/linear.cpp.
"""

import math

import torch
from torch import Tensor

from llmkernels.ops._common import (
    autocast_dtype,
    batched_rows,
    caller,
    differentiable_once,
    narrowed_by_autocast,
    public,
    register_autograd,
    register_fake,
    register_vmap,
    without_autocast,
)
from llmkernels.ops.rms_norm import check_weight, rms_norm

_ops = torch.ops.llmkernels
_linear, _rms_norm_linear = caller("linear"), caller("rms_norm_linear")


@public
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Linear layer, :math:`y = x W^\top + b`, as fast as W can be read when x has few rows.

    Args:
        x: (..., K); float32, float16 or bfloat16, on the CPU also float64.
        weight: (N, K).
        bias: (N,), or None.

    Returns:
        y, (..., N), contiguous where the kernel runs.

    The kernel takes up to 16 rows of float16 or bfloat16, K a multiple of 8 and every row 16-byte aligned, on a GPU of
    compute capability 8.0 or later; on 9.0 up to 64 rows, where it has been measured to be as fast as cuBLAS.
    Everything else is PyTorch's own linear: more rows, float32, other GPUs, the CPU.
    Layout: rows of x and weight any constant distance apart are read in place.
    Autocast: casts the tensors, as it does for ``torch.nn.functional.linear``.
    Arithmetic: products summed in float32, bias added, rounded once.
    Differentiable: once, in all three tensors.
    Deterministic: yes. The order of the sum depends on the number of rows of x.
    Matches: ``torch.nn.functional.linear``, to the rounding of the sum.
    Raises: RuntimeError for other dtypes, shapes that do not fit, or tensors on different devices.

    >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
    tensor([3., 6.])
    """
    return _linear(*narrowed_by_autocast(x, weight, bias), False)


@public
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = True,
) -> Tensor:
    r"""RMSNorm and the linear layer after it, :math:`y = \mathrm{rms\_norm}(x) W^\top + b`.

    Args:
        x: (..., K); float32, float16 or bfloat16, on the CPU also float64.
        norm_weight: (K,), or None to only normalize.
        weight, bias: as in :func:`linear`.
        eps, weight_offset, cast_before_weight: as in :func:`llmkernels.rms_norm`.

    Returns:
        y, (..., N).

    The norm is folded into the kernel of :func:`linear` for float16 and bfloat16 with a ``norm_weight``,
    ``weight_offset`` 0 (in bfloat16 also 1), K up to 16384 and up to 16 rows. The normalized x never reaches memory
    then: x times the norm's weight (in float16 but for a power of two, against overflow) is rounded once and multiplied
    by W, and the float32 sum by 1 / rms. That is one rounding fewer than either value of ``cast_before_weight`` asks
    for. Everywhere else this is :func:`rms_norm`, then :func:`linear`.

    Differentiable: once, in all four tensors; saves them, nothing else.
    Deterministic: yes, gradients included (as far as PyTorch's matmul is). The order of the sum depends on the number
        of rows of x.
    Matches: ``torch.nn.functional.linear(rms_norm(x, norm_weight), weight, bias)`` to the rounding of the sum.
    Layout, raises: as :func:`linear`. A norm_weight of another dtype gives the normalized x the dtype that it has in
        :func:`rms_norm`; weight and bias must have that one, too.
    Autocast: :func:`rms_norm` of x as it is, then :func:`linear`, whose tensors are cast.
    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; scaling the sum in place of the row is
        folklore.

    >>> rms_norm_linear(torch.tensor([3.0, 4.0]), None, torch.tensor([[1.0, 1.0]]))
    tensor([1.9799])
    """
    if (norm_weight is None or norm_weight.dtype == x.dtype) and autocast_dtype(x) is None:
        return _rms_norm_linear(x, norm_weight, weight, bias, eps, weight_offset, cast_before_weight, False, None, None)
    if norm_weight is not None:
        check_weight("rms_norm_linear", "norm_weight", norm_weight, x)
    normed = rms_norm(x, norm_weight, eps, weight_offset=weight_offset, cast_before_weight=cast_before_weight)
    normed, weight, bias = narrowed_by_autocast(normed, weight, bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != normed.dtype:
            raise RuntimeError(
                f"rms_norm_linear: {name} must have the dtype of rms_norm(x, norm_weight), {normed.dtype}, "
                f"got {tensor.dtype}"
            )
    return _linear(normed, weight, bias, False)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register_fake("linear", lambda x, weight, bias=None, in_step=False: _fake(x, weight))
register_fake("rms_norm_linear", lambda x, norm_weight, weight, *options, **named: _fake(x, weight))


def _fake_glu(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


register_fake("glu_linear", lambda x, weight, *options, **named: _fake_glu(x, weight), overloads=("",))
register_fake(
    "rms_norm_glu_linear",
    lambda x, norm_weight, weight, *options, **named: _fake_glu(x, weight),
    overloads=("",),
)
register_fake(
    "rms_norm_add_linear",
    lambda sum, residual, x, add_weight, eps, offset, cast, alpha, weight, bias=None, activation="", *rest, **named: (
        _fake_glu(x, weight) if activation else _fake(x, weight)
    ),
    overloads=("",),
)
register_fake("linear_add_", lambda *arguments, **named: None, overloads=("",))
# On a GPU it may return more, which depends on what fits the device: not for torch.compile there.
register_fake(
    "linear_add_scale_",
    lambda residual, x, *others, **named: (x.new_empty(0), x.new_empty(0, dtype=torch.float32)),
    overloads=("",),
)


def _setup_linear(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _setup_rms_norm_linear(ctx, inputs, output):
    x, norm_weight, weight, bias, *ctx.options, _in_step, _scaled, _squares = inputs
    ctx.save_for_backward(x, norm_weight, weight)
    ctx.has_bias = bias is not None


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # autograd's own batches have no flatten()


def _grad_weight(grad_y: Tensor, x: Tensor) -> Tensor:
    return _matrix(grad_y).t() @ _matrix(x)


def _grad_bias(grad_y: Tensor) -> Tensor:
    return _matrix(grad_y).sum(0)


@differentiable_once
def _linear_backward(ctx, grad_y):
    x, weight = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    with without_autocast(grad_y.device):  # the gradients have the dtypes of the forward
        return (
            grad_y @ weight if needs_x else None,
            _grad_weight(grad_y, x) if needs_weight else None,
            _grad_bias(grad_y) if ctx.has_bias and ctx.needs_input_grad[2] else None,
            None,
        )


@differentiable_once
def _rms_norm_linear_backward(ctx, grad_y):
    x, norm_weight, weight = ctx.saved_tensors
    needs_x, needs_norm_weight, needs_weight = ctx.needs_input_grad[:3]
    needs_norm_weight = needs_norm_weight and norm_weight is not None
    grad_x = grad_norm_weight = grad_weight = None
    with without_autocast(grad_y.device):
        if needs_x or needs_norm_weight:
            grads = _ops.rms_norm_backward(grad_y @ weight, x, norm_weight, None, *ctx.options, needs_norm_weight)
            grad_x, grad_norm_weight = grads[0] if needs_x else None, grads[1] if needs_norm_weight else None
        if needs_weight:
            grad_weight = _grad_weight(grad_y, _ops.rms_norm(x, norm_weight, *ctx.options))
        grad_bias = _grad_bias(grad_y) if ctx.has_bias and ctx.needs_input_grad[3] else None
    return grad_x, grad_norm_weight, grad_weight, grad_bias, *(None,) * 6


register_autograd("linear", _linear_backward, _setup_linear)
register_autograd("rms_norm_linear", _rms_norm_linear_backward, _setup_rms_norm_linear)
register_vmap("linear", batched_rows(0))
register_vmap("rms_norm_linear", batched_rows(0))
