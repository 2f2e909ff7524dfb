"""Where a cache is: what a step reads and writes of it, and what a graph has to be pointed at."""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from .alias import alias
from .attend import LayerCache
from .record import Lists


@dataclass(frozen=True, eq=False)
class Place:
    """The memory of one cache.

    Graphs can be pointed at its `addresses`; what they can not be pointed away from is its `shape`. `counters` as a
    KVCache has them; `positions` int32 (B, 1), the first row, are those of the last tokens. The tensors are aliases,
    which keep no memory.
    """

    addresses: tuple[int, ...] = ()
    shape: Hashable = None
    counters: Tensor | None = None
    positions: Tensor | None = None
    layers: tuple[LayerCache, ...] = ()
    record: Any = None

    def holds(self, cache: Any) -> bool:
        """Whether the cache is still what and where it was."""
        return self.record.holds(cache)


def place_of(cache: Any) -> Place:
    """That of a cache which has its tensors."""
    counters = alias(cache.counters)
    positions, *seqlens = counters
    leftpads = list(alias(cache.leftpads))
    rows, buffers = cache.rows(), [(alias(layer.k), alias(layer.v)) for layer in cache.layers]
    shapes = [(row, k.shape, k.stride(), v.shape, v.stride()) for row, (k, v) in zip(rows, buffers, strict=True)]
    tensors = positions, *seqlens, *leftpads, *(x for pair in buffers for x in pair)
    return Place(
        addresses=tuple(x.data_ptr() for x in tensors),
        shape=(cache.capacity, cache.counters.shape, *((shape, len([*same])) for shape, same in groupby(shapes))),
        counters=counters,
        positions=positions[:, None],
        layers=tuple(LayerCache(*pair, seqlens[row], leftpads[row]) for row, pair in zip(rows, buffers, strict=True)),
        record=_record(cache),
    )


def _record(cache: Any) -> Any:
    """What a step relies on of its cache, as a record: all but how many tokens it has."""
    lists = Lists(cache)
    lists.names += cache.asked_of()
    lists.tensors += [(0, name, getattr(cache, name)) for name in ("counters", "leftpads")]
    layers = lists.node(0, "layers", cache.layers)
    for index, layer in enumerate(cache.layers):
        place, members = lists.node(layers, index, layer), vars(layer)
        lists.tensors += [(place, name, members[name]) for name in ("k", "v")]
        lists.same.append((place, "update", members.get("update")))
        lists.equal += [(place, name, members.get(name)) for name in ("capacity", "sliding_window", "record_past")]
    return lists.record()
