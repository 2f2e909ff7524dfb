"""What objects were at one time, as lists for one pass in C++ (csrc/record.h): Lists(...).record()."""

from typing import Any

import torch
from torch import Tensor

from ..classes.origin import Entry
from ..errors import NoStep


class Lists:
    """What a record is made of. A node is an object with members, a dict or a list, known by its index; the first one
    is the object that the record is of."""

    def __init__(self, root: Any):
        self.names: list[Entry] = []
        self.nodes: list[tuple[int, str | int, type, int]] = []
        self.same: list[tuple[int, str, Any]] = []
        self.equal: list[tuple[int, str, Any]] = []
        self.tensors: list[tuple[int, str, Tensor | None]] = []
        self.node(-1, "", root)

    def node(self, parent: int, name: str | int, value: Any) -> int:
        """Add what a node has under a name or an index, with the number of its members. Returns the index of the new
        node."""
        size = len(value if isinstance(value, (dict, list)) else vars(value))
        self.nodes.append((parent, name, type(value), size))
        return len(self.nodes) - 1

    def record(self, held: list[Tensor] | None = None) -> Any:
        """A Record. `held` are tensors whose storages keep the memory of all. Raises NoStep where there is none."""
        try:
            from llmkernels._C import Record
        except ImportError as problem:
            raise NoStep(f"the module _C of llmkernels can not be imported: {problem}") from None
        names = {(id(owner), name): (owner, name, value) for owner, name, value in self.names}
        try:
            return Record(
                exchange=torch.Tensor.__dlpack_c_exchange_api__,
                names=list(names.values()),
                nodes=self.nodes,
                same=self.same,
                equal=self.equal,
                tensors=self.tensors,
                held=held or [],
            )
        except BufferError:
            raise NoStep("a tensor has no ordinary memory") from None
