"""The layouts of caches that forwards make, and memory that graphs of prompts write to (block.py)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..cache.buffers import room_for
from ..model.description import Description

MAX_LAYOUTS = 32
MAX_BLOCKS = 4
MOST_COPIED_BYTES = 64 << 20  # of a block that a graph writes to


class Layouts:
    """Those of one model, good for as long as its description."""

    def __init__(self):
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], tuple[Description, Any]] = {}  # by sequences and capacity
        self._idle: list[tuple[Any, int | None, Any]] = []  # layout, stream and block

    def note(self, parts: Description, batch: int, layout: Any) -> None:
        """Note where the tensors of a new cache for so many sequences are in a block of memory."""
        with self._lock:
            self._known[batch, layout.capacity] = parts, layout
            while len(self._known) > MAX_LAYOUTS:
                del self._known[next(iter(self._known))]

    def find(self, parts: Description, batch: int, tokens: int) -> Any:
        """The layout of the cache of a prompt of so many tokens, or None."""
        by, layout = self._known.get((batch, room_for(tokens, batch * parts.token_bytes)), (None, None))
        return layout if by is parts else None

    @contextmanager
    def lend(self, layout: Any, stream: int | None) -> Iterator[Any]:
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
