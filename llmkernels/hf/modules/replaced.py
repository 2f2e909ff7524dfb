"""What the classes that `patch` makes have in common: their bases, and how their modules count.

A patched module has its class changed to a subclass that differs in `forward` only: see layers.py. If the original's
forward is replaced later, that one runs.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._private import _has_any_global_hook
from ..classes.origin import Name, hold
from ..errors import UnknownLayout


class Replaced:
    """Base of every class that `patch` makes. `original` is the class it was made from, and `recipe` the function that
    made it, with the arguments behind that class."""

    original: type[nn.Module]
    recipe: tuple[Any, ...]

    def __new__(cls, *args, **kwargs):
        # A new module, as `type(model).from_pretrained()` makes, is of the original: patch() changes the class of one.
        if "original" in vars(cls) and (args or kwargs):
            return cls.original(*args, **kwargs)
        return super().__new__(cls)

    def __reduce_ex__(self, protocol):
        # The class is made at run time, so a pickle names the one it was made from, and loading makes it again.
        cls = type(self)  # which another thread may change meanwhile
        if not issubclass(cls, Replaced):
            return cls.__reduce_ex__(self, protocol)
        _, _, state, *rest = cls.original.__reduce_ex__(self, max(protocol, 2))
        if _RUNS in state:
            state = {key: value for key, value in state.items() if key != _RUNS}
        return (_unpickle, (cls.original, *cls.recipe), state, *rest)


class Patched(Replaced):
    """Base of every class with another forward.

    `made` is that forward, `options` what it computes, a dataclass of options.py; a LoRA layer has none.
    `is_current()` says whether it still stands for what the original computes: False where somebody has replaced a
    function that it was made from; `is_current.calls` are these functions, as names. `asked` are members of the class
    that the original's forward uses, and that no module may have by itself.
    """

    asked: frozenset[str] = frozenset()
    made: Callable
    options: Any
    is_current: Callable[[], bool]


class Generating(Replaced):
    """Base of every model class with another loop behind generate(), and a forward by the step: see forward.py.

    `prompts_in_fp8`: whether that was asked for.
    """

    prompts_in_fp8: bool


def _unpickle(original: type[nn.Module], make: Callable, *options: Any) -> nn.Module:
    try:
        cls = make(original, *options)
    except UnknownLayout:  # another transformers than the one that wrote the pickle: what it computes is the same
        cls = original
    made = cls.__new__(cls)
    if cls is not original:
        start_count(made)
    return made


_RUNS = "_llmkernels_runs"  # the member in which a patched module counts: there from the beginning, see guard.py


def start_count(module: nn.Module) -> None:
    vars(module)[_RUNS] = {}


def count(module: nn.Module, op: str, reason: str | None = None) -> None:
    """Count that a module has run an op, or WITHOUT one for this reason. Compiled graphs do not count."""
    if torch.compiler.is_compiling():
        return
    op = op if reason is None else f"{op}: {reason}"
    members = module.__dict__
    runs = members.get(_RUNS)
    if runs is None:
        runs = members.setdefault(_RUNS, {})
    runs[op] = runs.get(op, 0) + 1


def runs_of(module: nn.Module) -> dict[str, int]:
    """How often a patched module has run which op, or none, with the reason behind a colon where it gave one.

    Calls of several threads at the same time may count as one.
    """
    return dict(vars(module).get(_RUNS, {}))


def forget_runs(module: nn.Module) -> None:
    vars(module).pop(_RUNS, None)


WITHOUT = "without a kernel"


def library_class(cls: type) -> type:
    """The class of transformers' or torch's that a class is, or derives from; never one made here."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("transformers", "torch") and "original" not in vars(base):
            return base
    return cls


def foreign_class(cls: type) -> type | None:
    """The class from outside of transformers and torch that a class is, or derives from, if it makes or computes
    anything itself; never one made here."""
    bases = cls.__mro__[: cls.__mro__.index(library_class(cls))]
    theirs = [base for base in bases if "original" not in vars(base) and not issubclass(Replaced, base)]
    theirs = [base for base in theirs if base not in (Patched, Generating)]
    return theirs[0] if any(name in vars(base) for base in theirs for name in ("__init__", "forward")) else None


def subclass(cls: type[nn.Module], bases: tuple[type, ...], recipe: tuple[Any, ...], **members: Any) -> type[nn.Module]:
    """What `patch` makes of a class, with these bases before it and these members, `forward` among them."""
    # __module__, and the name under which transformers keeps facts about a class, are the original's.
    copied = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = type(cls.__name__, (*bases, cls), copied | {"original": cls, "recipe": recipe} | members)
    made.made = made.forward  # which a base may have wrapped, as transformers' layers do from 5.23
    return made


def is_current_for(cls: type[nn.Module], forward: Callable, calls: tuple[Name, ...] = ()) -> Callable[[], bool]:
    def is_current() -> bool:
        return cls.forward is forward and (torch.compiler.is_compiling() or hold(calls))

    is_current.calls = calls
    return is_current


def own_member(module: nn.Module, asked: frozenset[str]) -> str | None:
    """One of these members that a module has by itself, in the place of its class's, or None."""
    for name in asked:  # a generator would take twice as long, in each call of a module
        if name in module.__dict__:
            return name
    return None


def stepping_aside(
    cls: type[nn.Module],
    is_current: Callable[[], bool],
    forward: Callable,
    takes_one: bool = False,
    asked: frozenset[str] = frozenset(),
) -> Callable:
    """`forward`, or where it is not current any more, or a module has one of `asked` by itself, the forward of cls.
    `takes_one`: an argument of any name.

    It has the signature of cls's, and no `__wrapped__`, by which accelerate would find that one and leave ours out.
    """

    @functools.wraps(forward)
    def forward_or_original(self, *args, **kwargs):
        if not is_current() or own_member(self, asked) is not None:
            count(self, WITHOUT)
            return cls.forward(self, *args, **kwargs)
        if takes_one:
            return forward(self, *args, *kwargs.values())
        return forward(self, *args, **kwargs)

    forward_or_original.__signature__ = inspect.signature(forward)
    del forward_or_original.__wrapped__
    return forward_or_original


# --- what a call of a module runs


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the ops take such a tensor: on CUDA none takes float64, to which a model may move after patch()."""
    return not (x.dtype is torch.float64 and x.is_cuda)


def runs_only_forward(module: nn.Module) -> bool:
    """Whether module(x) is the forward of its class and nothing else: no hooks, no forward of the instance."""
    return has_no_hooks(module) and not _has_any_global_hook()


def has_no_hooks(module: nn.Module) -> bool:
    """The same, but for hooks on all modules."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
