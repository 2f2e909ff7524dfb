"""Clipping of gradients to a norm. Kernels: csrc/kernels/optim/grad_norm.cu, csrc/cpu/optim.cpp."""

from collections.abc import Iterable

import torch
from torch import Tensor

from llmkernels.optim._tensors import by_device, grad_norm, is_dense, is_distributed

_ops = torch.ops.llmkernels


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Scale the gradients of all parameters down to a norm, without the host waiting for it.

    With all elements of all gradients as one vector g:

    .. math:: g \leftarrow g \min\left(1, \frac{\mathrm{max\_norm}}{\lVert g \rVert + 10^{-6}}\right)

    Two launches find the norm of up to 1,400 gradients, a third one scales them; it ends at once if nothing is to be
    clipped.
    ``AdamW(..., max_grad_norm=...)`` does the scaling inside its step, and leaves the gradients as they are.

    Args:
        parameters: what has gradients; those without one are passed over. One that comes twice, as tied weights of two
            modules do, counts once; PyTorch's function counts and scales it twice.
        max_norm: the norm that the gradients are scaled down to.
        norm_type: 2 or inf; any other norm is left to PyTorch's function.
        error_if_nonfinite: raise instead of clipping where the norm is inf or NaN. **The host waits for the norm
            then.**
        foreach: for compatibility; has no effect.

    Returns:
        The norm before the clipping: a tensor without dimensions on the device of the first gradient, 0 without any
        gradient.

    Dtype: gradients of float32, float16 or bfloat16, mixed as they come; the norm is float32. PyTorch's function does
        the work for float64 and for DTensors, whose parts are elsewhere.
    Layout: any; what has gaps in its memory is copied.
    Arithmetic: a chunk of a tensor is added up in float32, the chunks in float64. Each gradient is rounded once. NaN
        norms make all gradients NaN, infinite ones make the finite gradients 0.
    Differentiable: no.
    Deterministic: yes.
    Matches: ``torch.nn.utils.clip_grad_norm_``, which rounds norms and factor to the dtype of the gradients.
    Raises: RuntimeError where ``error_if_nonfinite`` is set and the norm is not finite; ValueError for a negative
        ``max_norm``.
    Source: Pascanu et al. 2013.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_(weight, 1.0)
    tensor(5.)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(dict.fromkeys(parameters))
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be at least 0, got {max_norm}")
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm_type = float(norm_type)
    if not grads:
        return torch.tensor(0.0)
    if norm_type not in (2.0, float("inf")) or any(
        is_distributed(grad) or grad.is_sparse or grad.dtype not in _DTYPES for grad in grads
    ):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = grad_norm(grads, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    for device, part in by_device(grads, grads).items():
        dense = [grad if is_dense(grad) else grad.contiguous() for grad in part]
        _ops.clip_grads_(dense, norm.to(device), float(max_norm))
        for grad, scaled in zip(part, dense, strict=True):
            if scaled is not grad:
                grad.copy_(scaled)
    if not torch.compiler.is_compiling():  # nobody else tells autograd of the write
        torch.autograd.graph.increment_version(grads)
    return norm


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
