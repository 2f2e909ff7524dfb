"""The decode step: one token for every sequence, composed of ops (compose.py) and, on CUDA, recorded into one graph.

    Decoder          what a model keeps between calls: description, steps, a cache, and how often which way was taken
    DecodeStep       one model on one cache (decode_step.py), in a program that any cache of the same shape takes

Each call asks whether the model is still what its description was read from; if it is not, it is read anew. What is
kept between calls is addresses: of the model and of a caller's cache it keeps nothing alive.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import adopted
from ..cache.fits import check_cache
from ..cache.kv_cache import KVCache
from ..errors import NoStep, Refusal, reason_of
from ..model.description import Description, map_tensors
from ..report import STEP
from . import graphs, prompt
from .alias import alias
from .block import MOST_COPIED_BYTES, Layouts
from .decode_step import DecodeStep
from .describe import Described, describe, pack
from .fp8 import Fp8Weights, with_fp8
from .guard import Snapshot
from .place import Place, place_of
from .program import Program, Programs

KEPT_BYTES = 1 << 30  # a larger cache is not kept for the next call of generate
MAX_ROWS = 64  # tokens of all sequences together that a step takes
_MAX_PAUSE = 64  # forwards until a model that has no step is read again


class Decoder:
    """What is kept for one model between calls of generate."""

    def __init__(self):
        self.calls: Counter[str] = Counter()  # how often generate took which way, by the words of the report
        self.steps = 0  # that ran, of all calls
        self.prompts: Counter[str] = Counter()  # how often a prompt did, of a call by the decode step or of a forward
        self.forwards: Counter[str] = Counter()  # how often another forward, behind a cache or with gradients, did
        self._lock = threading.Lock()
        self._closed = False
        self.described: Described | None = None  # the model, as it was read last,
        self._described_before: Described | None = None  # and before: it goes back where its attention is switched
        self._refused: tuple[Snapshot, str] | None = None  # what the model was when it had no description, and why
        self._refusal: str | None = None  # why the model could not be read, the last time,
        self._pause = self._paused = 0  # for how many forwards it is not tried again, and how many of them are over
        self.programs = Programs(self.calls)
        self._place_of_cache: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()  # of caches
        self.layouts = Layouts()
        self.is_padded_behind = False  # whether the last prompt that was composed had padding behind a sequence
        self.dropped_ahead: Described | None = None  # by which a prompt ran in vain: callers/ahead.py
        self._spare: list[tuple[Any, int | None]] = []  # at most one cache, and the stream it was used on

    def describe(self, model: nn.Module) -> tuple[Description, list[Any]]:
        """The description of a model as it is now, and what keeps its memory alive. Raises NoStep."""
        for known in (self.described, self._described_before):
            if known is not None and (memory := known.snapshot.memory()) and known.snapshot.holds(model):
                if known is not self.described:
                    self._keep(known)
                return known.parts, memory
        self.free_fp8()  # it may come back to what it was with other weights
        if self._refused is not None:
            snapshot, reason = self._refused
            if (memory := snapshot.memory()) and snapshot.holds(model):
                raise NoStep(reason)
        # Packing moves parameters. When it has, or another thread changed the model meanwhile, it is read once more.
        for _ in range(2):
            snapshot = Snapshot(model)
            try:
                owning = pack(model, describe(model))
            except Refusal as reason:
                if (memory := snapshot.memory()) and snapshot.holds(model):
                    self._refused = snapshot, str(reason)
                raise
            memory = snapshot.memory()
            if memory and snapshot.holds(model):
                break
        else:
            raise NoStep("the model is being changed by another thread")
        parts = with_fp8(type(model), map_tensors(owning, alias), owning)
        self._keep(Described(snapshot, parts))
        return parts, memory

    def describe_or_pause(self, model: nn.Module) -> tuple[Description, list[Any]]:
        """The same for a forward. A model that can not be read, which takes as long as a forward, is read again after
        1, 2, 4 ... of them."""
        if self._paused < self._pause:
            self._paused += 1
            raise NoStep(self._refusal)
        try:
            found = self.describe(model)
        except NoStep as reason:
            self._refusal, self._paused = str(reason), 0
            self._pause = min(max(1, 2 * self._pause), _MAX_PAUSE)
            raise
        self._refusal, self._pause = None, 0
        return found

    def _keep(self, described: Described) -> None:
        self.free_fp8()
        self._described_before, self.described = self.described, described
        self._refused = None

    def lend(
        self, kind: Hashable, ids: Tensor, ahead: int = 1, stream: int | None = None
    ) -> AbstractContextManager[Program]:
        """A program for the block, for steps of `ahead` tokens of as many sequences as in ids (B, T). Programs of one
        kind run the same function.

        `stream`: the handle of the one for which it is taken, the current one by default. What runs it in another one
        keeps it until this stream waits for that.
        """
        stream = stream_handle(ids.device) if stream is None else stream
        return self.programs.lend((kind, len(ids), ahead, ids.device, stream))

    def begin(self, parts: Description, cache: Any, program: Program, ahead: int | None = None) -> DecodeStep:
        """The step of a model on a cache whose counters are set: of a forward of `ahead` tokens per sequence, or for a
        call of generate, whose steps are counted."""
        note = self._note_step if ahead is None else None
        return DecodeStep(parts, cache, self._place(cache), program, ahead or 1, note)

    def _place(self, cache: Any) -> Place:
        known = self._place_of_cache.get(cache)
        if known is None or not known.holds(cache):
            known = self._place_of_cache[cache] = place_of(cache)
        return known

    def run_prompt(
        self,
        parts: Description,
        cache: Any,
        ids: Tensor,
        last: Tensor | int,
        leftpad: Tensor | None,
        kept: int = 1,
        place: Place | None = None,
        lend: prompt.Lend | None = None,
        seen: list[Tensor] | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """The logits (B, kept, V) behind a prompt: see prompt.py. Where the host would take longer than the GPU, by a
        graph. `place`: that of the cache, if it is known; `lend`: as this decoder's, by default that; `seen` and
        `ends`, of which graphs know nothing: as in prompt.run(), for an empty cache.

        Raises NoStep, and has changed nothing then.
        """
        if cache.length and ids.numel() <= MAX_ROWS:
            cache.begin(last - ids.shape[1], leftpad)
            with self.lend("logits", ids, ids.shape[1]) as program:
                logits = self.begin(parts, cache, program, ids.shape[1])(ids.flatten())
                return logits.view(*ids.shape, -1)[:, ids.shape[1] - kept :].clone()
        prompt.check_prompt(parts, cache, ids.shape[1])
        padded = None if seen is not None or ends is not None else prompt.padded_length(parts, cache, *ids.shape)
        if padded is None:
            parts, _memory = prompt.for_prompt(parts, ids.numel())
            return prompt.run(parts, cache, ids, last, leftpad, kept, seen, ends)
        prompt.allocate(parts, cache, len(ids))
        cache.begin(last - ids.shape[1], leftpad)
        return prompt.run_padded(parts, cache, ids, kept, place or self._place(cache), padded, lend or self.lend)

    def launch_prompt(
        self, parts: Description, layout: Any, ids: Tensor, last: Tensor | int, leftpad: Tensor | None, kept: int
    ) -> tuple[Tensor, Any]:
        """The logits behind a prompt, as of run_prompt(), and the block of memory with its keys and values.

        A graph writes to its own memory, which is copied: a GPU takes less time for that than the host for pointing the
        graph at other memory.
        """
        shape = tuple(ids.shape)
        if shape not in layout.padded:  # a known layout is checked once: the GPU waits for the host
            prompt.check_prompt(parts, layout, shape[1])
            layout.padded[shape] = prompt.padded_length(parts, layout, *shape)
        padded = layout.padded[shape]
        if padded is None or layout.nbytes > MOST_COPIED_BYTES:
            block = layout.allocate()
            return self.run_prompt(parts, block, ids, last, leftpad, kept, block.place), block
        with self.layouts.lend(layout, stream_handle(ids.device)) as block:
            block.begin(last - shape[1], leftpad)
            logits = prompt.run_padded(parts, block, ids, kept, block.place, padded, self.lend)
            return logits, block.move()

    def known(self, ids: Tensor) -> tuple[Described, list[Any]] | None:
        """The description for a prompt (B, T) that may be launched before the model is checked: all that it reads is
        where it was, and the list keeps it alive. Else None."""
        known = self.described
        if known is None or self._pause or ids.device != known.parts.weight.device:
            return None
        if torch.is_autocast_enabled(ids.device.type):  # which would decide the dtypes of what is launched
            return None
        memory = known.snapshot.memory()
        return None if memory is None else (known, memory)

    def recorded_forward(
        self, cache: Any, program: Program, batch: int, ahead: int
    ) -> tuple[DecodeStep, Described, list[Any]] | None:
        """The step of a forward, if there is a graph that may be replayed before the model is checked.

        That is so if all that it reads is where it was; the list keeps it alive. The cache has been checked when its
        place was noted.
        """
        known, place = self.described, self._place_of_cache.get(cache)
        if known is None or place is None or not program.has_graph(known.parts, place):
            return None
        if not place.holds(cache) or not cache.is_even or len(place.positions) != batch:
            return None
        # The graph's tables of cos and sin end where they begin to depend on the length, or with the cache's capacity.
        if (
            cache.length + ahead > len(known.parts.positions[: cache.capacity])
            or (memory := known.snapshot.memory()) is None
        ):
            return None
        return DecodeStep(known.parts, cache, place, program, ahead), known, memory

    def forget_place(self, cache: Any) -> None:
        """Let the next forward check the model and the cache before it replays a graph."""
        self._place_of_cache.pop(cache, None)

    def count(self, counter: Counter[str], way: str) -> None:
        """Note that one more of `calls`, `prompts` or `forwards` went this way."""
        with self._lock:
            counter[way] += 1

    def _note_step(self, number: int) -> None:
        """Note a step that ran. With the first one the call went by the decode step, and not before."""
        with self._lock:
            self.steps += 1
            if number == 1:
                self.calls[STEP] += 1

    @contextmanager
    def lend_cache(
        self, parts: Description, batch: int, tokens: int, limit: int, caller: Any, returned: bool = False
    ) -> Iterator[Any]:
        """A KVCache with room for `tokens` and some more, up to `limit`; behind that it grows.

        The same as last time where possible, as its graphs need not be recorded anew then. `caller` is the DynamicCache
        that the call was given: what it holds is in the KVCache at the beginning, and if it is `returned`, it holds the
        rest at the end. Layers with a sliding window keep as many tokens as there.
        """
        device = parts.weight.device
        windows = adopted.windows(caller, len(parts.layers))
        cache = self._take(parts, windows, batch, min(tokens, limit), stream_handle(device))
        if cache is None:
            cache = KVCache.growable(windows, batch * parts.token_bytes, tokens, limit)
        try:
            adopted.copy_in(cache, caller)
            yield cache
        finally:
            keeps = 0 < cache.nbytes <= KEPT_BYTES
            if returned:
                adopted.hand_back(cache, caller, frees=not keeps)
            if keeps and not self._closed:
                self._spare[:] = [(cache, stream_handle(device))]

    def _take(self, parts: Description, windows: list[int | None], batch: int, tokens: int, stream: int | None) -> Any:
        """The spare cache, emptied, if it fits. It is taken: another call gets another one."""
        try:
            cache, last_stream = self._spare.pop()
        except IndexError:
            return None
        # On another stream it may still be in use.
        if last_stream != stream or cache.capacity < tokens or cache.windows != windows:
            return None
        if reason_of(check_cache, cache, parts, batch) is not None:
            return None
        cache.reset()
        return cache

    @property
    def fp8(self) -> Fp8Weights | None:
        """The weights of prompts in FP8, where these run so."""
        return None if (described := self.described) is None else described.parts.fp8

    def free_fp8(self) -> None:
        """Free the weights in FP8, which the next prompt makes again."""
        if (fp8 := self.fp8) is not None:
            fp8.release()

    def release(self) -> None:
        """Free the cache, the graphs and the weights in FP8 that are kept for the next call."""
        self.free_fp8()
        self._spare.clear()
        with self._lock:
            self._place_of_cache.clear()
        self.layouts.release()
        self.programs.clear()
        graphs.release_memory()

    def close(self) -> None:
        """Keep nothing any more, of calls under way either."""
        self._closed = True
        self.programs.close()
        self.described = self._described_before = self._refused = self.dropped_ahead = None
        self.layouts = Layouts()
        self.release()


def stream_handle(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


_DECODERS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def decoder(model: nn.Module) -> Decoder:
    """The decoder of this very model: not of a copy, and not in its pickle."""
    known = _DECODERS.get(model)
    return _DECODERS.setdefault(model, Decoder()) if known is None else known


def release(model: nn.Module) -> None:
    """Free the cache, the CUDA graphs and the weights in FP8 that a patched model keeps for its next call of generate.

    They are the only memory that generating leaves behind, but for PyTorch's workspace of cuBLAS of one more stream: a
    cache of at most 1 GiB, 256 MiB at most that graphs of prompts write to, graphs with their tensors, small buffers,
    and with ``patch(model, fp8=True)`` half the memory of the layers' weights. A call under way keeps what it uses.

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
