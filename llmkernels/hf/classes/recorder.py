"""What tensors are made of, recorded while code runs.

Recorder            a mode of torch's that gives each tensor a Node, which says what made it
ForwardRecorder     records a forward without a module, on tensors without numbers
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
    "product"         x, weight, bias or None: x W^T + b; `options`: the weight is W^T if "transposed"
    "attention"       q, k, v, mask or None; `options` are the other arguments, the layers of the cache that k
                      and v were given to, and a function of other queries; values are (1, T, heads, D)
    "module"          the arguments of a call of the module `name`, which has no parts and returns a tensor
    "tables"          the same, of a module that returns several; `options` has the index
    "add"             two summands
    "scale"           what is multiplied, and a Number
    "tanh", "same"    x; the same numbers, maybe in another shape
    "other"           of the function `name`
    """

    __match_args__ = "name", "args", "options"

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

    @property
    def said(self) -> str:
        """What it is, in words."""
        if self.kind == "product":
            return f"the product with {self.args[1].name}"
        if self.kind == "module":
            return f"the module {self.name}"
        return self.name or {"add": "a sum", "scale": "a multiple"}.get(self.kind, self.kind)

    def stripped(self) -> "Node":
        """The first node that has other numbers than those that it was made of."""
        node = self
        while node.kind == "same":
            node = node.args[0]
        return node

    def unscaled(self) -> tuple["Node", list[Any]]:
        """The first node, stripped, that is not a multiple of what it was made of, and the Numbers in between."""
        numbers = []
        while (node := self.stripped()).kind == "scale":
            self = node.args[0]
            numbers.append(node.args[1])
        return node, numbers


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


class StandIn:
    """Stands for a module, a member of one or an argument, of which nothing is known but the code that gives it."""

    def __init__(self, recorder: "ForwardRecorder", code: str):
        vars(self).update(_recorder=recorder, _code=code)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        code = f"{self._code}.{name}"
        return self._recorder.members.setdefault(code, StandIn(self._recorder, code))

    def __call__(self, *args, **kwargs):
        return self._recorder.called(self._code, args, kwargs)

    def __setattr__(self, name: str, value: Any):
        raise UnknownLayout(f"its forward sets {name}")

    def __bool__(self):
        raise UnknownLayout(f"its forward depends on {self._code}")

    def __eq__(self, other):
        return self is other or bool(self)

    def __repr__(self):
        return self._code

    __torch_function__ = None  # which makes it an operand that torch gives to the recorder


class ForwardRecorder(Recorder):
    """Records a forward that runs with a StandIn, on tensors without numbers. What it does depends on no number, no
    shape and no member but those given, or it is refused."""

    unseen = frozenset()

    def __init__(self, members: dict[str, Any] | None = None):
        super().__init__()
        self.members = members or {}  # by their code, as "self.config"

    def argument(self, name: str) -> Tensor:
        tensor = torch.empty(2, 4, 8, device="meta")
        self.add(tensor, Node("constant", tensor, name=name))
        return tensor

    def run(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """What the forward returns. Raises UnknownLayout where it needs more than these have."""
        try:
            with self:
                return forward(StandIn(self, "self"), *args, **kwargs)
        except Exception as error:
            raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error

    def called(self, code: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of a member returns a tensor like the first that it is given. That of a member's member, as
        self.seen.append, may do anything."""
        member_name(code)
        given = *args, *kwargs.values()
        result = _like_first(given)
        self.add(result, Node("module", result, self.nodes_in(given), code))
        return result

    def results(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = *args, *kwargs.values()
        if any(isinstance(x, StandIn) for x in _flat(given)):
            return _like_first(given)
        results = super().results(function, args, kwargs)
        if not all(isinstance(x, Tensor) for x in _flat((results,))):
            name = getattr(getattr(function, "__self__", function), "__name__", function)
            raise UnknownLayout(f"its forward depends on the {name} of a tensor")
        return results

    def codes_of(self, *values: Any) -> str:
        return ", ".join(map(code_of, self.nodes_in(values)))


def code_of(x: Any, depth: int = 8) -> str:
    """What makes a tensor, as "self.down_proj(mul(self.gate_proj(x), 2))"."""
    if not isinstance(x, Node) or x.kind == "constant":
        return x.name if isinstance(x, Node) else repr(x)
    arguments = ", ".join(code_of(each, depth - 1) for each in x.args) if depth else "..."
    return f"{x.name}({arguments})" + (f"[{x.options['index']}]" if x.options else "")


def member_name(code: str, owner: str = "self") -> str:
    """The name in the code "self.name". Raises UnknownLayout for other code."""
    name = code.removeprefix(f"{owner}.")
    if name == code or not name.isidentifier():
        raise UnknownLayout(f"unknown layout of its forward, which uses {code}")
    return name


def _like_first(values: tuple) -> Tensor:
    first = next((x for x in _flat(values) if isinstance(x, Tensor)), None)
    if first is None:
        raise UnknownLayout("its forward computes with its members alone")
    return torch.empty_like(first)
