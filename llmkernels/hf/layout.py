"""Checks, before a class is replaced, that it computes the same as its replacement.

The checks run both, on symbols or on a few numbers, and do not look at version numbers. If a transformers release
changes a formula, its class is not replaced; if it only moves code, nothing changes.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class UnknownLayout(Exception):
    """Why a class is not replaced."""


class _Symbol(str):
    """An expression as text: arithmetic on it gives the text of the result."""

    def __add__(self, other):
        return _Symbol(f"({self} + {other})")

    def __mul__(self, other):
        return _Symbol(f"({self} * {other})")


def _submodule(name: str, returns_tuple: bool = False) -> Callable:
    def call(*args, **kwargs):
        arguments = [*args, *(f"{key}={value}" for key, value in sorted(kwargs.items()))]
        result = _Symbol(f"{name}({', '.join(map(str, arguments))})")
        return (result, None) if returns_tuple else result

    return call


def check_symbolically(forward: Callable, replacement: Callable, submodules: dict[str, bool]) -> None:
    """Raise UnknownLayout unless both forwards make the same calls of the submodules, written as expressions.

    `submodules` maps each name to whether it returns a tuple. Both forwards get the arguments of the original's
    signature, the first by position, the others by name, and an additional one if it has **kwargs.
    """
    check_origin(forward)
    first, *named = [p for p in inspect.signature(forward).parameters.values() if p.name != "self"]
    arguments = {p.name: _Symbol(p.name) for p in named}

    def expression(function):
        members = {name: staticmethod(_submodule(name, is_tuple)) for name, is_tuple in submodules.items()}
        members |= {"forward": function, "gradient_checkpointing": False, "training": False}
        return function(type("Traced", (), members)(), _Symbol(first.name), **arguments)

    expected = expression(replacement)
    try:
        found = expression(forward)
    except Exception as error:
        raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error
    if found != expected:
        raise UnknownLayout(f"unknown layout of its forward, which computes {found}")


def check_rms_norm(cls: type, replacement: type, eps: str) -> None:
    """Raise UnknownLayout unless a class and its subclass agree on a few rows, rounding order included.

    `eps` names their attribute.
    """
    check_origin(cls.forward)
    norm = replacement.__new__(replacement)
    nn.Module.__init__(norm)
    setattr(norm, eps, 0.25)  # large, so that its place in the formula matters
    x = torch.linspace(-1.5, 2.5, 256, device="cpu").view(4, 64)
    for dtype in (torch.float32, torch.bfloat16):
        norm.weight = nn.Parameter(torch.linspace(0.3, 1.7, 64, device="cpu", dtype=dtype), requires_grad=False)
        try:
            found, expected = cls.forward(norm, x.to(dtype)), norm.forward(x.to(dtype))
        except Exception as error:
            raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error
        # The sum of squares may differ in its last bit, which changes few bfloat16 results or none; another rounding
        # order or formula changes many.
        agree = torch.isclose(found.float(), expected.float(), rtol=1e-5 if dtype is torch.float32 else 0, atol=1e-7)
        if found.dtype != dtype or agree.float().mean() < 0.95:
            raise UnknownLayout("its forward computes another norm than this family's")


def check_rope(original: Callable, replacement: Callable) -> None:
    """Raise UnknownLayout unless two apply_rotary_pos_emb functions agree on a few numbers."""
    q, k, cos, sin = torch.linspace(-2, 2, 3 * 8 * 6, device="cpu").view(6, 1, 3, 8).split((3, 1, 1, 1))
    arguments = q.transpose(0, 1), k.transpose(0, 1), cos[0], sin[0]
    try:
        found = original(*arguments)
    except Exception as error:
        raise UnknownLayout(f"unknown apply_rotary_pos_emb ({type(error).__name__}: {error})") from error
    if not all(torch.allclose(a, b) for a, b in zip(found, replacement(*arguments), strict=True)):
        raise UnknownLayout("its apply_rotary_pos_emb computes another rotation than half-split")


def check_origin(forward: Callable, origins: tuple[str, ...] = ("transformers",)) -> None:
    """Raise UnknownLayout for a forward that is not of these packages: it may have side effects.

    Its wrappers must be from one of them, too.
    """
    owner = "transformers'" if "transformers" in origins else "PEFT's"
    while forward is not None:
        origin = getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__)
        if origin.split(".")[0] not in origins:
            raise UnknownLayout(f"its forward is not {owner} own but from {origin}")
        forward = getattr(forward, "__wrapped__", None)


def bind_global(function: Callable, name: str, value: Any) -> Callable:
    """A copy of `function` for which the global `name` is `value`. It shares all other globals with the original.

    The function's source is compiled again inside a scope that has `name` as a local, which turns the global into a
    closure variable. With a copied dict of globals instead, later changes of other globals of that module would not be
    seen, and TorchDynamo up to 2.11 guards such a function on the original module.
    Raises UnknownLayout if the source does not give the same function.
    """
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or name not in code.co_names:
        raise UnknownLayout(f"its forward does not call {name} directly")
    try:
        source = textwrap.dedent(inspect.getsource(function))
        same = _compile_in_scope(source, code, code.co_freevars)
    except (OSError, SyntaxError) as error:
        raise UnknownLayout(f"the source of its forward is not available ({error})") from error
    if (same.co_names, same.co_varnames) != (code.co_names, code.co_varnames):  # the file has changed since
        raise UnknownLayout("the source of its forward is not what was loaded")
    bound = _compile_in_scope(source, code, (*code.co_freevars, name))
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) | {name: types.CellType(value)}
    closure = tuple(cells[variable] for variable in bound.co_freevars)
    copy = types.FunctionType(bound, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    for attribute in functools.WRAPPER_ASSIGNMENTS:
        setattr(copy, attribute, getattr(function, attribute))
    return copy


def _compile_in_scope(source: str, code: types.CodeType, scope: tuple[str, ...]) -> types.CodeType:
    """The code of the function that `source` defines, nested in a function with the locals `scope`."""
    outer = ast.parse(f"def scope({', '.join(scope)}): pass")
    outer.body[0].body = ast.parse(source).body
    ast.increment_lineno(outer.body[0].body[0], code.co_firstlineno - 1)
    compiled = compile(outer, code.co_filename, "exec", dont_inherit=True)
    for name in ("scope", code.co_name):
        nested = [constant for constant in compiled.co_consts if isinstance(constant, types.CodeType)]
        compiled = next((constant for constant in nested if constant.co_name == name), None)
        if compiled is None:
            raise SyntaxError(f"no function {name} in it")
    return compiled
