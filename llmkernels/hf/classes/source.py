"""Copies of a function with something of its source replaced: see `bind_global` and `fuse_adds`.

The function's source is compiled again inside a scope that has the replacements as locals, which turns them into
closure variables. With a copied dict of globals instead, later changes of other globals of that module would not be
seen, and TorchDynamo up to 2.11 guards such a function on the original module.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

from ..errors import UnknownLayout


def bind_global(function: Callable, name: str, value: Callable) -> Callable:
    """A copy of `function` for which the global `name` is `value`. It shares all other globals with the original.

    Calls of `name` get the function's own first argument in front of theirs.
    Raises UnknownLayout if the source does not give the same function.
    """
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None or name not in code.co_names:
        raise UnknownLayout(f"its forward does not call {name} directly")

    def with_self(tree: ast.FunctionDef) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                first = ast.Name(tree.args.args[0].arg, ast.Load())
                node.args.insert(0, ast.copy_location(first, node.func))

    return _decorated_as(function, _rewritten(inner, {name: value}, with_self))


_ADD_NORM = "_add_norm"
_NORMED = "_normed"


def fuse_adds(function: Callable, add_norm: Callable) -> tuple[Callable, tuple[str, ...]]:
    """A copy of a forward with each add and the norm behind it in one call, and the names of those norms.

    They may be other modules than norms: which they are, the instance knows.

        hidden_states = residual + f(x)            _normed, hidden_states = add_norm(self, self.norm, f(x), residual)
        residual = hidden_states             ->    residual = hidden_states
        hidden_states = self.norm(hidden_states)   hidden_states = _normed

    add_norm returns norm(sum) and the sum. Raises UnknownLayout where no norm follows an add directly.
    """
    while getattr(function, "__globals__", {}).get("__name__") == "transformers.modeling_layers":
        function = function.__wrapped__  # the wrapper that checkpoints, which every subclass gets anew
    norms: list[str] = []

    def fuse(tree: ast.FunctionDef) -> None:
        me = tree.args.args[0].arg
        for node in ast.walk(tree):
            for field in ("body", "orelse"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    for first, *rest in [statements[at:] for at in range(len(statements))]:
                        if (name := _fuse_first(me, first, rest)) is not None:
                            norms.append(name)

    copy = _decorated_as(function, _rewritten(inspect.unwrap(function), {_ADD_NORM: add_norm}, fuse))
    if not norms:
        raise UnknownLayout("no norm follows an add directly")
    return copy, tuple(norms)


def _fuse_first(me: str, add: ast.stmt, rest: list[ast.stmt]) -> str | None:
    """Rewrite an add and the norm in the statements behind it. The norm's name, or None where that is not there."""
    match add:
        case ast.Assign([ast.Name(total) as target], ast.BinOp(ast.Name() as residual, ast.Add(), x)):
            names = {total}
        case _:
            return None
    for statement in rest:
        match statement:
            case ast.Assign([ast.Name(copy)], ast.Name(name)) if name in names:
                names.add(copy)
                continue
        if not isinstance(statement, ast.Assign):
            return None
        for node in ast.walk(statement.value):
            match node:
                case ast.Call(ast.Attribute(ast.Name(owner), norm) as called, [ast.Name(name)], []) if (
                    owner == me and name in names
                ):
                    # In place: the nodes belong to the tree that is compiled.
                    function = ast.Name(_ADD_NORM, ast.Load())
                    arguments = [ast.Name(me, ast.Load()), called, x, residual]
                    result = ast.Tuple([ast.Name(_NORMED, ast.Store()), target], ast.Store())
                    add.targets, add.value = [result], ast.Call(function, arguments, [])
                    statement.value = _Replace(node, ast.Name(_NORMED, ast.Load())).visit(statement.value)
                    ast.fix_missing_locations(add)
                    ast.fix_missing_locations(statement)
                    return norm
        return None
    return None


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def _rewritten(function: Callable, values: dict[str, Any], rewrite: Callable[[ast.FunctionDef], None]) -> Callable:
    code = function.__code__
    try:
        source = textwrap.dedent(inspect.getsource(function))
        same = _compile_in_scope(source, code, code.co_freevars)
    except (OSError, SyntaxError) as error:
        raise UnknownLayout(f"the source of its forward is not available ({error})") from error
    if (same.co_names, same.co_varnames) != (code.co_names, code.co_varnames):  # the file has changed since
        raise UnknownLayout("the source of its forward is not what was loaded")
    bound = _compile_in_scope(source, code, (*code.co_freevars, *values), rewrite)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in values.items()}
    closure = tuple(cells[variable] for variable in bound.co_freevars)
    copy = functools.update_wrapper(_function(bound, function, closure), function, updated=())
    del copy.__wrapped__
    return copy


def _function(code: types.CodeType, like: Callable, closure: tuple[types.CellType, ...]) -> Callable:
    """A function with the globals, the name and the defaults of another one."""
    made = types.FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__ = like.__kwdefaults__
    return made


_RENAMES = "transformers.utils.deprecation"  # where the decorators are from that rename arguments


def with_renamings(forward: Callable, made: Callable) -> Callable:
    """`made` behind those decorators of `forward` that rename arguments: it gets them by their new names alone."""
    return _decorated_as(forward, made, _RENAMES)


def _decorated_as(function: Callable, inner: Callable, by: str | None = None) -> Callable:
    """`inner` behind the decorators of `function`; or those of the module `by`."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return inner
    inner = _decorated_as(wrapped, inner, by)
    return _redecorated(function, inner) if by is None or function.__globals__["__name__"] == by else inner


def _redecorated(wrapper: Callable, inner: Callable) -> Callable:
    """A copy of a decorator's wrapper around another function. Raises UnknownLayout unless it holds that in a cell."""
    cells = getattr(wrapper, "__closure__", None) or ()
    holds = [cell.cell_contents is wrapper.__wrapped__ for cell in cells]
    if sum(holds) != 1:
        raise UnknownLayout("its forward is wrapped by a decorator of an unknown layout")
    closure = tuple(types.CellType(inner) if held else cell for held, cell in zip(holds, cells, strict=True))
    return functools.update_wrapper(_function(wrapper.__code__, wrapper, closure), inner)


def _compile_in_scope(
    source: str, code: types.CodeType, scope: tuple[str, ...], rewrite: Callable[[ast.FunctionDef], None] | None = None
) -> types.CodeType:
    """The code of the function that `source` defines, nested in a function with the locals `scope`."""
    outer = ast.parse(f"def scope({', '.join(scope)}): pass")
    outer.body[0].body = ast.parse(source).body
    function = outer.body[0].body[0]
    if rewrite is not None:
        rewrite(function)
    ast.increment_lineno(function, code.co_firstlineno - 1)
    compiled = compile(outer, code.co_filename, "exec", dont_inherit=True)
    for name in ("scope", code.co_name):
        nested = [constant for constant in compiled.co_consts if isinstance(constant, types.CodeType)]
        compiled = next((constant for constant in nested if constant.co_name == name), None)
        if compiled is None:
            raise SyntaxError(f"no function {name} in it")
    return compiled
