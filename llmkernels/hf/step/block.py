"""A new cache in one block of memory, by the layout of an earlier one.

A DynamicCache is an object for each layer, with two allocations and two launches that set them to 0: the host takes
longer to make one than a GPU takes for a short prompt. Here the memory comes first, at once, so that the prompt can be
launched; the objects are made while the GPU works.

Layout      of the tensors of a cache in a block, and what else the cache is
Layouts     those of a model's caches, and blocks that graphs of prompts write to
Block       the memory of one
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.adopted import AdoptedCache, is_patched
from ..cache.buffers import room_for
from ..cache.kv_cache import OF_COUNTERS
from ..model.description import Description
from .place import Place, place_of

MAX_LAYOUTS = 32
MAX_BLOCKS = 4
MOST_COPIED_BYTES = 64 << 20  # of a block that a graph writes to
MOST_BYTES = 256 << 20  # a larger one is made layer by layer, so that a layer that grows frees its memory by itself
_EMPTY = -1  # the position of the last token where there is none
_ALIGNMENT = 256  # bytes, as that of an allocation
_OF_THE_BLOCK = {"layers", *OF_COUNTERS}


class _Spec(NamedTuple):
    """A contiguous tensor in a block."""

    start: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype


class _Empty:
    """What step/prompt.py asks of a cache without tokens."""

    length, is_even = 0, True
    capacity: int

    def has_room(self, tokens: int) -> bool:
        return tokens <= self.capacity


class Layout(_Empty):
    """That of an AdoptedCache for the model with this config."""

    def __init__(self, cache: AdoptedCache, config: Any):
        self.shape, self.capacity, self.rows = place_of(cache).shape, cache.capacity, cache.rows()
        self.layers = [_Layer(index, x.is_sliding, x.end, x.rows) for index, x in enumerate(cache.layers)]
        self._config, self._device = _values(config), cache.counters.device
        self._cache = {name: value for name, value in vars(cache).items() if name not in _OF_THE_BLOCK}
        self._kinds = [type(layer) for layer in cache.layers]
        self._states = [
            {name: x for name, x in vars(layer).items() if name not in ("k", "v")} for layer in cache.layers
        ]
        # For how many tokens a graph runs a prompt, by its sequences and tokens: see prompt.padded_length().
        self.padded: dict[tuple[int, ...], int | None] = {}
        self.specs: list[_Spec] = []
        self.nbytes = 0
        for x in (cache.counters, cache.leftpads, *(x for layer in cache.layers for x in (layer.k, layer.v))):
            self.specs.append(_Spec(self.nbytes, x.shape, x.dtype))
            self.nbytes += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def is_kept(self) -> bool:
        """Whether later caches are made by this layout."""
        return self.nbytes <= MOST_BYTES

    def holds(self, config: Any) -> bool:
        """Whether transformers would make such a cache still."""
        return _values(config) == self._config and not is_patched()

    def allocate(self) -> "Block":
        """The memory of a new cache. Its rest may be read and must not be NaN: zeros."""
        with torch.inference_mode(False):
            block = Block(self, torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device))
            block.counters[0].fill_(_EMPTY)
        return block

    def addresses(self, base: int) -> tuple[int, ...]:
        """Those of a cache in a block at this address, in the order of place_of()."""
        counted, buffers = self.specs[:2], self.specs[2:]
        rows = [x.start + row * x.shape[1] * x.dtype.itemsize for x in counted for row in range(x.shape[0])]
        return tuple(base + start for start in (*rows, *(x.start for x in buffers)))

    def make(self, block: "Block", tokens: int) -> AdoptedCache:
        cache = AdoptedCache.__new__(AdoptedCache)
        layers = [kind.__new__(kind) for kind in self._kinds]
        buffers = block.tensors(2, None)
        for layer, state in zip(layers, self._states, strict=True):
            vars(layer).update(state, k=next(buffers), v=next(buffers), length=tokens)
        vars(cache).update(self._cache, layers=layers, counters=block.counters, leftpads=block.leftpads)
        cache._forget_counters()
        return cache


class Layouts:
    """Those of one model, good for as long as its description."""

    def __init__(self):
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], tuple[Description, Layout]] = {}  # by sequences and capacity
        self._idle: list[tuple[Layout, int | None, Block]] = []  # layout, stream and block

    def note(self, parts: Description, batch: int, layout: Layout) -> None:
        """Note where the tensors of a new cache for so many sequences are in a block of memory."""
        with self._lock:
            self._known[batch, layout.capacity] = parts, layout
            while len(self._known) > MAX_LAYOUTS:
                del self._known[next(iter(self._known))]

    def find(self, parts: Description, batch: int, tokens: int) -> Layout | None:
        """The layout of the cache of a prompt of so many tokens, or None."""
        by, layout = self._known.get((batch, room_for(tokens, batch * parts.token_bytes)), (None, None))
        return layout if by is parts else None

    @contextmanager
    def lend(self, layout: Layout, stream: int | None) -> Iterator["Block"]:
        """An empty block for a graph in this stream. It has to be empty again at the end."""
        with self._lock:
            found = [entry for entry in self._idle if entry[:2] == (layout, stream)][-1:]
            self._idle[:] = [entry for entry in self._idle if entry not in found]
        block = found[0][2] if found else layout.allocate()
        yield block
        with self._lock:  # where an exception left something in it, it is not kept
            self._idle.append((layout, stream, block))
            del self._idle[:-MAX_BLOCKS]

    def release(self) -> None:
        """Free the memory."""
        with self._lock:
            self._idle.clear()


class Block(_Empty):
    """The memory of a cache without tokens: what step/prompt.py takes for one."""

    def __init__(self, layout: Layout, memory: Tensor):
        self._layout, self._memory = layout, memory
        self.capacity = layout.capacity
        self.counters, self.leftpads = self.tensors(0, 2)
        self.place = Place(layout.addresses(memory.data_ptr()), layout.shape)

    def tensors(self, first: int, end: int | None) -> Iterator[Tensor]:
        """Some of its tensors. Each counts its versions by itself."""
        device, storage = self._memory.device, self._memory.untyped_storage()
        with torch.inference_mode(False):
            found = [
                torch.empty(0, dtype=dtype, device=device).set_(storage, start // dtype.itemsize, shape)
                for start, shape, dtype in self._layout.specs[first:end]
            ]
        return iter(found)

    @property
    def layers(self) -> list["_Layer"]:
        return [replace(layer, block=self) for layer in self._layout.layers]

    def rows(self) -> list[int]:
        return self._layout.rows

    def make_room(self, tokens: int) -> None:
        """There is."""

    def begin(self, positions: Tensor | int, cache_leftpad: Tensor | None = None) -> None:
        if isinstance(positions, Tensor):
            self.counters[0].copy_(positions)
        elif positions != _EMPTY:
            self.counters[0].fill_(positions)
        if cache_leftpad is not None:
            self.leftpads.copy_(cache_leftpad)

    def counting(self, tokens: int) -> AbstractContextManager[None]:
        """The host counts nothing."""
        return nullcontext()

    def advance(self, tokens: int) -> None:
        """The cache that is made of it counts."""

    def cache(self, tokens: int) -> AdoptedCache:
        """The cache, with so many tokens."""
        return self._layout.make(self, tokens)

    def move(self) -> "Block":
        """What is in it, in new memory; it is empty then."""
        with torch.inference_mode(False):
            moved = Block(self._layout, self._memory.clone())
            self._memory.zero_()
            self.counters[0].fill_(_EMPTY)
        return moved


@dataclass
class _Layer:
    """What the buffers of a layer hold, of a layout or in a block. There its tensors are made when they are read."""

    index: int
    is_sliding: bool
    end: int
    rows: int
    block: Block | None = None
    length = offset = 0
    is_initialized = True

    @property
    def k(self) -> Tensor:
        return next(self.block.tensors(2 + 2 * self.index, 3 + 2 * self.index))

    @property
    def v(self) -> Tensor:
        return next(self.block.tensors(3 + 2 * self.index, 4 + 2 * self.index))


def _values(config: Any) -> dict[str, Any]:
    """What the config of a model says of the text."""
    text = config.get_text_config(decoder=True)
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(text).items()}
