"""What tensors are made of, recorded while code runs.

Recorder              a mode of torch's that gives each tensor a Node, which says what made it
StandIn, Member       stand for a module and its members, whatever their names: a forward runs without a module
ForwardRecorder       records such a forward, on tensors without numbers
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import UnknownLayout

# Functions that change no value.
SAME = {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "to"}
SAME |= {"float", "type_as", "clone", "detach", "dropout", "getitem", "view_as", "reshape_as", "swapaxes"}
_CALLS = {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul", "multiply": "mul"}
_CALLS |= {"truediv": "div", "itruediv": "div", "idiv": "div", "true_divide": "div", "divide": "div"}


@dataclass(eq=False)
class Node:
    """A tensor and what it was made by.

    kind              args
    ----------------- -------------------------------------------------------------------
    "parameter"       of the model, `name`
    "constant"        any other that was there before: a buffer or an argument has its `name`
    "embedding"       ids, weight
    "product"         x, weight, bias or None: x W^T + b
    "attention"       q, k, v, mask or None; `options` are the other arguments, the layers of the cache that k
                      and v were given to, and a function of other queries; values are (1, T, heads, D)
    "module"          the arguments of a call of the module `name`, which has no parts and returns a tensor
    "tables"          the same, of a module that returns several; `options` has the index
    "add"             two summands
    "scale"           what is multiplied, and a Number
    "tanh", "same"    x; the same numbers, maybe in another shape
    "other"           of the function `name`
    """

    kind: str
    value: Tensor  # as it was when it was made
    args: tuple[Any, ...] = ()
    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    order: int = 0

    def nearest(self, *kinds: str) -> list["Node"]:
        """The first ones of these kinds that it was made of, itself included, in the order in which they were made."""
        found, seen, left = [], set(), [self]
        while left:
            if (node := left.pop()) in seen:
                continue
            seen.add(node)
            if node.kind in kinds:
                found.append(node)
            elif node.kind != "tables":
                left += node.nodes()
        return sorted(found, key=lambda node: node.order)

    def nodes(self) -> Iterator["Node"]:
        return (node for node in self.args if isinstance(node, Node))

    def stripped(self) -> "Node":
        """The first node that has other numbers than those that it was made of."""
        node = self
        while node.kind == "same":
            node = node.args[0]
        return node


class Recorder(TorchFunctionMode):
    unseen = SAME  # functions that have done nothing where they return what they were given, unlike those in place

    def __init__(self):
        super().__init__()
        self.kept: list[Tensor] = []  # so that no other tensor gets the id of one
        self.known: dict[int, Node] = {}  # by the id of its tensor

    def add(self, tensor: Tensor, node: Node) -> Node:
        self.kept.append(tensor)
        self.known[id(tensor)] = node
        node.order = len(self.kept)
        return node

    def node(self, tensor: Tensor) -> Node:
        known = self.known.get(id(tensor))
        return self.add(tensor, Node("constant", tensor.detach())) if known is None else known

    def nodes_in(self, values: tuple) -> tuple[Any, ...]:
        """Arguments with the nodes of tensors in their place, those of tuples and lists, too."""
        return tuple(self.node(x) if isinstance(x, Tensor) else x for x in _flat(values))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = self.nodes_in((*args, *kwargs.values()))
        results = self.results(function, args, kwargs)
        name = getattr(function, "__name__", "").strip("_")
        for index, result in enumerate(results) if isinstance(results, (tuple, list)) else ((None, results),):
            if isinstance(result, Tensor) and not (id(result) in self.known and name in self.unseen):
                self.add(result, self.made(_CALLS.get(name, name), result.detach().clone(), given, index))
        return results

    def results(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def made(self, name: str, value: Tensor, given: tuple, index: int | None) -> Node:
        return Node("other", value, given, name, {} if index is None else {"index": index})


def _flat(values: tuple) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


# --- a forward without its module


class Member:
    """Stands for a member of a module, or an argument, of which nothing is known but its name."""

    def __init__(self, recorder: "ForwardRecorder", name: str):
        self._recorder, self.name = recorder, name

    def __call__(self, *args, **kwargs):
        return self._recorder.called(self.name, args, kwargs)

    def __bool__(self):
        raise UnknownLayout(f"its forward depends on {self.name}")

    def __eq__(self, other):
        return self is other or bool(self)

    __hash__ = object.__hash__

    def __repr__(self):
        return self.name

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:  # which makes it an operand that torch gives to the recorder
        return NotImplemented


class StandIn:
    """Stands for a module, or its config: it has the members that it is given, and a Member for each other name."""

    def __init__(self, recorder: "ForwardRecorder", prefix: str = "", **members: Any):
        vars(self).update(members, _recorder=recorder, _prefix=prefix)

    def __getattr__(self, name: str) -> Member:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Member(self._recorder, self._prefix + name))

    def __setattr__(self, name: str, value: Any):
        raise UnknownLayout(f"its forward sets {name}")


class ForwardRecorder(Recorder):
    """Records a forward that runs with a StandIn, on tensors without numbers. What it does depends on no number, no
    shape and no member, or it is refused."""

    unseen = frozenset()

    def argument(self, name: str) -> Tensor:
        tensor = torch.empty(2, 4, 8, device="meta")
        self.add(tensor, Node("constant", tensor, name=name))
        return tensor

    def run(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """What the forward returns. Raises UnknownLayout where it needs more than these have."""
        try:
            with self:
                return forward(*args, **kwargs)
        except Exception as error:
            raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error

    def called(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of a member returns a tensor like the first that it is given."""
        given = *args, *kwargs.values()
        result = _like_first(given)
        self.add(result, Node("module", result, self.nodes_in(given), name))
        return result

    def results(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = *args, *kwargs.values()
        if any(isinstance(x, Member) for x in _flat(given)):
            return _like_first(given)
        results = super().results(function, args, kwargs)
        if not all(isinstance(x, Tensor) for x in _flat((results,))):
            name = getattr(getattr(function, "__self__", function), "__name__", function)
            raise UnknownLayout(f"its forward depends on the {name} of a tensor")
        return results

    def expression(self, x: Any) -> Any:
        """How a tensor is made, in nested tuples: ("self", "down_proj", ("mul", ...)), the first of several results
        (0, "chunk", ...), an argument by its name. Where it is nested deeper than what is looked for, "..."."""
        return _expression(self.node(x) if isinstance(x, Tensor) else x)


def _like_first(values: tuple) -> Tensor:
    first = next((x for x in _flat(values) if isinstance(x, Tensor)), None)
    if first is None:
        raise UnknownLayout("its forward computes with its members alone")
    return torch.empty_like(first)


def _expression(x: Any, depth: int = 8) -> Any:
    match x:
        case Member():
            return "self", x.name
        case Node(kind="constant"):
            return x.name
        case Node() if depth:
            start = ("self", x.name) if x.kind == "module" else (x.name,)
            index = x.options.get("index")
            return *(() if index is None else (index,)), *start, *(_expression(each, depth - 1) for each in x.args)
        case Node():
            return "..."
    return x


def words(expression: Any) -> str:
    """An expression as code."""
    match expression:
        case (int() as index, *of):
            return f"{words((*of,))}[{index}]"
        case ("self", name):
            return name
        case ("self", name, *arguments) | (str() as name, *arguments):
            return f"{name}({', '.join(map(words, arguments))})"
    return str(expression)
