"""Cross-entropy: public function, fakes, autograd.

Kernels: csrc/kernels/loss, csrc/cpu/cross_entropy.cpp.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from llmkernels.ops._common import (
    _is_transforming,
    caller,
    contiguous_like,
    differentiable_once,
    is_batched,
    public,
    register_autograd,
    register_fake,
    register_vmap,
)

_ops = torch.ops.llmkernels
_cross_entropy = caller("cross_entropy")


@public
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float = 0.0,
    gradient_in_forward: bool = True,
    inplace_backward: bool = False,
) -> Tensor:
    r"""Cross-entropy of logits and target classes, and with it the gradient of the logits.

    .. math::
        z &= \mathrm{softcap} \tanh(x / \mathrm{softcap}), \qquad \mathrm{lse} = \log \sum_c e^{z_c} \\
        l &= (1 - \epsilon) w_t (\mathrm{lse} - z_t) + \frac{\epsilon}{V} \sum_c w_c (\mathrm{lse} - z_c)
             + \mathrm{lse\_square\_scale} \cdot \mathrm{lse}^2

    Args:
        logits: x, (..., V); float32, float16 or bfloat16, on the CPU also float64. V of any size.
        target: t, (...), int64.
        weight: w, (V,), a factor for each class; by default 1.
        ignore_index: rows with this target have neither loss nor gradient, and do not count in a mean.
        reduction: "mean", the sum of the losses divided by that of the weights of their targets; "sum"; or "none".
        label_smoothing: the share epsilon of the loss that is a mean over all classes.
        lse_square_scale: of the squared log-sum-exp (z-loss), as in flash-attn. A mean divides it as the rest.
        softcap: caps the logits; 0 leaves them as they are.
        gradient_in_forward: if a gradient will be needed, compute it in the forward, from logits that are read anyway.
            It takes the memory of another set of logits. It is that for a gradient of the loss of 1, as after
            ``loss.backward()``, and then all is done. For another one, such as the scale of a GradScaler, the backward
            computes it again, from the logits.
        inplace_backward: write that gradient over ``logits``, whose values are lost; in float16 only in the backward.
            They must be contiguous, or it is written to other memory, as it is under torch.compile and the transforms
            of torch.func. The backward can run once.

    Returns:
        the loss, a scalar, or (...) for reduction "none"; float32, for float64 float64.

    Layout: rows any constant distance apart are read in place; any other layout is copied first.
    Arithmetic: float32 (float64 for float64). The gradient is rounded once, with the gradient of the loss and the
        divisor of a mean in it: in float16 a GradScaler keeps small ones from underflow as it does in PyTorch. With
        ``inplace_backward`` other dtypes round it a second time where the gradient of the loss is not 1.
    Differentiable: once, in ``logits``; saves logits, target, weight, the log-sum-exp of each row, and the gradient.
    Deterministic: yes, gradients included. A row's bits do not depend on the other rows.
    Matches: ``torch.nn.functional.cross_entropy(logits.float(), target, ...)`` for logits of two dimensions, a mean
        over no rows included, which is NaN; loss and gradient of a row are NaN where its logits have NaN or +inf.
    Raises: RuntimeError for other dtypes or shapes, tensors on different devices, a weight that requires a gradient,
        and on the CPU for a target that is no class, which on a GPU makes the loss NaN; ValueError for another
        ``reduction`` and for numbers out of range.
    Source: the gradient in the forward is Liger-Kernel's.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([1, -100]))
    tensor(0.6931)
    """
    weight = factors(weight, logits.dtype)
    options = ignore_index, reduction, label_smoothing, lse_square_scale, softcap
    early = (gradient_in_forward or inplace_backward) and torch.is_grad_enabled() and logits.requires_grad
    early = early and not _is_transforming()
    if early and inplace_backward and logits.is_contiguous() and not torch.compiler.is_compiling():
        return _InPlace.apply(logits, target, weight, *options)
    return _cross_entropy(logits, target, weight, *options, early)[0]


def factors(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The factor for each class, in the dtype that losses of `dtype` are computed in; a complex one the op refuses."""
    if weight is None or weight.is_complex():
        return weight
    wide = torch.promote_types(dtype, torch.float32)
    return weight if weight.dtype == wide else weight.to(wide)


class _InPlace(Function):
    """The gradient replaces the logits, which others then cannot have saved: autograd is told that they changed.

    In the forward, but float16 in the backward: rounded without the scale of a GradScaler, most of it would be zero.
    """

    @staticmethod
    def forward(ctx, logits, target, weight, *options):
        if ctx.needs_input_grad[2]:
            raise RuntimeError("cross_entropy: weight must not require a gradient")
        gradient = logits.detach()
        ctx.in_forward, ctx.options = logits.dtype != torch.float16, options
        if ctx.in_forward:
            loss = _ops.cross_entropy_(gradient, target, weight, *options)
            torch.autograd.graph.increment_version(gradient)
        else:
            loss, lse, sums, _ = _ops.cross_entropy.no_grad(gradient, target, weight, *options)
            ctx.save_for_backward(target, weight, lse, sums)
        ctx.gradient, ctx.version = gradient, gradient._version
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        if torch.is_grad_enabled():
            raise RuntimeError("cross_entropy: with inplace_backward there is nothing to differentiate again")
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("cross_entropy: with inplace_backward the backward can run once")
        if gradient._version != ctx.version:
            raise RuntimeError("cross_entropy: with inplace_backward logits must not be changed before the backward")
        if ctx.in_forward:
            _ops.cross_entropy_scale_(gradient, grad_loss)
        else:
            _ops.cross_entropy_backward_(gradient, grad_loss, None, *ctx.saved_tensors, *ctx.options)
            torch.autograd.graph.increment_version(gradient)
        return gradient, *(None for _ in ctx.needs_input_grad[1:])


def _wide_like(logits: Tensor, shape) -> Tensor:
    return logits.new_empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32))


def _fake_loss(logits, target, weight=None, ignore_index=-100, reduction="mean", *options, **named):
    return _wide_like(logits, target.shape if reduction == "none" else ())


def _fake(logits, target, weight=None, ignore_index=-100, reduction="mean", *options, gradient_in_forward=False, **_):
    gradient_in_forward = options[3] if len(options) > 3 else gradient_in_forward
    loss, lse = _fake_loss(logits, target, weight, ignore_index, reduction), _wide_like(logits, target.shape)
    sums = _wide_like(logits, 2 if reduction == "mean" or weight is not None else 0)
    return loss, lse, sums, contiguous_like(logits) if gradient_in_forward else logits.new_empty(0)


register_fake("cross_entropy", _fake)
register_fake("cross_entropy_", _fake_loss, overloads=("",))
register_fake(
    "cross_entropy_backward", lambda grad_loss, logits, *others, **named: contiguous_like(logits), overloads=("",)
)
register_fake("cross_entropy_backward_", lambda grad, grad_loss, *others, **named: None, overloads=("",))
register_fake("cross_entropy_scale_", lambda grad, grad_loss: None, overloads=("",))


def _setup(ctx, inputs, output):
    if any(ctx.needs_input_grad[2:3]):  # torch.library leaves out a weight that is not given
        raise RuntimeError("cross_entropy: weight must not require a gradient")
    logits, target, weight, *ctx.options, has_gradient = inputs
    _loss, lse, sums, grad = output
    ctx.mark_non_differentiable(lse, sums, grad)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, weight, lse, sums)
    ctx.in_forward = has_gradient
    ctx.gradient = grad.detach() if has_gradient else None


@differentiable_once
def _backward(ctx, grad_loss, *_):
    none = (None,) * (3 + len(ctx.options))
    if grad_loss is None:
        return None, *none
    logits, *others = ctx.saved_tensors  # target, weight, lse, sums
    batched = _is_transforming() or is_batched(grad_loss)  # for which there is no op in place
    if batched or not ctx.in_forward:
        return _ops.cross_entropy_backward(grad_loss, logits, *others, *ctx.options), *none
    gradient, ctx.gradient = ctx.gradient, None
    if gradient is None:  # it is the caller's since the first backward; another one repeats the forward, bit for bit
        *_, gradient = _ops.cross_entropy.no_grad(logits, *others[:2], *ctx.options, True)
    _ops.cross_entropy_backward_(gradient, grad_loss, logits, *others, *ctx.options)
    return gradient, *none


register_autograd("cross_entropy", _backward, _setup)

# One by one: samples have divisors of their own.
register_vmap("cross_entropy", lambda *call: None)
register_vmap("cross_entropy_backward", lambda *call: None)
