"""A linear layer and the cross-entropy of its results: public function, fakes, autograd.

Composition, by chunks of rows: csrc/torch/linear_cross_entropy.cpp; kernels: csrc/kernels/loss.
"""

import torch
from torch import Tensor

from llmkernels.ops._common import (
    _is_transforming,
    caller,
    contiguous_like,
    differentiable_once,
    is_batched,
    narrowed_by_autocast,
    public,
    register_autograd,
    register_fake,
    register_vmap,
)
from llmkernels.ops.cross_entropy import factors

_ops = torch.ops.llmkernels
_linear_cross_entropy = caller("linear_cross_entropy")


@public
def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float = 0.0,
    gradient_in_forward: bool = True,
    max_logits_bytes: int | None = None,
) -> Tensor:
    r"""Cross-entropy of :math:`x W^\top + b` and target classes, of which only some rows exist at a time.

    The loss of :func:`llmkernels.cross_entropy` with :math:`x W^\top + b` as logits, chunk by chunk: a matrix product
    makes the logits of a chunk, a kernel their losses, and their gradient in the same memory; two more products make of
    it the gradients of x and W.

    Args:
        x: (..., K), the hidden states; float32, float16 or bfloat16, on the CPU also float64.
        linear_weight: W, (V, K), in the dtype of x.
        target: (...), int64.
        linear_bias: b, (V,), in the dtype of x, or None.
        weight: (V,), a factor for each class; by default 1.
        ignore_index, reduction, label_smoothing, lse_square_scale, softcap: see :func:`llmkernels.cross_entropy`.
        gradient_in_forward: for a mean or a sum, compute the gradients that will be needed in the forward, which needs
            the logits anyway. Else, and always for reduction "none" and for a ``weight`` in float16, the backward
            computes the logits again: a third more work, and nothing but log-sum-exps is kept between the two.
        max_logits_bytes: how much memory the logits of a chunk may take; at least those of one row do. By default as
            much as W, and at least 512 MiB. Larger chunks are faster: for each of them the sum of W's gradient, 4 V K
            bytes, is read and written. In bfloat16 on a GPU the default is all rows at once, if their logits take no
            more than such a chunk and that sum together: then there is no sum, and W's gradient is in bfloat16 before
            the backward multiplies it. On the CPU that is so for any single chunk of 16 bits.

    Returns:
        the loss, a scalar, or (...) for reduction "none"; float32, for float64 float64.

    Layout: rows of x and of W any constant distance apart are read in place, and a transposed W.
    Autocast: casts x, W and b, as it does for ``torch.nn.functional.linear``.
    Arithmetic: logits and their gradient are rounded to the dtype of x, the rest of the loss is float32. The gradients
        of W and b are summed over the chunks in float32, so that smaller chunks are not less accurate, and rounded
        once; on the CPU, which has no such product, that of each chunk is rounded first. In the forward the gradients
        are those of the sum of the losses, and the backward multiplies them by the gradient of the loss, divided
        by what a mean divides by: in float16 they do not underflow where that gradient is a GradScaler's. Those of a
        ``weight``, which is a number of any size, could: they are computed with all of that in the backward.
    Memory: a chunk of logits; 4 V K bytes for the sum of W's gradient, which is kept until the backward; for a W of
        16 bits another 2 V K bytes there, for the rounded gradient. All rows at once: their logits and 2 V K bytes.
        Without gradients the chunk alone.
    Differentiable: once, in x, linear_weight and linear_bias; saves them, target, weight, the log-sum-exp of each row,
        and the gradients, which are the caller's after the first backward. Another one computes them again.
    Deterministic: yes, gradients included, as far as PyTorch's matrix products are. The order of sums depends on the
        number of rows and on max_logits_bytes.
    Matches: ``torch.nn.functional.cross_entropy(linear(x, W, b).float(), target, ...)`` to the rounding of the sums,
        a mean over no rows included, which is NaN with gradients of 0.
    Raises: as :func:`llmkernels.cross_entropy`; RuntimeError for a weight or bias that does not fit x.
    Source: chunks with the gradient in the forward are Liger-Kernel's; names are those of
        ``torch.nn.functional.linear_cross_entropy`` of newer versions of PyTorch.

    >>> x, head = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [0.0]])
    >>> linear_cross_entropy(x, head, torch.tensor([1, -100]))
    tensor(0.6931)
    """
    x, linear_weight, linear_bias = narrowed_by_autocast(x, linear_weight, linear_bias)
    weight = factors(weight, x.dtype)
    early = gradient_in_forward and reduction != "none" and torch.is_grad_enabled() and not _is_transforming()
    early = early and (weight is None or x.dtype != torch.float16)
    needs = tuple(early and t is not None and t.requires_grad for t in (x, linear_weight, linear_bias))
    options = ignore_index, reduction, label_smoothing, lse_square_scale, softcap, max_logits_bytes
    at_once = _at_once(x, linear_weight, max_logits_bytes, needs[1])
    return _linear_cross_entropy(x, linear_weight, target, linear_bias, weight, *options, at_once, *needs)[0]


def _at_once(x: Tensor, weight: Tensor, max_logits_bytes: int | None, needs_weight: bool) -> bool:
    """Whether all rows are computed at once: where the logits take no more than chunks with float32 sums would.

    On a GPU only in bfloat16: in float16 the gradient of the sum of the losses could overflow. On the CPU, which rounds
    every product to 16 bits, a single chunk has nothing to sum.
    """
    if not needs_weight or x.dtype not in (torch.bfloat16, torch.float16) or weight.ndim != 2:
        return False
    logits, chunk = 2 * x.shape[:-1].numel() * weight.shape[0], max(1 << 29, 2 * weight.numel())
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and max_logits_bytes is None and logits <= chunk + 4 * weight.numel()
    return logits <= (chunk if max_logits_bytes is None else max_logits_bytes)


def _bound(names: tuple[str, ...], args: tuple, named: dict, **defaults) -> list:
    given = defaults | dict(zip(names, args, strict=False)) | named
    return [given.get(name) for name in names]


_INPUTS = ("x", "linear_weight", "target", "linear_bias", "weight")
_OPTIONS = ("ignore_index", "reduction", "label_smoothing", "lse_square_scale", "softcap", "max_logits_bytes")
_OPTIONS += ("at_once",)
_NEEDS = ("needs_x", "needs_weight", "needs_bias")


def _fake(*args, **named):
    names = (*_INPUTS, *_OPTIONS, *_NEEDS)
    x, linear_weight, target, bias, _, _, reduction, *_, at_once, needs_x, needs_weight, needs_bias = _bound(
        names, args, named, reduction="mean"
    )
    wide = torch.promote_types(x.dtype, torch.float32)
    of_sums = x.dtype if at_once else wide
    lse = x.new_empty(target.shape, dtype=wide)
    return (
        x.new_empty(target.shape if reduction == "none" else (), dtype=wide),
        lse,
        x.new_empty(2 if reduction == "mean" else 0, dtype=wide),
        *_fake_grads(x, linear_weight, needs_x, needs_weight, needs_bias and bias is not None, of_sums),
    )


def _fake_grads(x, linear_weight, needs_x, needs_weight, needs_bias, dtype):
    return (
        contiguous_like(x) if needs_x else x.new_empty(0),
        x.new_empty(linear_weight.shape if needs_weight else 0, dtype=dtype),
        x.new_empty(linear_weight.shape[:1] if needs_bias else 0, dtype=dtype),
    )


def _fake_backward(*args, **named):
    names = ("grad_loss", *_INPUTS, "lse", *_OPTIONS, *_NEEDS)
    _, x, linear_weight, _, bias, *_, needs_x, needs_weight, needs_bias = _bound(names, args, named)
    return _fake_grads(x, linear_weight, needs_x, needs_weight, needs_bias and bias is not None, x.dtype)


register_fake("linear_cross_entropy", _fake)
register_fake("linear_cross_entropy_backward", _fake_backward, overloads=("",))


def _setup(ctx, inputs, output):
    if any(ctx.needs_input_grad[4:5]):  # torch.library leaves out a weight that is not given
        raise RuntimeError("linear_cross_entropy: weight must not require a gradient")
    tensors, ctx.options, needs = inputs[:5], inputs[5:-3], inputs[-3:]
    _loss, lse, divisor, *grads = output
    ctx.mark_non_differentiable(lse, divisor, *grads)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, lse)
    # The gradients in the forward must be all that a backward needs.
    ctx.early = needs if list(needs) == _needed(ctx, inputs[3]) else None
    ctx.gradients = [divisor.detach(), *(grad.detach() for grad in grads)] if ctx.early else None


def _needed(ctx, linear_bias: Tensor | None) -> list[bool]:
    return [ctx.needs_input_grad[0], ctx.needs_input_grad[1], linear_bias is not None and ctx.needs_input_grad[3]]


@differentiable_once
def _backward(ctx, grad_loss, *_others):
    count = 5 + len(ctx.options) + 3
    if grad_loss is None:
        return (None,) * count
    x, linear_weight, target, linear_bias, weight, lse = ctx.saved_tensors
    needs = _needed(ctx, linear_bias)
    batched = _is_transforming() or is_batched(grad_loss)  # for which there is no op in place
    if batched or ctx.early is None:
        arguments = x, linear_weight, target, linear_bias, weight, lse, *ctx.options
        grads = _ops.linear_cross_entropy_backward(grad_loss, *arguments, *needs)
    else:
        early, ctx.gradients = ctx.gradients, None
        if early is None:  # they are the caller's since the first backward; another one repeats the forward
            arguments = x, linear_weight, target, linear_bias, weight, *ctx.options
            _loss, _lse, *early = _ops.linear_cross_entropy.no_grad(*arguments, *ctx.early)
        divisor, *grads = early
        factor = grad_loss
        if ctx.options[1] == "mean":  # over no row: 0, as the gradients are, not 0 / 0; weights of 0 are 0 / 0, too
            no_row = divisor[0] == 0 if weight is None else (target == ctx.options[0]).all()
            factor = torch.where(no_row, 0.0, grad_loss / divisor[0])
        grads = [_scaled(grad, factor, x.dtype) if need else None for grad, need in zip(grads, needs, strict=True)]
    grad_x, grad_weight, grad_bias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return grad_x, grad_weight, None, grad_bias, *(None,) * (count - 4)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor in another dtype; in place where it has that dtype."""
    if gradient.dtype != dtype and type(gradient) is Tensor:  # one pass, and no copy in float32
        return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
    _ops.cross_entropy_scale_(gradient, factor)
    return gradient.to(dtype)


register_autograd("linear_cross_entropy", _backward, _setup)

# One by one: samples have divisors of their own.
register_vmap("linear_cross_entropy", lambda *call: None)
register_vmap("linear_cross_entropy_backward", lambda *call: None)
