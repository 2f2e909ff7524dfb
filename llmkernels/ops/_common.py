"""What the op files share: how a public function reaches its op, and the shapes of fakes."""

import torch
from torch import Tensor


def call(op: torch._ops.OpOverload, *args):
    """Call `op`, below autograd where no input needs a gradient.

    An op's Python autograd kernel costs about 4 µs even when there is nothing to record. Compilers, exporters and
    anything else that traces see the plain op.
    """
    if (torch.is_grad_enabled() and _requires_grad(args)) or torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op._op(*args)  # what op() calls, one Python frame further down


def _requires_grad(args) -> bool:
    for argument in args:  # noqa: SIM110, a generator would cost a microsecond
        if isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def contiguous_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the shape, dtype and device of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
