"""Whether classes from outside of transformers have side effects.

A step does not call modules. That is right for a forward that only returns something, as transformers' do, and wrong
for one that counts its calls or keeps what it has seen. Results do not show the difference, but code does:
`check_effects(model)` reads all functions of the classes' packages that their forwards reach.

It is strict: what it does not know may do anything. A function may change a dict or list that it has made itself, set
a field of the output that a call has returned to it, as the logits of super().forward(), and warn.
"""

import builtins
import logging
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.utils import ModelOutput

from ..errors import UnknownLayout
from .origin import codes_in, functions_of, home, is_constant, is_list
from .variables import Variables

_KNOWN = {"transformers", "torch"}
_STORES = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"}
_STORES_ITEM = {"STORE_SUBSCR", "DELETE_SUBSCR"}
_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_MODULES = {"torch", "transformers", "math", "functools", "itertools", "operator", "typing", "collections"}
_MODULES |= {"warnings", "logging"}
# Packages whose functions and classes may be called.
_CALLED = _MODULES | {"builtins", "abc", "contextlib", "copy", "dataclasses", "enum", "inspect", "types"}
_BUILTINS = {"abs", "all", "any", "bool", "callable", "dict", "enumerate", "float", "getattr", "hasattr", "int", "len"}
_BUILTINS |= {"isinstance", "issubclass", "iter", "list", "max", "min", "next", "pow", "range", "reversed", "round"}
_BUILTINS |= {"set", "slice", "sorted", "str", "sum", "super", "tuple", "type", "zip", "frozenset", "map", "filter"}
# Methods that change a dict or a list. `update` is that of a cache, too: members may be no dict or set.
_OF_CONTAINERS = {"append", "extend", "insert", "remove", "clear", "setdefault", "pop", "popitem", "sort", "reverse"}
_OF_CONTAINERS |= {"update"}
# Other functions that change what they are called on or with, or the state of a library.
_MUTATORS = {"add", "discard", "appendleft", "popleft", "extendleft", "move_to_end"}
_MUTATORS |= {"intersection_update", "difference_update", "symmetric_difference_update"}
_MUTATORS |= {"write", "put", "send", "register_buffer", "register_parameter", "register_module", "add_module"}
_MUTATORS |= {"register_forward_hook", "register_forward_pre_hook", "__dict__", "__setattr__", "__delattr__"}
_MUTATORS |= {"__setitem__", "__delitem__", "setitem", "delitem"}
_MUTATORS |= {"save", "manual_seed", "set_seed", "set_rng_state", "set_default_dtype", "set_default_device"}
_OF_OUTPUTS = {field.name for cls in (BaseModelOutput, CausalLMOutputWithPast) for field in fields(cls)}
_IN_PLACE = {"i" + name.rstrip("_") for name in dir(operator)} & {*dir(operator)}  # iadd and its like
_MUTATORS |= _IN_PLACE | {f"__{name}__" for name in _IN_PLACE}


def _changes(name: str) -> bool:
    """Whether a function of this name changes something; by PyTorch's convention it does with a _ at the end."""
    return name in _MUTATORS or (name.endswith("_") and not name.endswith("__"))


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
    left = [function for cls in foreign for function in functions_of(cls.forward)]
    seen, named = set(), set()
    while left:
        if (function := left.pop()) in seen:
            continue
        seen.add(function)
        left += _held(function)
        package = _package(home(function))
        if package in _CALLED:
            continue
        if package not in packages:
            raise UnknownLayout(f"calls {function.__qualname__}, which is from {home(function)}")
        for code in codes_in(function.__code__):
            _check_code(code, function)
            globals_ = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
            for name, value in globals_.items():
                left += _check_global(name, value, function)
            classes = [*foreign, *(value for value in globals_.values() if isinstance(value, type))]
            names = {*code.co_names, *filter(_is_name, code.co_consts)}  # getattr() and its like take strings
            members = [value for name in names for cls in classes for value in _member(cls, name)]
            left += [part for value in members for part in functions_of(value)]
            named |= names
    for module in modules:
        _check_members(module, named - _OF_MODULES)


def _is_name(constant: Any) -> bool:
    return isinstance(constant, str) and constant.isidentifier()


def _check_members(module: nn.Module, named: set[str]) -> None:
    """Raise UnknownLayout for a member by which a foreign module may keep what it has seen."""
    members = [(name, vars(module)[name]) for name in named & vars(module).keys()]
    of_class = [(name, value) for name in named for value in _member(type(module), name)]
    members += [(name, value) for name, value in of_class if not functions_of(value)]
    for name, value in members:
        if _may_keep(value):
            raise UnknownLayout(f"may keep something in {name}, a {type(value).__name__}")


def _may_keep(value: Any) -> bool:
    if functions := functions_of(value):
        return any(_package(home(one)) not in _KNOWN for one in functions)
    bases = {base.__module__ for base in type(value).__mro__}
    if "transformers.configuration_utils" in bases or isinstance(value, type) or is_constant(value) or is_list(value):
        return False
    may_change = "transformers.cache_utils" in bases or isinstance(value, torch.Tensor)
    return may_change or (is_foreign(type(value)) and not _is_pure(value))


_OF_MODULES = vars(nn.Module()).keys()


def _check_code(code: types.CodeType, function: types.FunctionType) -> None:
    variables = Variables(function, code)
    for index in range(len(variables.steps)):
        if effect := _stores(variables, index, code) or _calls(variables, index, function):
            _refuse(function, effect)
    for constant in code.co_consts:
        if "out" in (constant if isinstance(constant, tuple) else (constant,)):
            _refuse(function, "computes into an out")
        if _is_name(constant) and _takes_names(code) and (_changes(constant) or constant in _OF_CONTAINERS):
            _refuse(function, f"calls {constant}")


def _stores(variables: Variables, index: int, code: types.CodeType) -> str | None:
    """What a step may change that the function has not made itself."""
    step = variables.steps[index]
    if step.name == "STORE_ATTR" and step.value in _OF_OUTPUTS and variables.is_result(variables.loaded(index), index):
        return None
    if step.name in _STORES or (step.name == "STORE_DEREF" and step.value in code.co_freevars):
        return f"sets {step.value}"
    if step.name == "STORE_SLICE" or (step.name in _STORES_ITEM and not _is_item_of_own(variables, index)):
        return "sets an item"
    if step.in_place and (_takes_names(code) or not _is_of_own_value(variables, index)):
        return "computes in place"
    return None


def _calls(variables: Variables, index: int, function: types.FunctionType) -> str | None:
    """What a step names that does more than return something."""
    step, name = variables.steps[index], variables.steps[index].value
    if step.name == "IMPORT_NAME" and _package(name) not in _MODULES:
        return f"imports {name}"
    if step.name in _LOADS and (_changes(name) or (name in _OF_CONTAINERS and not _is_of_own(variables, index))):
        return f"calls {name}"
    if step.name in ("LOAD_GLOBAL", "LOAD_NAME") and name not in function.__globals__ and _may_do_anything(name):
        return f"calls {name}"
    return None


def _takes_names(code: types.CodeType) -> bool:
    """Whether a code calls what finds a member by a string."""
    return not {"getattr", "attrgetter", "methodcaller"}.isdisjoint(code.co_names)


def _is_item_of_own(variables: Variables, index: int) -> bool:
    """Whether an item that is set is one of a dict or list of this call, by a key that is a constant or a variable; or
    a field of an output."""
    key, owner = variables.steps[index - 1], variables.loaded(index, 2)
    if key.name == "LOAD_CONST" and key.value in _OF_OUTPUTS and variables.is_result(owner, index):
        return True
    return (key.name == "LOAD_CONST" or variables.loaded(index) is not None) and variables.is_container(owner, index)


def _is_of_own_value(variables: Variables, index: int) -> bool:
    """Whether an operator as += changes a variable that holds a result."""
    after = variables.steps[index + 1]
    return after.name == "STORE_FAST" and variables.is_result(after.value, index)


def _is_of_own(variables: Variables, index: int) -> bool:
    """Whether a method is that of a dict or list of this call, or one by which an argument, a cache, is updated."""
    name, is_update = variables.loaded(index), variables.steps[index].value == "update"
    return variables.is_container(name, index) or (is_update and variables.is_result(name, index, or_argument=True))


def _refuse(function: types.FunctionType, what: str) -> None:
    raise UnknownLayout(f"may do more than return something: {function.__qualname__} {what}")


def _may_do_anything(name: str) -> bool:
    """Whether a builtin is a function that is not known to return something only."""
    value = getattr(builtins, name, None)
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    return callable(value) and not is_error and name not in _BUILTINS


def _check_global(name: str, value: Any, function: Callable) -> list[types.FunctionType]:
    """The functions behind a global of a foreign function, which may be read only."""
    functions = functions_of(value)
    if any(_changes(one.__name__) for one in functions):
        _refuse(function, f"calls {name}")
    if isinstance(value, types.ModuleType):
        is_known_one = _package(value.__name__) in _MODULES
    elif isinstance(value, type):
        is_known_one = _package(value.__module__) in _CALLED or _returns_or_computes(value)
    else:
        is_known_one = is_constant(value) or _is_pure(value) or isinstance(value, logging.Logger)
    if not (functions or is_known_one or _package(type(value).__module__) in {*_KNOWN, "typing"}):
        _refuse(function, f"uses {name}")
    return functions


def _is_pure(value: Any) -> bool:
    """Whether a value is a function of C that only returns something."""
    if not isinstance(value, types.BuiltinFunctionType) or _changes(value.__name__):
        return False
    owner = value.__self__
    if owner is builtins:
        return value.__name__ in _BUILTINS
    if isinstance(owner, types.ModuleType):
        return _package(owner.__name__).lstrip("_") in _MODULES
    return value is getattr(torch, value.__name__, None)


def _returns_or_computes(cls: type) -> bool:
    """Whether a foreign class is for results of a model, or a module, whose forward is looked at if it is a part."""
    return issubclass(cls, (ModelOutput, nn.Module)) or issubclass(cls, tuple)


def _held(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The functions in the closure and the defaults of one, and what it wraps.

    Raises UnknownLayout where it may write to what is there.
    """
    names, defaults = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
    held += [*zip(names[len(names) - len(defaults) :], defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
    is_looked_at = _package(home(function)) not in _CALLED
    for name, value in held:
        yield from (functions := functions_of(value))
        is_harmless = functions or isinstance(value, type) or is_constant(value) or _is_pure(value)
        if is_looked_at and not is_harmless:
            _refuse(function, f"has {name}, a {type(value).__name__}, around it")
    yield from functions_of(getattr(function, "__wrapped__", None))


def _member(cls: type, name: str) -> Iterator[Any]:
    """What an attribute may come to that is looked up in a class."""
    for base in cls.__mro__:
        if is_foreign(base) and base is not object and name in vars(base):
            yield vars(base)[name]


def _package(module: str) -> str:
    return module.split(".")[0]
