"""The decode step: one token for every sequence, composed of ops (compose.py) and, on CUDA, recorded into one graph.

    Decoder          what a model keeps between calls: its cache, graphs, and how often which way was taken
    DecodeStep       one model on one cache, for one call of generate

A step reads the model as it is when a call begins. Nothing of it is kept longer than the call but addresses, against
which a graph is checked before it is used again: weights that moved, or a cache that grew, make a new one.

A layer as Llama's is five launches on a GPU of compute capability 9.0, for up to 64 sequences in bfloat16 or float16,
and the head is one or two. Other layers and GPUs take more.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import compose, graphs
from .compose import Tokens, make_tables
from .description import Trunk, leaves
from .graphs import Program
from .report import STEP
from .trunk import Snapshot, fits_cache, is_ours


class DecodeStep:
    """One model on one cache: the next `count` tokens of each sequence.

    `tokens` int64 (B * count,) are the last tokens of each sequence, which are not in the cache yet: `run` embeds them,
    then runs what calls `forward`, which appends them to the cache and returns the logits (B * count, V) behind each.
    What is run may be recorded, so it calls ops of llmkernels only.
    """

    def __init__(self, parts: Trunk, cache: Any, program: Program, note: Callable[[int], None], count: int = 1):
        self.cache = cache
        self.program = program
        self.device = parts.weight.device
        self.count = 0  # of the steps that ran
        self._parts = parts
        self._embed = parts.embedding, parts.embed_scale
        self._note = note  # called with that count
        self._ahead = count
        weight, rows = parts.weight, cache.layers[0].k.shape[0] * count
        self.tokens = program.buffer("tokens", (rows,), torch.long, self.device)
        self._hidden = program.buffer("hidden", (rows, weight.shape[1]), weight.dtype, self.device)
        self._bind()

    def _bind(self) -> None:
        """Collect what the forward reads and writes, and with it the addresses that a graph has to have."""
        cache, count = self.cache, self._ahead
        positions, seqlens = cache.counters
        batch, self._positions = len(positions), positions[:, None]
        if count > 1:
            self._positions = self.program.buffer("positions", (batch, count), torch.int32, self.device)
            self._offsets = torch.arange(1 - count, 1, dtype=torch.int32, device=self.device)
        tables = make_tables(self._parts, self._parts.positions[: cache.capacity])
        tables = {name: self._kept(name, pair) for name, pair in tables.items()}
        self._caches = tuple((buffers.k, buffers.v) for buffers in cache.layers)
        self._where = Tokens(batch, count, self._positions, seqlens, cache.cache_leftpad, tables)
        used = *leaves(self._parts), *leaves(self._where), *leaves(self._caches)
        self.program.bind(tuple((x.data_ptr(), x.shape, x.stride()) if isinstance(x, Tensor) else x for x in used))

    def _kept(self, name: str, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The tables in buffers of the program. They are made anew for each call, since the module may have changed."""
        buffers = []
        for part, table in zip(("cos", "sin"), tables, strict=True):
            buffers.append(self.program.buffer(f"{part} {name}", table.shape, table.dtype, self.device))
            buffers[-1].copy_(table)
        return tuple(buffers)

    def forward(self) -> Tensor:
        return compose.forward(self._parts, self._hidden, self._where, self._caches)

    def run(self, function: Callable[[], Any]) -> Any:
        """What `function`, which calls `forward` once, returns: all tensors of fixed buffers, on CUDA by a graph."""
        cache, count = self.cache, self._ahead
        if cache.make_room(count):
            self._bind()
        compose.embed(*self._embed, self.tokens, self._hidden)
        cache.counters.add_(count)
        if count > 1:
            torch.add(cache.counters[0][:, None], self._offsets, out=self._positions)
        result = self.program.run(function, self.device)
        cache.advance(count)
        self.count += 1
        self._note(self.count)
        return result

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits behind the tokens, until the next call."""
        self.tokens.copy_(tokens)
        return self.run(self.forward)


class Parked:
    """A step between two forwards: its graph, and what says whether it is good for the next one.

    Of the model and the cache it keeps nothing alive.
    """

    def __init__(self, step: DecodeStep, model: nn.Module):
        self._snapshot = Snapshot(model)
        self._embed = [weakref.ref(x) if isinstance(x, Tensor) else x for x in step._embed]
        self._buffers = [weakref.ref(buffer) for buffer in _buffers(step.cache)]
        self._capacity = step.cache.capacity
        self._program = step.program
        self._addresses = step.program.addresses
        step._parts = step._where = step._caches = step._embed = step.cache = None
        self._step = step

    def resume(self, model: nn.Module, cache: Any, count: int) -> DecodeStep | None:
        """The step, if nothing has changed that it depends on. Raises NoStep where the model can not be read."""
        program = self._program
        if program.graph is None or program.addresses != self._addresses:
            return None
        if cache.length + count > self._capacity or not self._snapshot.holds(model):
            return None
        if any(ref() is not buffer for ref, buffer in zip(self._buffers, _buffers(cache), strict=True)):
            return None
        self._step.cache = cache
        self._step._embed = [x() if isinstance(x, weakref.ref) else x for x in self._embed]
        return self._step


def _buffers(cache: Any) -> list[Tensor]:
    return [cache.counters, cache.cache_leftpad, *(buffer for layer in cache.layers for buffer in (layer.k, layer.v))]


class Decoder:
    """What is kept for one model between calls of generate."""

    def __init__(self):
        self.calls: Counter[str] = Counter()  # how often generate took which way, by the words of the report
        self.steps = 0  # that ran, of all calls
        self.forwards: Counter[str] = Counter()  # how often a forward behind a cache took which way
        self._lock = threading.Lock()
        self._closed = False
        self._programs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache: graphs die with it
        self._parked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache: steps by count
        self._refused: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache: why
        self._spare: list[tuple[Any, int | None]] = []  # at most one cache, and the stream it was used on

    def begin(self, parts: Trunk, cache: Any, kind: Any = "step") -> DecodeStep:
        """The step of a model on a cache whose counters are set. Programs of one `kind` run the same function."""
        program = self._programs.setdefault(cache, {}).setdefault(kind, Program(self.calls))
        return DecodeStep(parts, cache, program, self._note_step)

    def begin_forward(self, parts: Trunk, cache: Any, count: int) -> DecodeStep:
        """The same for a forward of `count` tokens per sequence, by itself."""
        program = self._programs.setdefault(cache, {}).setdefault(("forward", count), Program(self.calls))
        return DecodeStep(parts, cache, program, self._note_forward, count)

    def park(self, step: DecodeStep, model: nn.Module, count: int) -> None:
        """Keep a step that has a graph for the next forward of as many tokens."""
        cache = step.cache
        if step.program.graph is not None:
            self._parked.setdefault(cache, {})[count] = Parked(step, model)

    def resume(self, model: nn.Module, cache: Any, count: int) -> DecodeStep | None:
        """The step that was parked, if nothing has changed that it depends on."""
        parked = self._parked.get(cache, {}).pop(count, None)
        return None if parked is None or not is_ours(cache) else parked.resume(model, cache, count)

    def count(self, way: str) -> None:
        """Note that a call of generate went this way."""
        with self._lock:
            self.calls[way] += 1

    def _note_step(self, number: int) -> None:
        """Note a step that ran. With the first one the call went by the decode step, and not before."""
        with self._lock:
            self.steps += 1
            if number == 1:
                self.calls[STEP] += 1

    def _note_forward(self, number: int) -> None:
        self.count_forward(STEP)

    def count_forward(self, way: str) -> None:
        """Note that a forward behind a cache went this way."""
        with self._lock:
            self.forwards[way] += 1

    def refuse(self, cache: Any, reason: str) -> None:
        """Note why forwards behind a cache do not run by the step; it is not tried again."""
        self._refused[cache] = reason

    def refusal(self, cache: Any) -> str | None:
        return self._refused.get(cache)

    @contextmanager
    def lend_cache(
        self, parts: Trunk, batch: int, tokens: int, limit: int, caller: Any = None, returned: bool = False
    ) -> Iterator[Any]:
        """A KVCache with room for `tokens` and some more, up to `limit`; behind that it grows.

        The same as last time where possible, as its graphs need not be recorded anew then. `caller` is the DynamicCache
        that the call was given: what it holds is in the KVCache at the beginning, and if it is `returned`, it holds the
        rest at the end.
        """
        from . import adopt
        from .cache import KEPT_BYTES, KVCache

        device = parts.weight.device
        cache = self._take(parts, batch, min(tokens, limit), _stream(device))
        if cache is None:
            cache = KVCache.growable(len(parts.layers), batch * parts.token_bytes, tokens, limit)
        try:
            if caller is not None:
                adopt.copy_in(cache, caller)
            yield cache
        finally:
            keeps = 0 < cache.nbytes <= KEPT_BYTES
            if returned:
                adopt.hand_back(cache, caller, frees=not keeps)
            if keeps and not self._closed:
                self._spare[:] = [(cache, _stream(device))]

    def _take(self, parts: Trunk, batch: int, tokens: int, stream: int | None) -> Any:
        """The spare cache, emptied, if it fits. Whoever has it has it alone: another call gets one of its own."""
        try:
            cache, last_stream = self._spare.pop()
        except IndexError:
            return None
        # On another stream it may still be in use.
        if last_stream != stream or cache.capacity < tokens or not fits_cache(cache, parts, batch):
            return None
        cache.reset()
        return cache

    def release(self) -> None:
        """Free the cache and the graphs that are kept for the next call."""
        self._spare.clear()
        self._parked.clear()
        self._programs.clear()
        graphs.release_memory()

    def close(self) -> None:
        """Keep nothing any more, of calls under way either."""
        self._closed = True
        self.release()


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


_DECODERS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def decoder(model: nn.Module) -> Decoder:
    """The decoder of this very model: not of a copy, and not in its pickle."""
    return _DECODERS.setdefault(model, Decoder())


def release(model: nn.Module) -> None:
    """Free the cache and the CUDA graphs that a patched model keeps for its next call of generate.

    They are the only memory that generating leaves behind: a cache of at most 1 GiB, the graphs of steps on it, and
    small buffers. A call under way keeps what it uses. No-op where there is nothing.

    Raises: TypeError when model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"release: model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if module in _DECODERS:
            _DECODERS[module].release()


def forget(model: nn.Module) -> None:
    """Undo what decoding did to a model, which is not patched any more: its graphs and its cache are gone."""
    if (state := _DECODERS.pop(model, None)) is not None:
        state.close()
    graphs.release_memory()
