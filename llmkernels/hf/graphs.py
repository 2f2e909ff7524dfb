"""CUDA graphs in a process of several threads: captured while other threads work, destroyed while none captures.

    Program          a function of fixed buffers: run once, then captured, then replayed
    capture          captures a function; returns a Graph
    no_capture       a block during which no thread captures, for calls that wait for the device

A capture does not touch the work of other threads. A process makes one at a time, on a stream that no other code uses;
it does not wait for the device, and frees no memory. torch.cuda.CUDAGraph can not be used: up to torch 2.11 it ties
every capture and replay to the device's default generator, so that while one thread captures, others may neither replay
nor draw random numbers. Here the library captures (csrc/kernels/graph.cu), with a memory pool of torch's allocator for
each graph. A captured function takes its random numbers from buffers.

One thing CUDA forbids to all threads during a capture, which takes some milliseconds for each new batch size or cache:
to wait for the whole device. So torch.cuda.synchronize() and torch.cuda.empty_cache() in another thread may raise then,
as beside any capture. The capture then fails, too, and the step runs without a graph.
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

_ATTEMPTS = 3  # captures of a program that may fail before it runs without a graph for good

_LOCK = threading.Lock()  # held by a thread that captures or destroys graphs, and within no_capture()


class NoGraph(Exception):
    """Why a function was not captured."""


@dataclass
class _CaptureSlot:
    """What graphs that are alive at the same time must not share.

    That is the stream, since PyTorch keeps a cuBLAS workspace for each thread and stream; the memory pool of the
    graph's tensors; and in the library, the counters of decode attention.
    """

    handle: int
    stream: torch.cuda.Stream
    thread: int = 0  # the last one that captured in this slot
    pool: tuple[int, int] | None = None


_free: dict[int, list[_CaptureSlot]] = defaultdict(list)  # by device: slots without a living graph
_retired: deque[tuple[ctypes.c_void_p, int, _CaptureSlot]] = deque()  # dead graphs, not yet destroyed


class Graph:
    """A captured function. `replay()` queues it in the current stream of its device."""

    def __init__(self, handle: ctypes.c_void_p, device: int, slot: _CaptureSlot):
        self._handle = handle
        self._device = device
        weakref.finalize(self, _retire, handle, device, slot).atexit = False

    def replay(self) -> None:
        _check(_functions().llmk_graph_launch(self._handle, torch.cuda.current_stream(self._device).cuda_stream))


@contextmanager
def no_capture() -> Iterator[None]:
    """No thread captures inside: for code that waits for the device, or frees memory of it."""
    with _LOCK:
        yield


def release_memory() -> None:
    """Return the memory of dead graphs to PyTorch's allocator, which frees it when needed or in empty_cache()."""
    with _LOCK:
        _destroy_retired()
        for device, slots in _free.items():
            for slot in slots:
                if slot.pool is not None:
                    torch._C._cuda_releasePool(device, slot.pool)
                    slot.pool = None


def capture(function: Callable[[], Any], device: torch.device) -> tuple[Graph, Any]:
    """A graph of what `function` does on `device`, the current one, and its return value: tensors that a replay fills.

    `function` must have run before, so that everything it uses is loaded. Raises NoGraph, without side effects.
    """
    with _LOCK:
        _destroy_retired()
        collects = gc.isenabled()
        gc.disable()  # it might destroy objects whose destructors are forbidden during a capture
        try:
            return _capture(function, torch.cuda.current_device() if device.index is None else device.index)
        except Exception as error:
            raise NoGraph(next(iter(str(error).splitlines()), type(error).__name__)) from error
        finally:
            if collects:
                gc.enable()


def _capture(function: Callable[[], Any], device: int) -> tuple[Graph, Any]:
    slot = _take_slot(device)
    try:
        # From here on the allocations of this thread, and of no other, come from the pool.
        if slot.pool is None:
            pool = torch.cuda.graph_pool_handle()
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
            slot.pool = pool
        else:
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, slot.pool)
            torch._C._cuda_releasePool(device, slot.pool)  # the slot counts as one user of it
        try:
            with torch.cuda.stream(slot.stream):
                handle, output = _record(function, slot)
        finally:
            torch._C._cuda_endAllocateToPool(device, slot.pool)
    except BaseException:
        _free[device].append(slot)
        raise
    return Graph(handle, device, slot), output


def _record(function: Callable[[], Any], slot: _CaptureSlot) -> tuple[ctypes.c_void_p, Any]:
    _check(_functions().llmk_graph_begin(slot.handle))
    try:
        output = function()
    except BaseException:
        _functions().llmk_graph_end(slot.handle, None)
        raise
    handle = ctypes.c_void_p()
    _check(_functions().llmk_graph_end(slot.handle, ctypes.byref(handle)))
    return handle, output


def _take_slot(device: int) -> _CaptureSlot:
    """A slot that this thread used last, for its cuBLAS workspace; else the one freed last, so that few pools grow."""
    free, thread = _free[device], threading.get_ident()
    if free:
        slot = next((slot for slot in reversed(free) if slot.thread == thread), free[-1])
        free.remove(slot)
    else:
        handle, stream = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_functions().llmk_graph_slot(ctypes.byref(handle), ctypes.byref(stream)))
        slot = _CaptureSlot(handle.value, torch.cuda.ExternalStream(stream.value, device=device))
    slot.thread = thread
    return slot


def _retire(*graph: Any) -> None:
    """Called when a Graph dies: at any time and in any thread, also in one that captures."""
    _retired.append(graph)
    if _LOCK.acquire(blocking=False):  # else the next capture destroys it
        try:
            _destroy_retired()
        finally:
            _LOCK.release()


def _destroy_retired() -> None:
    while _retired:
        handle, device, slot = _retired.popleft()
        _functions().llmk_graph_destroy(handle)
        _free[device].append(slot)


@functools.cache
def _functions() -> ctypes.CDLL:
    """The library's functions for graphs; calls of them release the GIL."""
    library, pointer = ctypes.CDLL(str(_library.PATH)), ctypes.c_void_p
    library.llmk_graph_slot.argtypes = [pointer, pointer]
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
