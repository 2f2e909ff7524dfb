"""Low-rank adapters beside a linear layer: public functions, autograd.

Matrix products of PyTorch's (cuBLAS) and a few small element-wise kernels; no kernel of its own, so no op of its own.
"""

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import functional as F

from llmkernels.ops._common import _is_transforming, _requires_grad, differentiable_once, public
from llmkernels.ops.linear import _autocast, _grad_bias, _grad_weight, _matrix

_aten = torch.ops.aten


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
    Raises: RuntimeError for shapes, dtypes or devices that do not fit.
    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; splitting factors: Henry, Tang and
        Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations".

    >>> x, weight = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0]])
    >>> lora_linear(x, weight, torch.tensor([[0.0, 1.0]]), torch.tensor([[10.0]]), scaling=0.5)
    tensor([13.])
    """
    tensors = x, weight, bias, lora_a, lora_b = _autocast(x, weight, bias, lora_a, lora_b)
    _check("lora_linear", x, lora_a, lora_b, "weight.size(0)", weight.size(0))
    return _run(None, *tensors, scaling)


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
    x, lora_a, lora_b = _autocast(x, lora_a, lora_b)
    _check("add_lora", x, lora_a, lora_b, "y.size(-1)", y.size(-1))
    if y.shape[:-1] != x.shape[:-1]:
        raise RuntimeError(f"add_lora: y must have shape {[*x.shape[:-1], y.size(-1)]}, got {list(y.shape)}")
    return _run(y, x, None, None, lora_a, lora_b, scaling)


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


def _run(y, x, weight, bias, a, b, scaling):
    """y, or where it is None the linear layer, with the adapter's part added."""
    if torch.compiler.is_compiling() or _is_transforming() or forward_ad._current_level >= 0:
        return _formula(y, x, weight, bias, a, b, scaling)
    tensors = y, x, weight, bias, a, b
    if torch.is_grad_enabled() and _requires_grad(tensors):
        return _Lora.apply(*tensors, scaling)
    return _forward(*tensors, scaling)[0]


def _formula(y, x, weight, bias, a, b, scaling):
    """What PEFT writes."""
    y = F.linear(x, weight, bias) if y is None else y
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scaling).to(y.dtype)


# What a Function does is not recorded in any case. So the many small operations here do not even ask, which saves some
# 0.3 us each.
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Lora(Function):
    @staticmethod
    def forward(ctx, y, x, weight, bias, a, b, scaling):
        with _below_autograd():
            result, ctx.is_split, *saved = _forward(y, x, weight, bias, a, b, scaling)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[2] or needs[4] else None, weight, a, b, *saved)
        ctx.scaling, ctx.x_shape, ctx.x_dtype = scaling, x.shape, x.dtype
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y):
        if grad_y is None:
            return (None,) * 7
        saved = ctx.saved_tensors  # checkpointing may run the forward here
        with _below_autograd():
            if torch.is_autocast_enabled(grad_y.device.type):  # the gradients have the dtypes of the forward
                with torch.autocast(grad_y.device.type, enabled=False):
                    return _backward(ctx, saved, grad_y)
            return _backward(ctx, saved, grad_y)


def _forward(y, x, weight, bias, a, b, scaling):
    """The result, whether factors were split, and what the backward needs of A, B and h."""
    is_own = y is None
    if is_own:
        y = F.linear(x, weight, bias)
    rows, sums, rank = _matrix(x), _matrix(y), a.size(0)
    add = sums.addmm_ if is_own else sums.addmm
    if _splits(y, x, a):
        parts_of_a, parts_of_b = _split(a, 0, low=1).flatten(0, 1), _split(b, 1, low=1).flatten(1)
        h = _sum_of_halves(_wide_product(rows, parts_of_a[: 2 * rank].t(), scaling), 1)
        parts_of_h = _split(h, 1, low=2).flatten(1)
        result = add(parts_of_h, parts_of_b.t())
        return _unflattened(result, y.shape), True, parts_of_a, parts_of_b, parts_of_h
    h = rows.to(a.dtype) @ a.t()
    is_same = y.dtype == a.dtype
    result = add(h, b.t(), alpha=scaling) if is_same else (sums + (h @ b.t()) * scaling).to(y.dtype)
    return _unflattened(result, y.shape), False, h


def _backward(ctx, saved, grad_y):
    x, weight, a, b, *saved = saved
    needs_y, needs_x, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
    rows, grads = None if x is None else _matrix(x), _matrix(grad_y)
    grad_x = grads @ weight if needs_x and weight is not None else None
    gradients = _split_gradients if ctx.is_split else _plain_gradients
    grad_x, grad_a, grad_b = gradients(ctx, grads, rows, grad_x, a, b, saved, (needs_x, needs_a, needs_b))
    return (
        grad_y if needs_y else None,
        grad_x.view(ctx.x_shape) if needs_x else None,
        _grad_weight(grad_y, x) if needs_weight else None,
        _grad_bias(grad_y) if needs_bias else None,
        grad_a,
        grad_b,
        None,
    )


def _split_gradients(ctx, grads, rows, grad_x, a, b, saved, needs):
    parts_of_a, parts_of_b, parts_of_h = saved
    (needs_x, needs_a, needs_b), rank = needs, a.size(0)
    grad_a = grad_b = None
    if needs_b:  # h is scaled
        grad_b = _sum_of_halves(_wide_product(grads.t(), parts_of_h[:, rank:]), 1)
    if needs_x or needs_a:
        g = _sum_of_halves(_wide_product(grads, parts_of_b[:, : 2 * rank], ctx.scaling), 1)
        parts_of_g = _split(g, 1, low=2).flatten(1)
        if needs_a:
            grad_a = _sum_of_halves(_wide_product(parts_of_g[:, rank:].t(), rows), 0)
        if needs_x:
            grad_x = parts_of_g @ parts_of_a if grad_x is None else grad_x.addmm_(parts_of_g, parts_of_a)
    return grad_x, grad_a, grad_b


def _plain_gradients(ctx, grads, rows, grad_x, a, b, saved, needs):
    (h,), (needs_x, needs_a, needs_b), scaling = saved, needs, ctx.scaling
    grad_a = grad_b = None
    wide = grads.to(a.dtype)
    if needs_b:
        grad_b = wide.t() @ _scaled(h, scaling)
    if needs_x or needs_a:
        g = _scaled(wide @ b, scaling)
        if needs_a:
            grad_a = g.t() @ rows.to(a.dtype)
        if needs_x and grad_x is not None and grad_x.dtype == a.dtype:
            grad_x.addmm_(g, a)
        elif needs_x:
            part = (g @ a).to(ctx.x_dtype)
            grad_x = part if grad_x is None else grad_x.add_(part)
    return grad_x, grad_a, grad_b


def _unflattened(t: Tensor, shape: torch.Size) -> Tensor:
    """t.view(shape), and no view for autograd, which forbids to write to a view that a Function returns."""
    return _aten._unsafe_view.default(t, shape)


def _scaled(t: Tensor, scaling: float) -> Tensor:
    return t if scaling == 1 else t * scaling


# --- float32 factors as sums of two bfloat16 numbers


def _splits(y: Tensor, x: Tensor, a: Tensor) -> bool:
    """Whether float32 adapters run in two parts. Not in float16, where the lower part of a small number underflows."""
    return x.is_cuda and a.dtype is torch.float32 and x.dtype is y.dtype is torch.bfloat16 and _has_wide_products


_has_wide_products = hasattr(_aten.addmm, "dtype_out")  # from some version of PyTorch on


def _split(t: Tensor, dim: int, low: int) -> Tensor:
    """The upper part of float32 numbers three times along a new dimension, but their lower part at `low`."""
    shape = list(t.shape)
    shape.insert(dim, 3)
    parts = t.new_empty(shape, dtype=torch.bfloat16).copy_(t.unsqueeze(dim))
    thirds = parts.unbind(dim)
    torch.sub(t, thirds[0], out=thirds[low])
    return parts


def _sum_of_halves(t: Tensor, dim: int) -> Tensor:
    first, second = t.chunk(2, dim)
    return first + second


def _wide_product(a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """factor a b of 16-bit matrices, in float32."""
    out = torch.empty(a.size(0), b.size(1), dtype=torch.float32, device=a.device)
    if not a.is_cuda:
        return torch.addmm(out, a.float(), b.float(), beta=0, alpha=factor, out=out)
    return _aten.addmm.dtype_out(out, a, b, torch.float32, beta=0, alpha=factor, out=out)
