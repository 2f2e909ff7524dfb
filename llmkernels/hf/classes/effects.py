"""Whether what a class from outside of transformers computes is all that it does.

A step leaves the calls of modules out. That is right for a forward that only returns something, as transformers' do,
and wrong for one that counts its calls or keeps what it has seen. The numbers do not show the difference, so the
code has to: `check_effects(model)` looks at all functions of the classes' packages that their forwards reach.

It is strict: what it does not know may do anything.
"""

import builtins
import dis
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from typing import Any

import torch
from torch import nn

from ..errors import UnknownLayout

_KNOWN = {"transformers", "torch"}
_STORES = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_MODULES = {"torch", "transformers", "math", "functools", "itertools", "operator", "typing", "collections"}
_BUILTINS = {"abs", "all", "any", "bool", "callable", "dict", "enumerate", "float", "getattr", "hasattr", "int", "len"}
_BUILTINS |= {"isinstance", "issubclass", "iter", "list", "max", "min", "next", "pow", "range", "reversed", "round"}
_BUILTINS |= {"set", "slice", "sorted", "str", "sum", "super", "tuple", "type", "zip", "frozenset", "map", "filter"}
# Methods that change what they are called on, but for `update` of a cache: members may be no dict or set.
_MUTATORS = {"append", "extend", "insert", "add", "remove", "discard", "clear", "setdefault", "popitem", "appendleft"}
_MUTATORS |= {"write", "put", "send", "register_buffer", "register_parameter", "register_module", "add_module"}
_MUTATORS |= {"register_forward_hook", "register_forward_pre_hook", "__setattr__", "__setitem__", "__dict__"}
_MUTATORS |= {name for name in dir(torch.Tensor) if name[-1] == "_" != name[-2:-1]}


def is_foreign(cls: type) -> bool:
    """Whether a class is neither transformers' nor torch's."""
    return _package(cls.__module__) not in _KNOWN


def packages_of(classes: Iterable[type]) -> set[str]:
    """The packages of the foreign ones of these classes."""
    return {_package(cls.__module__) for cls in classes if is_foreign(cls)}


def check_effects(model: nn.Module) -> None:
    """Raise UnknownLayout where a forward of a model, or what it calls, may do more than to return something.

    Functions of transformers and torch do not. Those of other packages than the foreign classes' own may do anything.
    """
    modules = [module for module in model.modules() if is_foreign(type(module))]
    foreign = list(dict.fromkeys(map(type, modules)))
    packages = packages_of(foreign)
    left = [function for cls in foreign for function in _functions(cls.forward)]
    seen, named = set(), set()
    while left:
        if (function := left.pop()) in seen:
            continue
        seen.add(function)
        left += _enclosed(function)
        package = _package(_home(function))
        if package in _KNOWN or package in sys.stdlib_module_names:
            continue
        if package not in packages:
            raise UnknownLayout(f"calls {function.__qualname__}, which is from {_home(function)}")
        for code in _codes(function.__code__):
            _check_code(code, function)
            named.update(code.co_names)
            for name in code.co_names:
                if name in function.__globals__:
                    left += _check_global(name, function.__globals__[name], function)
                left += [part for cls in foreign for value in _member(cls, name) for part in _functions(value)]
    for module in modules:
        _check_members(module, named - _OF_MODULES)


def _check_members(module: nn.Module, named: set[str]) -> None:
    """Raise UnknownLayout for a member by which a foreign module may keep what it has seen."""
    for name in named & vars(module).keys():
        value = vars(module)[name]
        is_config = any(base.__module__ == "transformers.configuration_utils" for base in type(value).__mro__)
        if is_config or _is_constant(value) or isinstance(value, list):
            continue
        origins = {_package(_home(one)) for one in [*_functions(value)] or [type(value)]}
        if isinstance(value, (dict, set)) or not origins <= {*_KNOWN, "builtins"}:
            raise UnknownLayout(f"may keep something in {name}, a {type(value).__name__}")


_OF_MODULES = vars(nn.Module()).keys()


def _check_code(code: types.CodeType, function: types.FunctionType) -> None:
    for step in dis.get_instructions(code):
        name = step.argval
        is_builtin = step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name not in function.__globals__
        if step.opname in _STORES or (step.opname == "STORE_DEREF" and name in code.co_freevars):
            _refuse(function, f"sets {name}" if isinstance(name, str) else "sets an item")
        if step.opname == "IMPORT_NAME" and _package(name) not in _MODULES:
            _refuse(function, f"imports {name}")
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and name in _MUTATORS:
            _refuse(function, f"calls {name}")
        if is_builtin and _may_do_anything(name):
            _refuse(function, f"calls {name}")


def _refuse(function: types.FunctionType, what: str) -> None:
    raise UnknownLayout(f"may do more than return something: {function.__qualname__} {what}")


def _may_do_anything(name: str) -> bool:
    """Whether a builtin is a function that is not known to return something only."""
    value = getattr(builtins, name, None)
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    return callable(value) and not is_error and name not in _BUILTINS


def _check_global(name: str, value: Any, function: Callable) -> list[types.FunctionType]:
    """The functions behind a global of a foreign function, which may be read only."""
    if isinstance(value, types.ModuleType):
        if _package(value.__name__) in _MODULES:
            return []
    elif isinstance(value, type):
        if (
            not is_foreign(value)
            or _package(value.__module__) in sys.stdlib_module_names
            or _returns_or_computes(value)
        ):
            return []
    elif functions := list(_functions(value)):
        return functions
    elif _is_constant(value) or isinstance(value, (types.BuiltinFunctionType, logging.Logger)):
        return []
    if _package(type(value).__module__) in {*_KNOWN, "typing"}:
        return []
    _refuse(function, f"uses {name}")
    return []


def _returns_or_computes(cls: type) -> bool:
    """Whether a foreign class is for results of a model, or a module, whose forward is looked at if it is a part."""
    from transformers.utils import ModelOutput

    return issubclass(cls, (ModelOutput, nn.Module)) or issubclass(cls, tuple)


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (str, bytes, Number, torch.dtype, torch.device, range, slice))


def _enclosed(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions in the closure of one, and what it wraps. Raises UnknownLayout where it may write to that."""
    foreign = _package(_home(function)) not in {*_KNOWN, *sys.stdlib_module_names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell == types.CellType():
            continue
        value = cell.cell_contents
        yield from _functions(value)
        if foreign and not isinstance(value, type) and not _is_constant(value) and not callable(value):
            _refuse(function, f"has {name} around it")
    yield from _functions(getattr(function, "__wrapped__", None))


def _member(cls: type, name: str) -> Iterator[Any]:
    """What an attribute may come to that is looked up in a class."""
    for base in cls.__mro__:
        if is_foreign(base) and base is not object and name in vars(base):
            yield vars(base)[name]


def _functions(value: Any) -> Iterator[types.FunctionType]:
    value = getattr(value, "func", value) if not isinstance(value, types.FunctionType) else value
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    if isinstance(value, types.FunctionType):
        yield value


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)


def _home(function: Callable) -> str:
    """The module of a function, or of a class."""
    if isinstance(function, type):
        return function.__module__
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def _package(module: str) -> str:
    return module.split(".")[0]
