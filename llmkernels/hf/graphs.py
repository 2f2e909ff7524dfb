"""CUDA graphs for one thread of many: captured while others work, and destroyed when nobody captures.

    Program          a function of fixed buffers: run once, then captured, then replayed
    capture          a function as a Graph
    no_capture       a block in which nothing is captured, for what must wait for the device

A capture of ours meets nobody else's work. There is one at a time in a process; it is on a stream of its own, which no
other code is handed; it waits for nothing and frees nothing. torch.cuda.CUDAGraph, up to torch 2.11, ties every capture
and every replay to the device's default generator: while one thread captures, others may neither replay nor draw a
random number. So the library captures (csrc/kernels/graph.cu), and torch's allocator has a pool for each graph. What is
captured takes its random numbers from buffers.

CUDA itself forbids one thing to all threads while one of them captures, which takes some milliseconds for each new
batch size or cache: to wait for the whole device. So torch.cuda.synchronize() and torch.cuda.empty_cache() in another
thread may raise then, as they do beside any capture. The capture is lost with it, and the step runs without a graph.
"""

import ctypes
import functools
import gc
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmkernels import _library

_ATTEMPTS = 3  # to capture a program, before it is run without a graph for good

_LOCK = threading.Lock()  # held by whoever captures, destroys graphs, or needs that nobody does


class NoGraph(Exception):
    """Why a function was not captured."""


@dataclass
class _Place:
    """Where a graph is captured: what graphs that live at the same time must not share.

    The stream, because PyTorch has a workspace of cuBLAS for each thread and stream; the pool of the memory for what
    the graph computes; and in the library, counters of attention.
    """

    handle: int
    stream: torch.cuda.Stream
    thread: int = 0  # that was the last to capture here
    pool: tuple[int, int] | None = None


_free: dict[int, list[_Place]] = defaultdict(list)  # by device: places that no living graph has
_retired: deque[tuple[ctypes.c_void_p, int, _Place]] = deque()  # dead graphs that are to be destroyed


class Graph:
    """A captured function. `replay()` queues it in the current stream of its device."""

    def __init__(self, handle: ctypes.c_void_p, device: int, place: _Place):
        self._handle = handle
        self._device = device
        weakref.finalize(self, _retire, handle, device, place).atexit = False

    def replay(self) -> None:
        _check(_functions().llmk_graph_launch(self._handle, torch.cuda.current_stream(self._device).cuda_stream))


@contextmanager
def no_capture() -> Iterator[None]:
    """Nothing is captured inside: for what waits for the device, or gives memory back to it."""
    with _LOCK:
        yield


def release_memory() -> None:
    """Leave the memory of dead graphs to PyTorch's allocator, which frees it when it has to, or in empty_cache()."""
    with _LOCK:
        _destroy_retired()
        for device, places in _free.items():
            for place in places:
                if place.pool is not None:
                    torch._C._cuda_releasePool(device, place.pool)
                    place.pool = None


def capture(function: Callable[[], Any], device: torch.device) -> tuple[Graph, Any]:
    """The graph of what `function` does on `device`, the current one, and what it returns: tensors that a replay fills.

    `function` has run before, so that everything it uses is loaded. Raises NoGraph; nothing has been done then.
    """
    with _LOCK:
        _destroy_retired()
        collects = gc.isenabled()
        gc.disable()  # else this thread may come to destroy anything at all, also what must not be while it captures
        try:
            return _capture(function, torch.cuda.current_device() if device.index is None else device.index)
        except Exception as error:
            raise NoGraph(next(iter(str(error).splitlines()), type(error).__name__)) from error
        finally:
            if collects:
                gc.enable()


def _capture(function: Callable[[], Any], device: int) -> tuple[Graph, Any]:
    place = _take_place(device)
    try:
        # From here on this thread's allocations, and nobody else's, come from the pool.
        if place.pool is None:
            pool = torch.cuda.graph_pool_handle()
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
            place.pool = pool
        else:
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, place.pool)
            torch._C._cuda_releasePool(device, place.pool)  # which is counted once for the place
        try:
            with torch.cuda.stream(place.stream):
                handle, output = _record(function, place)
        finally:
            torch._C._cuda_endAllocateToPool(device, place.pool)
    except BaseException:
        _free[device].append(place)
        raise
    return Graph(handle, device, place), output


def _record(function: Callable[[], Any], place: _Place) -> tuple[ctypes.c_void_p, Any]:
    _check(_functions().llmk_graph_begin(place.handle))
    try:
        output = function()
    except BaseException:
        _functions().llmk_graph_end(place.handle, None)
        raise
    handle = ctypes.c_void_p()
    _check(_functions().llmk_graph_end(place.handle, ctypes.byref(handle)))
    return handle, output


def _take_place(device: int) -> _Place:
    """The one that was freed last, so that few pools grow; this thread's last, for its workspace of cuBLAS, if any."""
    free, thread = _free[device], threading.get_ident()
    if free:
        place = next((place for place in reversed(free) if place.thread == thread), free[-1])
        free.remove(place)
    else:
        handle, stream = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_functions().llmk_graph_place(ctypes.byref(handle), ctypes.byref(stream)))
        place = _Place(handle.value, torch.cuda.ExternalStream(stream.value, device=device))
    place.thread = thread
    return place


def _retire(*graph: Any) -> None:
    """Called when a Graph dies, which is at any time and in any thread: also in one that captures."""
    _retired.append(graph)
    if _LOCK.acquire(blocking=False):  # else who captures next destroys it
        try:
            _destroy_retired()
        finally:
            _LOCK.release()


def _destroy_retired() -> None:
    while _retired:
        handle, device, place = _retired.popleft()
        _functions().llmk_graph_destroy(handle)
        _free[device].append(place)


@functools.cache
def _functions() -> ctypes.CDLL:
    """The library's functions for graphs; calls of them release the GIL."""
    library, pointer = ctypes.CDLL(str(_library.PATH)), ctypes.c_void_p
    library.llmk_graph_place.argtypes = [pointer, pointer]
    library.llmk_graph_begin.argtypes = [pointer]
    library.llmk_graph_end.argtypes = [pointer, pointer]
    library.llmk_graph_launch.argtypes = [pointer, pointer]
    library.llmk_graph_destroy.argtypes = [pointer]
    library.llmk_graph_error.restype = ctypes.c_char_p
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA graph: {_functions().llmk_graph_error(status).decode()}")


@dataclass
class Program:
    """A function of fixed buffers: on CUDA run once, then captured, then replayed. One thread at a time runs it.

    Where it can not be captured it is run without a graph, and `calls` counts why.
    """

    calls: Counter[str] = field(default_factory=Counter)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    addresses: tuple = ()
    warm: bool = False
    graph: Graph | None = None
    output: Any = None
    failures: int = 0

    def bind(self, addresses: tuple) -> None:
        """Forget the graph unless it was made with these addresses and shapes."""
        if addresses != self.addresses:
            self.addresses = addresses
            self._forget()

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that stays where it is for as long as the program lives. New ones are 0."""
        tensor = self.buffers.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            with torch.inference_mode(False):
                tensor = self.buffers[name] = torch.zeros(shape, dtype=dtype, device=device)
            self._forget()
        return tensor

    def run(self, function: Callable[[], Any], device: torch.device) -> Any:
        """The function's result. On CUDA the next call overwrites it."""
        if device.type != "cuda":
            return function()
        with torch.cuda.device(device):
            if not self.warm:  # loads kernels and libraries, which can not be done while capturing
                self.warm = True
                return function()
            if self.graph is None and self.failures < _ATTEMPTS and not torch.cuda.is_current_stream_capturing():
                self._capture(function, device)
            if self.graph is None:
                return function()
            self.graph.replay()
            return self.output

    def _capture(self, function: Callable[[], Any], device: torch.device) -> None:
        try:
            self.graph, self.output = capture(function, device)
        except NoGraph as reason:
            self.failures += 1
            if self.failures == 1:
                self.calls[f"a step without a CUDA graph: {reason}"] += 1

    def _forget(self) -> None:
        self.warm, self.graph, self.output, self.failures = False, None, None, 0
