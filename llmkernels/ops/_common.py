"""What the op files share: how a public function reaches its op, and how an op gets its fake."""

from collections.abc import Callable

import torch
from torch import Tensor


def caller(name: str) -> Callable:
    """The function that calls op `name`: without its autograd kernel where no input needs a gradient.

    That kernel is Python and costs about 4 µs even when there is nothing to record; the overload `no_grad` of an op
    has none. Compilers, exporters and anything else that traces see the plain op.
    """
    packet = getattr(torch.ops.llmkernels, name)
    op, no_grad = packet.default, packet.no_grad._op  # _op is what calling the overload calls, one Python frame deeper
    is_grad_enabled, is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling

    def call(*args):
        if is_compiling() or (is_grad_enabled() and _requires_grad(args)):
            return op(*args)
        return no_grad(*args)

    return call


def _requires_grad(args) -> bool:
    for argument in args:  # noqa: SIM110, a generator would cost a microsecond
        if isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def register_fake(name: str, fake: Callable) -> None:
    """Shape inference of a differentiable op `name`, for both of its overloads."""
    for overload in (name, f"{name}.no_grad"):
        torch.library.register_fake(f"llmkernels::{overload}", fake)


def contiguous_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the shape, dtype and device of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
