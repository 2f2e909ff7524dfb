"""Why something is left as it is: a class, a module of a model, or a call. Caught inside of the package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Reason(Exception):
    """Why something is left as it is."""


class UnknownLayout(Reason):
    """Why a class is not replaced."""


class NoStep(Reason):
    """Why the decode step can not run."""


class Refusal(NoStep):
    """Why a model can not be described. It holds until the model changes."""


class Distrust(NoStep):
    """Why a module can not be read without calling it. `{}` in the reason stands for the module's name."""

    def __init__(self, module: nn.Module, reason: str):
        super().__init__(reason)
        self.module = module


@contextmanager
def named_in(model: nn.Module) -> Iterator[None]:
    """A block that looks at a model: what it finds of a class is a Refusal, and of a module NoStep with its name."""
    cls = type(model).__name__
    try:
        yield
    except Distrust as reason:
        name = next((name for name, module in model.named_modules() if module is reason.module), "")
        raise NoStep(str(reason).replace("{}", name or cls)) from None
    except UnknownLayout as reason:
        raise Refusal(f"{cls} {reason}") from None


def reason_of(function: Callable, *arguments: Any) -> str | None:
    """Why a function refuses its arguments, or None."""
    try:
        function(*arguments)
    except Reason as reason:
        return str(reason)
    return None
