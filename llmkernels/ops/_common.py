"""What the op files share: how a public function reaches its op, and the shapes of fakes."""

import torch
from torch import Tensor


def call(op: torch._ops.OpOverload, *args):
    """Call `op`, below autograd where no input needs a gradient.

    An op's Python autograd kernel costs about 4 µs even when there is nothing to record. Compilers, exporters and
    anything else that traces see the plain op.
    """
    if torch.compiler.is_compiling() or needs_grad(*args):
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def needs_grad(*args) -> bool:
    """Whether autograd would record an op on `args`."""
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def contiguous_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the shape, dtype and device of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
