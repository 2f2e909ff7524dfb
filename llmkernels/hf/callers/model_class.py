"""The class of a patched model: its loops behind generate(), its forward by the step, its loss without logits."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..classes.cache_name import cache_name
from ..classes.source import with_renamings
from ..errors import UnknownLayout
from ..modules.loss import forward_without_logits, loss_of
from ..modules.replaced import Generating, Patched, is_current_for, stepping_aside, subclass
from .forward import bound_arguments, by_step
from .loop import LOOPS


def model_class(cls: type[nn.Module], generates: bool, loss: bool, fp8: bool = False) -> type[nn.Module]:
    """The subclass of a transformers model class that generates by the decode step, with `fp8` its prompts in FP8; has
    another loss; or both.

    Raises UnknownLayout when cls does not compute what the replacement does.
    """
    return _model_class(cls, cls.forward, generates, loss, fp8)


@functools.cache
def _model_class(cls, forward, generates, loss, fp8):
    is_current, made = is_current_for(cls, forward), forward
    members: dict[str, Any] = {"is_current": staticmethod(is_current), "prompts_in_fp8": fp8}
    bases: tuple[type, ...] = ()

    def in_its_place(replacement: Callable) -> Callable:
        return stepping_aside(cls, is_current, with_renamings(forward, replacement))

    if loss:
        bases, members["options"] = (Patched,), loss_of(forward)
        made = in_its_place(forward_without_logits(forward, members["options"]))
    if generates:
        bases, members = (Generating, *bases), members | _loops(cls)
        made = in_its_place(by_step(made, bound_arguments(forward)))
    return subclass(cls, bases, (model_class, generates, loss, fp8), forward=made, **members)


def _loops(cls: type[nn.Module]) -> dict[str, Callable]:
    """`generate` takes its loop from the class by name, one for greedy search and sampling and others for the rest."""
    loops = {name: loop(getattr(cls, name)) for name, loop in LOOPS.items() if hasattr(cls, name)}
    if "_sample" not in loops or not hasattr(cls, "_prefill"):
        raise UnknownLayout("generate() of this transformers has no loop of a known name")
    if cache_name() is None:
        raise UnknownLayout("generate() of this transformers has no cache of a known name")
    return loops
