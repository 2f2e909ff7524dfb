"""Low-rank adapters beside a linear layer: public functions, fakes, autograd.

Composition: csrc/torch/lora.cpp; kernels between PyTorch's matrix products: csrc/kernels/lora.
"""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from llmkernels.ops._common import (
    _is_transforming,
    caller,
    contiguous_like,
    differentiable_once,
    narrowed_by_autocast,
    public,
    register_autograd,
    register_fake,
    register_vmap,
    without_autocast,
)
from llmkernels.ops.linear import _grad_bias, _grad_weight

_lora_linear, _add_lora = caller("lora_linear"), caller("add_lora")
_backward = torch.ops.llmkernels.lora_linear_backward.default


@public
def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
) -> Tensor:
    r"""Linear layer with a low-rank adapter, :math:`y = x W^\top + b + s (x A^\top) B^\top`.

    Args:
        x: (..., K); float32, float16 or bfloat16, on the CPU also float64.
        weight: W, (N, K), in the dtype of x.
        lora_a: A, (r, K), of any of these dtypes: PEFT's adapters are float32 beside a base of 16 bits.
        lora_b: B, (N, r), in the dtype of A.
        bias: b, (N,), in the dtype of x, or None.
        scaling: s, PEFT's ``lora_alpha / r``.

    Returns:
        y, (..., N), in the dtype of x.

    Beside a base of bfloat16, float32 adapters on a GPU run on the 16-bit tensor cores in nearly float32 precision. x
    and the gradient of y are bfloat16 as they are. Each other factor is the sum of two bfloat16 numbers,
    :math:`A = A_1 + A_2` to 16 bits, side by side in one matrix:

    ::

        h      = x [A1 A2]^T, the two halves added, in float32         h = h1 + h2
        y     += [h1 h1 h2] [B1 B2 B1]^T                               by cuBLAS, which rounds the sum once
        g      = s grad_y [B1 B2], likewise                            g = g1 + g2
        grad_A = [g1 g2]^T x          grad_B = s grad_y^T [h1 h2]      the two halves added, in float32
        grad_x = grad_y W + [g1 g1 g2] [A1; A2; A1]                    on top of the base's, rounded once

    Everywhere else (the CPU, float16, adapters of 16 bits) the products are in the dtype of A, to which x is cast.

    Arithmetic: x W^T + b is rounded to the dtype of x before the adapter's part is added, as in PEFT. Where factors are
        split, the adapters' gradients have a relative error of about 2^-17 of their terms: PyTorch's float32 products
        have 2^-24, those in TF32 2^-11. An infinite factor gives NaN.
    Autocast: casts all tensors, as it does for ``torch.nn.functional.linear``.
    Memory: saves x, W, A and B, and where factors are split 6 bytes per number of A, B and h; no float32 copy of x.
    Differentiable: once, in all five tensors.
    Deterministic: as far as PyTorch's matrix products are. The order of their sums depends on the number of rows.
    torch.compile, transforms of torch.func: run PEFT's formula instead.
    Matches: PEFT's ``lora.Linear`` with a plain adapter, to the rounding of the sums.
    Raises: RuntimeError for shapes, dtypes or devices that do not fit; ValueError for a ``scaling`` that is not finite.
    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; splitting factors: Henry, Tang and
        Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations".

    >>> x, weight = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0]])
    >>> lora_linear(x, weight, torch.tensor([[0.0, 1.0]]), torch.tensor([[10.0]]), scaling=0.5)
    tensor([13.])
    """
    x, weight, bias, lora_a, lora_b = narrowed_by_autocast(x, weight, bias, lora_a, lora_b)
    if _runs_formula():
        _check("lora_linear", x, lora_a, lora_b, "weight.size(0)", weight.size(0))
        return _formula(F.linear(x, weight, bias), x, lora_a, lora_b, scaling)
    return _lora_linear(x, weight, lora_a, lora_b, bias, scaling, _splits(x, x, lora_a))[0]


@public
def add_lora(y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, *, scaling: float = 1.0) -> Tensor:
    r"""The adapter's part of :func:`lora_linear` alone, :math:`y + s (x A^\top) B^\top`: beside a layer of any kind.

    Args:
        y: (..., N), the result of the base layer for x; float32, float16 or bfloat16, on the CPU also float64.
        x: (..., K), of any of these dtypes.
        lora_a, lora_b, scaling: as in :func:`lora_linear`.

    Returns:
        the sum, (..., N), in the dtype of y.

    Factors are split as in :func:`lora_linear` where both y and x are bfloat16.

    Autocast: casts x, A and B.
    Memory, Differentiable (in all four tensors), Deterministic, Matches, Raises, Source: as :func:`lora_linear`.

    >>> x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    >>> add_lora(y, x, torch.tensor([[0.0, 1.0]]), torch.tensor([[10.0]]), scaling=0.5)
    tensor([13.])
    """
    x, lora_a, lora_b = narrowed_by_autocast(x, lora_a, lora_b)
    if _runs_formula():
        _check("add_lora", x, lora_a, lora_b, "y.size(-1)", y.size(-1))
        if y.shape[:-1] != x.shape[:-1]:
            raise RuntimeError(f"add_lora: y must have shape {[*x.shape[:-1], y.size(-1)]}, got {list(y.shape)}")
        return _formula(y, x, lora_a, lora_b, scaling)
    return _add_lora(y, x, lora_a, lora_b, scaling, _splits(y, x, lora_a))[0]


def _runs_formula() -> bool:
    """Whether somebody traces, who can fuse or differentiate PEFT's operations one by one."""
    return torch.compiler.is_compiling() or _is_transforming() or forward_ad._current_level >= 0


def _formula(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """What PEFT writes."""
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scaling).to(y.dtype)


def _check(op: str, x: Tensor, lora_a: Tensor, lora_b: Tensor, source: str, columns: int) -> None:
    if lora_a.dim() != 2 or lora_a.size(1) != x.size(-1):
        raise RuntimeError(f"{op}: lora_a must have shape [r, {x.size(-1)}] (x.size(-1)), got {list(lora_a.shape)}")
    if lora_b.shape != (columns, lora_a.size(0)):
        expected = [columns, lora_a.size(0)]
        raise RuntimeError(
            f"{op}: lora_b must have shape {expected} ({source}, lora_a.size(0)), got {list(lora_b.shape)}"
        )
    if lora_b.dtype != lora_a.dtype:
        raise RuntimeError(f"{op}: lora_b must have the dtype of lora_a, {lora_a.dtype}, got {lora_b.dtype}")


def _splits(y: Tensor, x: Tensor, a: Tensor) -> bool:
    """Whether float32 adapters run in two parts. Not in float16, where the lower part of a small number underflows."""
    return x.is_cuda and a.dtype is torch.float32 and x.dtype is y.dtype is torch.bfloat16 and _has_wide_products


_has_wide_products = hasattr(torch.ops.aten.addmm, "dtype_out")  # 16-bit factors, float32 result: from some PyTorch on


def _fake(x, weight, lora_a, lora_b, bias=None, scaling=1.0, split=False):
    return _fake_results(x.new_empty((*x.shape[:-1], weight.shape[0])), x, lora_a, lora_b, split)


def _fake_add(y, x, lora_a, lora_b, scaling=1.0, split=False):
    return _fake_results(contiguous_like(y), x, lora_a, lora_b, split)


def _fake_results(y: Tensor, x: Tensor, a: Tensor, b: Tensor, split: bool) -> tuple[Tensor, ...]:
    rows, rank = math.prod(x.shape[:-1]), a.shape[0]
    if not split:
        return y, a.new_empty((rows, rank)), a.new_empty(0), a.new_empty(0)
    shapes = (rows, 3 * rank), (3 * rank, a.shape[1]), (b.shape[0], 3 * rank)
    return y, *(a.new_empty(shape, dtype=torch.bfloat16) for shape in shapes)


def _fake_backward(grad_y, x, weight, lora_a, lora_b, h, a_parts, b_parts, scaling, split, needs_x, needs_a, needs_b):
    of_x = grad_y if split or weight is not None else lora_a
    return (
        of_x.new_empty((*grad_y.shape[:-1], lora_a.shape[1]) if needs_x else 0),
        lora_a.new_empty(lora_a.shape if needs_a else 0),
        lora_b.new_empty(lora_b.shape if needs_b else 0),
    )


register_fake("lora_linear", _fake)
register_fake("add_lora", _fake_add)
register_fake("lora_linear_backward", _fake_backward, overloads=("",))


def _setup(ctx, inputs, output):
    x, weight, a, b, _, ctx.scaling, ctx.is_split = inputs
    _, needs_weight, needs_a, *_ = ctx.needs_input_grad
    _save(ctx, x if needs_weight or needs_a else None, weight, a, b, *output[1:])


def _setup_add(ctx, inputs, output):
    _, x, a, b, ctx.scaling, ctx.is_split = inputs
    ctx.dtype_of_x = x.dtype
    _save(ctx, x if ctx.needs_input_grad[2] else None, None, a, b, *output[1:])


def _save(ctx, x, weight, a, b, *parts):
    ctx.mark_non_differentiable(*parts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, a, b, *parts)


@differentiable_once
def _linear_backward(ctx, grad_y, *_parts):
    if grad_y is None:
        return (None,) * 7
    needs = *ctx.needs_input_grad, False  # torch.library leaves out a bias that is not given
    needs_x, needs_weight, needs_a, needs_b, needs_bias, *_ = needs
    saved = x, *_ = ctx.saved_tensors  # checkpointing may run the forward here
    grad_x, grad_a, grad_b = _backward(grad_y, *saved, ctx.scaling, ctx.is_split, needs_x, needs_a, needs_b)
    grad_weight = grad_bias = None
    if needs_weight or needs_bias:
        with without_autocast(grad_y.device):  # the gradients have the dtypes of the forward
            grad_weight = _grad_weight(grad_y, x) if needs_weight else None
            grad_bias = _grad_bias(grad_y) if needs_bias else None
    return (
        grad_x if needs_x else None,
        grad_weight,
        grad_a if needs_a else None,
        grad_b if needs_b else None,
        grad_bias,
        None,
        None,
    )


@differentiable_once
def _add_backward(ctx, grad_y, *_parts):
    if grad_y is None:
        return (None,) * 6
    needs_y, needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
    saved = ctx.saved_tensors
    grad_x, grad_a, grad_b = _backward(grad_y, *saved, ctx.scaling, ctx.is_split, needs_x, needs_a, needs_b)
    return (
        grad_y if needs_y else None,
        grad_x.to(ctx.dtype_of_x) if needs_x else None,
        grad_a if needs_a else None,
        grad_b if needs_b else None,
        None,
        None,
    )


register_fake("add_adapters_", lambda *arguments, **named: None, overloads=("",))
register_autograd("lora_linear", _linear_backward, _setup)
register_autograd("add_lora", _add_backward, _setup_add)
for _name in ("lora_linear", "add_lora", "lora_linear_backward"):
    register_vmap(_name, lambda *call: None)  # one by one
