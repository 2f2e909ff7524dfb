"""Quantization of weights to int8, and a linear layer of such a weight: public functions, fake, autograd.

Kernels: csrc/kernels/linear; composition of the rest: csrc/torch/int8_linear.cpp.
"""

import torch
from torch import Tensor

from llmkernels.ops._common import (
    batched_rows,
    caller,
    differentiable_once,
    narrowed_by_autocast,
    public,
    refuse_gradients,
    register_autograd,
    register_fake,
    register_vmap,
    without_autocast,
)
from llmkernels.ops.linear import _grad_bias

_int8_linear = caller("int8_linear")
_MAX = 127
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@public
def int8_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    r"""Symmetric quantization of a weight to int8, with one scale per row.

    .. math:: s_n = \max_k |W_{nk}| / 127, \qquad q_{nk} = \mathrm{round}(W_{nk} / s_n)

    Args:
        weight: (N, K); float32, float16, bfloat16 or float64.

    Returns:
        (q, scale): q (N, K), int8, from -127 to 127; scale (N,), float32, to multiply the rows of q by. Both are what
        :func:`int8_linear` takes.

    Composed of PyTorch's functions, in float32: it runs once per weight.
    Zeros: a row of zeros has the scale 1.
    inf and NaN: the scale of their row is inf or NaN, and q times scale is NaN where they were.
    Rounding: to nearest even.
    Differentiable: no; a weight that requires a gradient is refused.
    Deterministic: yes.
    Raises: RuntimeError for another dtype or number of dimensions.

    >>> int8_quantize(torch.tensor([[127.0, -2.6], [0.0, 0.0]]))
    (tensor([[127,  -3],
            [  0,   0]], dtype=torch.int8), tensor([1., 1.]))
    """
    refuse_gradients(
        "int8_quantize", "{name} must not require a gradient; call it under torch.no_grad()", weight=weight
    )
    if weight.dtype not in _DTYPES:
        expected = "float32, float16, bfloat16 or float64"
        raise RuntimeError(f"int8_quantize: weight must be {expected}, got {weight.dtype}")
    if weight.dim() != 2:
        raise RuntimeError(f"int8_quantize: weight must have shape [N, K], got {list(weight.shape)}")
    wide = weight.float()
    largest = wide.abs().amax(1) if wide.size(1) else wide.new_zeros(wide.size(0))
    scale = largest / _MAX
    scale = torch.where(scale == 0, 1.0, scale)
    q = (wide / scale[:, None]).round_().clamp_(-_MAX, _MAX).nan_to_num_()
    return q.to(torch.int8), scale


@public
def int8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Linear layer of a weight in int8, :math:`y_{mn} = s_n \sum_k x_{mk} W_{nk} + b_n`.

    Args:
        x: (..., K); float32, float16 or bfloat16, on the CPU also float64.
        weight: (N, K), int8.
        weight_scale: (N,), float32: s, one per row of ``weight``, as from :func:`int8_quantize`.
        bias: (N,) of the dtype of ``x``, or None.

    Returns:
        y, (..., N), of the dtype of ``x``, contiguous where the kernel runs.

    The kernel reads half the bytes of :func:`linear`'s weight. It takes up to 16 rows of float16 or bfloat16, K a
    multiple of 16 and every row of ``x`` and ``weight`` 16-byte aligned, on a GPU of compute capability 8.0 or later.
    Everything else (more rows, other K or alignment, float32, other GPUs, the CPU) takes a copy of the weight in the
    dtype of ``x``, made for each call, and PyTorch's linear. ``llmkernels.explain("int8_linear", ...)`` says which of
    the two it is, and why.
    Layout: rows of x and weight any constant distance apart are read in place.
    Autocast: casts x and bias, as it does for ``torch.nn.functional.linear``.
    Arithmetic: of the kernel: int8 is exact in x's dtype; products summed in float32, times the scale, bias added,
        rounded once. Of the rest: the weight times the scale is rounded to x's dtype first.
    Differentiable: once, in x and bias. ``weight`` and ``weight_scale`` have no gradient; a scale that requires one is
        refused. Saves weight and scale; the backward makes a copy of the weight in the dtype of ``x``.
    Deterministic: yes. The order of the sum depends on the number of rows of x.
    Matches: ``torch.nn.functional.linear`` of the dequantized weight, to the rounding of that weight and of the sum.
    Raises: RuntimeError for other dtypes, shapes that do not fit, or tensors on different devices.
    Source: Dettmers et al. 2022, "LLM.int8()", for weights with a scale per row; its matrix product is of int8 on both
        sides, this one is of ``x`` as it is.

    >>> weight = torch.tensor([[1, 1], [0, 3]], dtype=torch.int8)
    >>> int8_linear(torch.tensor([1.0, 2.0]), weight, torch.tensor([1.0, 0.5]))
    tensor([3., 3.])
    """
    x, bias = narrowed_by_autocast(x, bias)
    return _int8_linear(x, weight, weight_scale, bias)


register_fake("int8_linear", lambda x, weight, weight_scale, bias=None: x.new_empty((*x.shape[:-1], weight.shape[0])))


def _setup(ctx, inputs, output):
    if ctx.needs_input_grad[2]:
        raise RuntimeError(
            "int8_linear: weight_scale must not require a gradient, since a quantization has none; detach it"
        )
    _x, weight, scale, bias = inputs
    ctx.save_for_backward(weight, scale)
    ctx.has_bias = bias is not None


@differentiable_once
def _backward(ctx, grad_y):
    weight, scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        wide = torch.promote_types(grad_y.dtype, torch.float32)
        with without_autocast(grad_y.device):  # the gradients have the dtypes of the forward
            grad_x = grad_y @ (weight * scale[:, None].to(wide)).to(grad_y.dtype)
    if ctx.has_bias and ctx.needs_input_grad[3]:
        grad_bias = _grad_bias(grad_y)
    return grad_x, None, None, grad_bias


register_autograd("int8_linear", _backward, _setup)
register_vmap("int8_linear", batched_rows(0))
