"""Where the functions are from by which a class computes, and whether they are still the same.

check_origin(function)      it is transformers' own
names_of(function, cls)     what it calls or reads by name, however deep
asked_of_class(cls)         those of these names that a class has
read_by(cls)                names of all members that its forward reads, and others
hold(names)                 whether the names still stand for that
entry(name)                 a name as csrc/record.h looks it up
"""

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UnknownLayout


def check_origin(forward: Callable, origins: tuple[str, ...] = ("transformers",)) -> None:
    """Raise UnknownLayout for a forward that is not of these packages: it may have side effects.

    Its wrappers must be from one of them, too.
    """
    owner = "transformers'" if "transformers" in origins else "PEFT's"
    while forward is not None:
        if home(forward).split(".")[0] not in origins:
            raise UnknownLayout(f"its forward is not {owner} own but from {home(forward)}")
        forward = getattr(forward, "__wrapped__", None)


def home(function: Callable) -> str:
    """The module of a function, by what it computes in: its __module__ may be copied from another one."""
    scope = getattr(function, "__globals__", None)
    if scope is None:  # Dynamo, which traces `update` of a cache, has no __module__ of a function's type
        return type(function).__module__
    return scope.get("__name__", "")


# --- names

Name = tuple[Callable[[str], Any], str, Any]  # how a name is looked up, the name, and what it stands for
_names: dict[tuple[Callable, type], tuple[Name, ...]] = {}
_KINDS = types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, staticmethod, classmethod, property


def hold(names: Iterable[Name]) -> bool:
    """Whether names still stand for what they stood for."""
    for get, name, value in names:  # noqa: SIM110, a generator would take twice as long, in each call of a module
        if get(name) is not value:
            return False
    return True


Entry = tuple[Any, str, Any]  # an item of a dict, or an attribute of anything else: whose, the name, and the value


def entry(name: Name) -> Entry:
    """A name as an entry: of a class, the dict behind the view that vars() gives."""
    get, text, value = name
    owner = get.__self__
    return (owner if isinstance(owner, dict) else gc.get_referents(owner)[0], text, value)


def asked_of_origin(function: Any) -> list[Entry]:
    """What `check_origin` looks at: it finds nothing else where these are the same."""
    entries = []
    while function is not None:
        scope, members = getattr(function, "__globals__", None), getattr(function, "__dict__", None)
        if scope is not None:
            entries.append((scope, "__name__", scope.get("__name__")))
        if isinstance(members, dict):
            entries.append((members, "__wrapped__", members.get("__wrapped__")))
        function = getattr(function, "__wrapped__", None)
    return entries


def names_of(function: Callable, cls: type = object) -> tuple[Name, ...]:
    """What a function, a method of `cls`, calls by name: functions, methods, and those of torch; and what these call.
    With constants of its file and its class.

    The same tuple as long as it holds.
    """
    known = _names.get((function, cls))
    if known is None or not hold(known):
        known = _names[function, cls] = tuple(_walk(function, cls))
    return known


def asked_of_class(cls: type[nn.Module]) -> frozenset[str]:
    """The names by which the forward of a class asks a module for what its class has: methods and constants. But for
    those of transformers' base classes, as `gradient_checkpointing`, which modules may have by themselves."""
    general = {*PreTrainedModel.__mro__, *GenerationMixin.__mro__, *GradientCheckpointingLayer.__mro__}
    own = {name for base in cls.__mro__ if base not in general for name in vars(base)}
    return frozenset(own & {name for _, name, _ in names_of(cls.forward, cls)}) - {"forward"}


def read_by(cls: type[nn.Module]) -> set[str]:
    """All names in the code that the forward of a class reaches, those of members among them; and what may be names, as
    of getattr()."""
    reached = [cls.forward, *(value for _, _, value in names_of(cls.forward, cls))]
    functions = {function for value in reached for function in functions_of(value)}
    codes = [code for function in functions for code in codes_in(function.__code__)]
    return {name for code in codes for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}


def members_of_class(cls: type) -> list[Name]:
    """The functions of a class from outside of transformers, as names: what others may call on a module of it."""
    known = "transformers", "torch", "builtins"
    lookups = [vars(base) for base in cls.__mro__ if base.__module__.split(".")[0] not in known]
    return [(found.get, name, value) for found in lookups for name, value in found.items() if isinstance(value, _KINDS)]


def members_of(module: nn.Module) -> list[Name]:
    """The functions that a module has by itself, as names; of a partial its function."""
    members = tuple(vars(module).items())  # another thread may patch the module meanwhile
    found = {name: getattr(value, "func", value) for name, value in members}
    return [(found.get, name, value) for name, value in found.items() if isinstance(value, _KINDS)]


def check_names(names: Iterable[Name], packages: Iterable[str] = ()) -> None:
    """Raise UnknownLayout for a function that is neither transformers' nor torch's nor Python's, nor of these
    packages, which effects.py has looked at: it may have side effects."""
    known = {"transformers", "torch", *packages}
    for _, name, value in names:
        for function in functions_of(value):
            package = home(function).split(".")[0]
            if package not in known and package not in sys.stdlib_module_names:
                raise UnknownLayout(f"has a forward that calls {name}, which is from {home(function)}")


def _walk(function: Callable, cls: type) -> Iterator[Name]:
    of_torch = [[vars(torch).get], [vars(F).get], _members(Tensor)]
    seen, left = set(), functions_of(function)
    while left:
        if (part := left.pop()) in seen:
            continue
        seen.add(part)
        left += _enclosed(part)
        # Functions of others than transformers and the class's package are followed to names of torch's alone.
        is_its_own = home(part).split(".")[0] in ("transformers", cls.__module__.split(".")[0])
        scopes = [[part.__globals__.get], _members(cls), *of_torch] if is_its_own else of_torch
        for name in (name for code in codes_in(part.__code__) for name in code.co_names):
            for lookups in scopes:
                values = [get(name) for get in lookups]
                if any(isinstance(value, _KINDS) for value in values) or _has_constant(name, lookups):
                    for get, value in zip(lookups, values, strict=True):
                        yield get, name, value
                        left += functions_of(value)


def is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    return value is None or isinstance(value, (str, bytes, Number, torch.dtype, torch.device, range, slice))


def is_list(value: Any) -> bool:
    """Whether a value is a list of constants."""
    return isinstance(value, list) and all(map(is_constant, value))


def _has_constant(name: str, lookups: list[Callable]) -> bool:
    """Whether the first of the dicts that has a name has a constant under it."""
    owner = next((get.__self__ for get in lookups if name in get.__self__), None)
    return owner is not None and is_constant(owner[name])


@functools.cache
def _members(cls: type) -> list[Callable]:
    """Lookups of the members of a class and its bases, but for those that every module has."""
    return [vars(base).get for base in cls.__mro__ if base not in (nn.Module, object)]


def functions_of(value: Any) -> list[types.FunctionType]:
    """The function with a source that a value is, or that a method, a property or a partial is made of."""
    if not isinstance(value, types.FunctionType):
        value = getattr(value, "func", value)
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return [value] if isinstance(value, types.FunctionType) else []


def _enclosed(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """What a wrapper wraps, and the other functions in its closure."""
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # an empty one
            yield from functions_of(cell.cell_contents)
    yield from functions_of(getattr(function, "__wrapped__", None))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code, and those of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
