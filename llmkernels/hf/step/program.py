"""What a decode step runs in: buffers that stay in place, and CUDA graphs that have their addresses.

Program      buffers for a function of so many sequences and tokens, with a graph for each shape of cache
Programs     those of a model that do not run now: any cache of these shapes takes one, as a graph can be pointed
             at another cache
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..model.description import Description, tensors_and_numbers
from . import graphs
from .compose import make_tables
from .graphs import Graph, NoGraph
from .place import Place

MAX_PROGRAMS = 32  # that a model keeps: the ones used last
MAX_GRAPHS = 4  # of a program, likewise
_ATTEMPTS = 3  # recordings of a function that may fail before it runs without a graph for good


@dataclass
class Recording:
    """A function with caches of one shape: run once, then recorded, then replayed."""

    model: Description | None = None  # the description that it ran last,
    tables: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # and the cos and sin of that
    warm: bool = False
    graph: Graph | None = None
    output: Any = None
    recorded: tuple[int, ...] = ()  # the addresses of the cache that the graph was recorded with
    pointed: tuple[int, ...] = ()  # and those that a replay would use now
    failures: int = 0
    reason: str = ""  # why it was not recorded

    def keep(self, model: Description, tables: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Run this description, with these tables: where there are others of the same shape, which a graph reads, those
        are overwritten."""
        old = [table for pair in self.tables.values() for table in pair]
        new = [table for pair in tables.values() for table in pair]
        if list(tables) == list(self.tables) and [x.shape for x in new] == [x.shape for x in old]:
            for table, values in zip(old, new, strict=True):
                table.copy_(values)
        else:
            with torch.inference_mode(False):  # copies, which can be written outside of inference mode, too
                self.tables = {name: (cos.clone(), sin.clone()) for name, (cos, sin) in tables.items()}
            self.graph = self.output = None
        self.model = model

    def run(self, function: Callable[[], Any], place: Place, device: torch.device, in_pieces: bool) -> Any:
        with torch.cuda.device(device):
            if not self.warm:  # a single step is not worth a graph; and cuBLAS has to be loaded before it is captured
                self.warm = True
                return function()
            if self.graph is not None and place.addresses != self.pointed:
                self._point(place)
            if self.graph is None and self.failures < _ATTEMPTS and not torch.cuda.is_current_stream_capturing():
                self._record(function, place, device, in_pieces)
            if self.graph is None:
                return function()
            self.graph.replay()
            return self.output

    def _record(self, function: Callable[[], Any], place: Place, device: torch.device, in_pieces: bool) -> None:
        try:
            self.graph, self.output = graphs.record(function, device, in_pieces)
            self.recorded = self.pointed = place.addresses
        except NoGraph as reason:
            self.failures += 1
            self.reason = str(reason)

    def _point(self, place: Place) -> None:
        try:
            self.graph.point(self.recorded, place.addresses)
            self.pointed = place.addresses
        except RuntimeError:  # it is recorded anew
            self.graph = self.output = None


@dataclass
class Program:
    """Buffers and graphs of a function. One thread at a time runs it, in one stream.

    Where the function can not be recorded it is run without a graph, and `calls` counts these runs by the reason.
    """

    calls: Counter[str] = field(default_factory=Counter)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    model: Description | None = None  # the description that it runs
    addresses: tuple = ()  # of that, and whatever else a recording depends on
    recordings: OrderedDict[Hashable, Recording] = field(default_factory=OrderedDict)  # by the shape of the cache

    @property
    def graph(self) -> Graph | None:
        """That of the last run, if it had one."""
        return next(reversed(self.recordings.values())).graph if self.recordings else None

    def bind(self, model: Description) -> None:
        """Run this description: of another one than before the graphs are kept if all is at the same addresses."""
        if model is self.model:
            return
        found = tuple(map(_address, tensors_and_numbers(model)))
        if found != self.addresses:
            self.recordings.clear()
        self.model, self.addresses = model, found

    def recording(self, place: Place) -> Recording:
        """That for caches of this shape."""
        recording = self.recordings.setdefault(place.shape, Recording())
        self.recordings.move_to_end(place.shape)
        while len(self.recordings) > MAX_GRAPHS:
            self.recordings.popitem(last=False)
        return recording

    def tables(self, place: Place, capacity: int) -> dict[str, tuple[Tensor, Tensor]]:
        """The cos and sin of the description at the positions of such a cache, for as long as its recording lives."""
        recording = self.recording(place)
        if recording.model is not self.model:
            recording.keep(self.model, make_tables(self.model, self.model.positions[:capacity], ahead=True))
        return recording.tables

    def has_graph(self, model: Description, place: Place) -> bool:
        """Whether a run of this description on a cache of this shape would replay a graph."""
        recording = self.recordings.get(place.shape)
        return recording is not None and recording.graph is not None and recording.model is model

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that stays where it is for as long as the program lives. New ones are 0."""
        tensor = self.buffers.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            with torch.inference_mode(False):
                tensor = self.buffers[name] = torch.zeros(shape, dtype=dtype, device=device)
            self.recordings.clear()
        return tensor

    def run(
        self, function: Callable[[], Any], device: torch.device, place: Place | None = None, in_pieces: bool = False
    ) -> Any:
        """The function's result. On CUDA the next call overwrites it. `in_pieces`: see graphs.record()."""
        if device.type != "cuda":
            return function()
        place = place or Place()
        recording = self.recording(place)
        result = recording.run(function, place, device, in_pieces)
        if recording.failures and recording.graph is None:
            self.calls[f"a step without a CUDA graph: {recording.reason}"] += 1
        return result


def _address(leaf: Any) -> Any:
    return (leaf.data_ptr(), leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else leaf


class Programs:
    """The programs of a model that do not run now."""

    def __init__(self, calls: Counter[str]):
        self._calls = calls
        self._idle: list[tuple[Hashable, Program]] = []  # those used last at the end
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def lend(self, key: Hashable) -> Iterator[Program]:
        """A program for the block: one that ran under this key before, if there is one."""
        program = self._take(key)
        try:
            yield program
        finally:
            with self._lock:
                if not self._closed:
                    self._idle.append((key, program))
                    del self._idle[:-MAX_PROGRAMS]

    def _take(self, key: Hashable) -> Program:
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == key:
                    return self._idle.pop(index)[1]
        return Program(self._calls)

    def clear(self) -> None:
        """Forget them all, but for those that run."""
        with self._lock:
            self._idle.clear()

    def close(self) -> None:
        """Forget those that run, too, when they are done."""
        self._closed = True
        self.clear()

    def idle(self) -> list[Program]:
        """All of them."""
        with self._lock:
            return [program for _, program in self._idle]

    def graphs(self) -> list[Graph]:
        """The graphs of all of them."""
        recordings = (recording for program in self.idle() for recording in list(program.recordings.values()))
        return [recording.graph for recording in recordings if recording.graph is not None]
