"""Casts of modules that leave some of their tensors as they are."""

from collections.abc import Callable

from torch import Tensor


def moving_only(kept: tuple[Tensor | None, ...], fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What ``Module._apply`` does to each tensor, `fn`, which moves or casts; those of `kept` are moved only."""

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        is_kept = any(tensor is other for other in kept)
        return tensor.to(moved.device) if is_kept and moved.dtype != tensor.dtype else moved

    return move
