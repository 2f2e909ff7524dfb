"""The class of a patched model: its loops behind generate(), its forward by the step, its loss without logits."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..classes.cache_name import cache_name
from ..classes.source import with_renamings
from ..errors import UnknownLayout
from ..modules.loss import forward_without_logits, loss_of
from ..modules.replaced import CausalLM, Generating, is_current_for, stepping_aside
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
    # What it computes is what the original computes, so __module__ and the name under which transformers keeps facts
    # about it are the original's, too.
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"original": cls, "recipe": (model_class, generates, loss, fp8), "prompts_in_fp8": fp8}
    bases: tuple[type, ...] = (cls,)
    if loss:
        members, bases = members | _loss_members(cls, forward), (CausalLM, *bases)
    if generates:
        members, bases = members | _loops(cls) | _step_members(cls, forward, members), (Generating, *bases)
    made = type(cls.__name__, bases, members)
    made.made = made.forward
    return made


def _loops(cls: type[nn.Module]) -> dict[str, Callable]:
    """`generate` takes its loop from the class by name, one for greedy search and sampling and others for the rest."""
    loops = {name: loop(getattr(cls, name)) for name, loop in LOOPS.items() if hasattr(cls, name)}
    if "_sample" not in loops or not hasattr(cls, "_prefill"):
        raise UnknownLayout("generate() of this transformers has no loop of a known name")
    if cache_name() is None:
        raise UnknownLayout("generate() of this transformers has no cache of a known name")
    return loops


def _loss_members(cls: type[nn.Module], forward: Callable) -> dict[str, Callable]:
    options = loss_of(forward)
    is_current = is_current_for(cls, forward)
    made = with_renamings(forward, forward_without_logits(forward, options))
    made = stepping_aside(cls, is_current, made)
    return {"forward": made, "is_current": staticmethod(is_current), "options": options}


def _step_members(cls: type[nn.Module], forward: Callable, members: dict[str, Any]) -> dict[str, Callable]:
    is_current = is_current_for(cls, forward)
    inner = members.get("forward", forward)
    made = with_renamings(forward, by_step(inner, bound_arguments(forward)))
    made = stepping_aside(cls, is_current, made)
    return {"forward": made, "is_current": staticmethod(is_current)}
