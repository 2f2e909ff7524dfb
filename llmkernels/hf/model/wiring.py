"""How the blocks of a decoder layer are wired: found by running its forward on symbols.

    wiring(layer)     x + a(n(x)) ... as a list of Wires, or UnknownLayout

The submodules are stood in for by functions that build expressions, and numbers are those of the layer itself. So
names of norms do not matter, nor in which order a forward adds.
"""

import inspect
from dataclasses import dataclass
from numbers import Number
from typing import Any

from torch import nn

from ..classes.layout import check_origin
from ..errors import UnknownLayout


@dataclass(frozen=True)
class Wire:
    """x += multiplier * post(block(pre(x))), by names of submodules. `source`: how many wires were added to that x."""

    block: str
    pre: str | None
    post: str | None
    multiplier: float
    source: int


class _Expression:
    """`name` of `arguments`: a submodule's call, "+" of two, "*" of one and a number, or the input "x"."""

    def __init__(self, name: str, *arguments: Any):
        self.name = name
        self.arguments = arguments

    def __add__(self, other):
        return _Expression("+", self, other) if isinstance(other, _Expression) else NotImplemented

    def __iadd__(self, other):
        raise UnknownLayout("has an unknown layout of its forward: it adds in place")

    def __mul__(self, other):
        return _Expression("*", self, other) if isinstance(other, Number) else NotImplemented

    __rmul__ = __mul__


class _Stand:
    """A decoder layer whose submodules build expressions. Everything else is the layer's."""

    def __init__(self, layer: nn.Module):
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, name)
        if not isinstance(value, nn.Module):
            return value
        if isinstance(value, nn.Dropout):
            return lambda x: x

        def call(*args, **kwargs):
            [x] = [v for v in (*args, *kwargs.values()) if isinstance(v, _Expression)]
            result = _Expression(name, x)
            return (result, None) if is_attention(value) else result

        return call


def is_attention(module: nn.Module) -> bool:
    """Whether a submodule of a decoder layer returns (output, weights)."""
    return any(cls.__name__.endswith("Attention") for cls in type(module).__mro__)


def wiring(layer: nn.Module, forward: Any) -> tuple[Wire, ...]:
    """The wires of a decoder layer in eval mode. Raises UnknownLayout where `forward` computes anything else."""
    check_origin(forward, ("transformers", "torch"))
    x = _Expression("x")
    _, _x, *others = inspect.signature(forward).parameters.values()
    given = {p.name: None for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    try:
        result = inspect.unwrap(forward)(_Stand(layer), x, **given)
        if isinstance(result, tuple):
            result = result[0]
        terms = _terms(result, x, layer)
    except UnknownLayout:
        raise
    except Exception as error:
        raise UnknownLayout(f"has an unknown layout of its forward ({type(error).__name__}: {error})") from error
    return tuple(terms)


def _terms(result: _Expression, x: _Expression, layer: nn.Module) -> list[Wire]:
    """The summands of a residual stream that begins with x, in the order in which their blocks run."""
    traced = sorted((_trace(term, layer) for term in _leaves(result) if term is not x), key=lambda found: found[1])
    wires: list[Wire] = []
    added = [x]
    for wire, size, source, term in traced:
        leaves = _leaves(source)
        if sorted(map(id, leaves)) != sorted(map(id, added[:size])):
            raise UnknownLayout(f"has an unknown layout of its forward: {wire.block} reads something of its own")
        wires.append(wire)
        added.append(term)
    if len(added) != len(_leaves(result)) or len({wire.block for wire in wires}) < len(wires):
        raise UnknownLayout("has an unknown layout of its forward")
    return wires


def _leaves(node: _Expression) -> list[_Expression]:
    """The summands of a sum of sums."""
    return [leaf for side in node.arguments for leaf in _leaves(side)] if node.name == "+" else [node]


def _trace(term: _Expression, layer: nn.Module) -> tuple[Wire, int, _Expression, _Expression]:
    """The wire of one summand, how many summands there are in what it reads, that, and the summand."""
    multiplier, names, node = 1.0, [], term
    while node.name not in ("+", "x"):
        if node.name == "*":
            if names:
                raise UnknownLayout("has an unknown layout of its forward: it multiplies inside of a block")
            multiplier *= node.arguments[1]
        else:
            names.append(node.name)
        node = node.arguments[0]
    blocks = [name for name in names if any(True for _ in getattr(layer, name).children())]
    if len(blocks) != 1:
        raise UnknownLayout(f"has an unknown layout of its forward: {' of '.join(names) or 'nothing'} is added")
    place = names.index(blocks[0])
    post, pre = names[:place], names[place + 1 :]
    if len(post) > 1 or len(pre) > 1:
        raise UnknownLayout(f"has an unknown layout of its forward: {' of '.join(names)} is added")
    source = len(_leaves(node))
    wire = Wire(blocks[0], next(iter(pre), None), next(iter(post), None), multiplier, source - 1)
    return wire, source, node, term
