"""CUDA graphs in a process of several threads, made and destroyed without any effect on other threads.

    record           records a function; returns a Graph
    Graph            is replayed, and can be pointed at another cache than the one that it was recorded with
    nbytes           the memory that graphs take
    no_recording     a block during which no thread records, for calls that wait for the device

The library records its own launches, as nodes of a graph (csrc/kernels/recorder.h), with a memory pool of torch's
allocator for each graph. So a recorded function may call ops of llmkernels only, take views and empty tensors; its
random numbers come from buffers.
torch.cuda.CUDAGraph captures streams. While it does, no other thread may wait for the device; and up to torch 2.11 it
ties every capture and replay to the device's default generator, so that others may neither replay nor draw random
numbers.

Where an op takes cuBLAS (in float32, for many rows, and beyond 16 on GPUs of another compute capability than 9.0), only
that call is captured. A torch.cuda.synchronize() in another thread at this very moment raises, as beside any capture,
and the step runs without a graph.
"""

import ctypes
import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from llmkernels import _library

from .._private import TorchDispatchMode

_POOL_FUNCTIONS = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
_LOCK = threading.Lock()  # held by a thread that records or releases memory, and within no_recording()


class NoGraph(Exception):
    """Why a function was not recorded."""


@dataclass(eq=False)
class _Slot:
    """What graphs that are alive at the same time must not share.

    That is the stream, since PyTorch keeps a cuBLAS workspace for each thread and stream; the memory pool of the
    graph's tensors; and in the library, the counters of decode attention.
    """

    handle: int
    stream: int  # its handle
    thread: int = 0  # the last one that recorded in this slot
    pool: tuple[int, int] | None = None


_free: dict[int, list[_Slot]] = defaultdict(list)  # by device: slots without a living graph


class Graph:
    """A recorded function. `replay()` queues it in the current stream of its device."""

    def __init__(self, handle: ctypes.c_void_p, device: int, slot: _Slot):
        self._handle = handle
        self._device = device
        self._slot = slot
        weakref.finalize(self, _destroy, handle, device, slot).atexit = False

    def replay(self) -> None:
        _check(_functions().llmk_graph_launch(self._handle, torch.cuda.current_stream(self._device).cuda_stream))

    def point(self, recorded: Sequence[int], now: Sequence[int]) -> None:
        """Let replays read and write the keys, values, lengths and positions at other addresses than the `recorded`
        ones. If it raises, the graph is of no use any more."""
        addresses = ctypes.c_void_p * len(recorded)
        _check(_functions().llmk_graph_point(self._handle, addresses(*recorded), addresses(*now), len(recorded)))


def _destroy(handle: ctypes.c_void_p, device: int, slot: _Slot) -> None:
    """Called when a Graph dies, at any time and in any thread: takes no lock."""
    _functions().llmk_graph_destroy(handle)
    _free[device].append(slot)


def nbytes(kept: Sequence[Graph]) -> int:
    """The memory of the tensors of these graphs, which graphs that come after them use again."""
    # Not memory_snapshot(pool): torch 2.11 gives back a reference to the pool's number that it has not taken, and the
    # number is freed while we have it.
    pools = {graph._slot.pool for graph in kept}
    segments = torch.cuda.memory_snapshot() if pools else []
    return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] in pools)


@contextmanager
def no_recording() -> Iterator[None]:
    """No thread records inside: for code that waits for the device, or frees memory of it."""
    with _LOCK:
        yield


def release_memory() -> None:
    """Return the memory of dead graphs to PyTorch's allocator, which frees it when needed or in empty_cache()."""
    with _LOCK:
        for device in list(_free):
            for slot in _free[device][:]:
                if slot.pool is not None:
                    pool, slot.pool = slot.pool, None  # given back once, also if that raises
                    torch._C._cuda_releasePool(device, pool)


def record(function: Callable[[], Any], device: torch.device, in_pieces: bool = False) -> tuple[Graph, Any]:
    """A graph of what `function` does on `device`, the current one, and its return value: tensors that a replay fills.

    `in_pieces`: the GPU starts while the host still launches the rest, if the graph is long. For one that the GPU waits
    for: a replay takes 2 us longer.

    Raises NoGraph, without side effects.
    """
    if torch.cuda.get_allocator_backend() != "native":
        raise NoGraph(f"the allocator is {torch.cuda.get_allocator_backend()}, which has no memory pools")
    if missing := [name for name in _POOL_FUNCTIONS if not hasattr(torch._C, name)]:
        raise NoGraph(f"this torch lacks a private name: {missing[0]}")
    with _LOCK:
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            return _record(function, index, in_pieces)
        except Exception as error:
            raise NoGraph(next(iter(str(error).splitlines()), type(error).__name__)) from error


def _record(function: Callable[[], Any], device: int, in_pieces: bool) -> tuple[Graph, Any]:
    slot = _take_slot(device)
    try:
        used = slot.pool
        pool = torch.cuda.graph_pool_handle() if used is None else used
        # From here on the allocations of this thread, and of no other, come from the pool.
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
        slot.pool = pool
        try:
            if used is not None:
                torch._C._cuda_releasePool(device, used)  # the slot counts as one user of it
            with torch.cuda.stream(torch.cuda.ExternalStream(slot.stream, device=device)):
                handle, output = _record_launches(function, slot, in_pieces)
        finally:
            torch._C._cuda_endAllocateToPool(device, pool)
    except BaseException:
        _free[device].append(slot)
        raise
    return Graph(handle, device, slot), output


def _record_launches(function: Callable[[], Any], slot: _Slot, in_pieces: bool) -> tuple[ctypes.c_void_p, Any]:
    _check(_functions().llmk_graph_begin(slot.handle, in_pieces))
    try:
        with _OnlyOurs():
            output = function()
    except BaseException:
        _functions().llmk_graph_end(None)
        raise
    handle = ctypes.c_void_p()
    _check(_functions().llmk_graph_end(ctypes.byref(handle)))
    return handle, output


class _OnlyOurs(TorchDispatchMode):
    """Ops that launch something, and are not the library's, raise: they would run at once, and not be part of the
    graph."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "llmkernels" and not op.is_view and op is not torch.ops.aten.empty_like.default:
            raise NoGraph(f"{op} is not an op of llmkernels")
        return op(*args, **kwargs or {})


def _take_slot(device: int) -> _Slot:
    """A slot that this thread used last, for its cuBLAS workspace; else the one freed last, so that few pools grow."""
    free, thread = _free[device], threading.get_ident()
    if slots := free[:]:
        slot = next((slot for slot in reversed(slots) if slot.thread == thread), slots[-1])
        free.remove(slot)
    else:
        handle, stream = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_functions().llmk_graph_slot(ctypes.byref(handle), ctypes.byref(stream)))
        slot = _Slot(handle.value, stream.value)
    slot.thread = thread
    return slot


@functools.cache
def _functions() -> ctypes.CDLL:
    """The library's functions for graphs; calls of them release the GIL."""
    library, pointer = ctypes.CDLL(str(_library.PATH)), ctypes.c_void_p
    library.llmk_graph_slot.argtypes = [pointer, pointer]
    library.llmk_graph_begin.argtypes = [pointer, ctypes.c_int]
    library.llmk_graph_end.argtypes = [pointer]
    library.llmk_graph_launch.argtypes = [pointer, pointer]
    library.llmk_graph_point.argtypes = [pointer, pointer, pointer, ctypes.c_int64]
    library.llmk_graph_destroy.argtypes = [pointer]
    library.llmk_graph_error.restype = ctypes.c_char_p
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA graph: {_functions().llmk_graph_error(status).decode()}")
