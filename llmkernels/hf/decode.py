"""The decode step: one token for every sequence, by one call of `llmkernels::decode_step` and, on CUDA, one graph.

    Decoder          what a model keeps between calls: its cache, graphs, and how often which way was taken
    DecodeStep       one model on one cache, for one call of generate

A step reads the model as it is when a call begins. Nothing of it is kept longer than the call but addresses, against
which a graph is checked before it is used again: weights that moved, or a cache that grew, make a new one.

The op is five launches per layer on a GPU of compute capability 9.0, for up to 64 sequences in bfloat16 or float16, and
one or two for the head. Other GPUs take more.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import graphs
from .graphs import Program
from .report import STEP
from .trunk import Trunk, fits_cache

_ops = torch.ops.llmkernels
_index = torch.ops.aten.index.Tensor_out


class DecodeStep:
    """One model on one cache, for one call of generate.

    `tokens` int64 (B,) are the last token of each sequence, which is not in the cache yet: `run` embeds it, then runs
    what calls `forward`, which appends it to the cache and returns the logits (B, V) of the next. What is run may be
    recorded, so it calls ops of llmkernels only.
    """

    def __init__(self, parts: Trunk, cache: Any, program: Program, note: Callable[[int], None]):
        self.cache = cache
        self.program = program
        self.device = parts.head.device
        self.count = 0  # of the steps that ran
        self._parts = parts
        self._note = note  # called with that count
        batch = cache.layers[0].k.shape[0]
        self.tokens = program.buffer("tokens", (batch,), torch.long, self.device)
        self._hidden = program.buffer("hidden", (batch, parts.embedding.shape[1]), parts.embedding.dtype, self.device)
        self._bind()

    def _bind(self) -> None:
        """Collect the arguments of the op, and with them the addresses that a graph has to have."""
        parts, cache = self._parts, self.cache
        layers, buffers = parts.layers, cache.layers
        self._embedding = parts.embedding
        cos, sin = self._tables(parts.rotary)
        positions, cache_seqlens = cache.counters
        self.arguments = {
            "hidden": self._hidden,
            "input_norms": [layer.input_norm for layer in layers],
            "qkv_weights": parts.packed["qkv"],
            "qkv_biases": parts.packed["qkv_bias"],
            "o_weights": [layer.output for layer in layers],
            "o_biases": [layer.output_bias for layer in layers if layer.output_bias is not None],
            "post_norms": [layer.post_norm for layer in layers],
            "gate_up_weights": parts.packed["gate_up"],
            "down_weights": [layer.down for layer in layers],
            "norm": parts.norm,
            "head": parts.head,
            "head_bias": parts.head_bias,
            "cos": cos,
            "sin": sin,
            "positions": positions,
            "cache_seqlens": cache_seqlens,
            "cache_leftpad": cache.cache_leftpad,
            "k_caches": [buffer.k for buffer in buffers],
            "v_caches": [buffer.v for buffer in buffers],
            "heads": layers[0].heads,
            "eps": parts.eps,
            "weight_offset": parts.family.weight_offset,
            "cast_before_weight": parts.family.cast_before_weight,
            "softmax_scale": layers[0].scale,
            "windows_left": [layer.window_left for layer in layers],
        }
        used = []
        for argument in self.arguments.values():
            used += argument if isinstance(argument, list) else [argument]
        self.program.bind(tuple((x.data_ptr(), x.shape, x.stride()) if isinstance(x, Tensor) else x for x in used))

    def forward(self) -> Tensor:
        return _ops.decode_step(**self.arguments)

    def run(self, function: Callable[[], Any]) -> Any:
        """What `function`, which calls `forward` once, returns: all tensors of fixed buffers, on CUDA by a graph."""
        if self.cache.make_room(1):
            self._bind()
        _index(self._embedding, [self.tokens], out=self._hidden)  # F.embedding takes three times as long
        self.cache.counters.add_(1)
        result = self.program.run(function, self.device)
        self.cache.advance()
        self.count += 1
        self._note(self.count)
        return result

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (B, V) behind the tokens (B,), until the next call."""
        self.tokens.copy_(tokens)
        return self.run(self.forward)

    def _tables(self, rotary: nn.Module) -> list[Tensor]:
        """cos and sin of every position in the cache. Computed anew by the model's module, which may have changed."""
        positions = torch.arange(self.cache.capacity, device=self.device)[None]
        tables = rotary(self._embedding[:1], positions)
        buffers = []
        for name, table in zip(("cos", "sin"), tables, strict=True):
            buffers.append(self.program.buffer(name, table.shape[1:], table.dtype, self.device))
            buffers[-1].copy_(table[0])
        return buffers


class Decoder:
    """What is kept for one model between calls of generate."""

    def __init__(self):
        self.calls: Counter[str] = Counter()  # how often generate took which way, by the words of the report
        self.steps = 0  # that ran, of all calls
        self._lock = threading.Lock()
        self._closed = False
        self._programs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache: graphs die with it
        self._spare: list[tuple[Any, int | None]] = []  # at most one cache, and the stream it was used on

    def begin(self, model: nn.Module, parts: Trunk, cache: Any, kind: Any = "step") -> DecodeStep:
        """The step of a model on a cache whose counters are set. Programs of one `kind` run the same function."""
        programs = self._programs.setdefault(cache, {})
        return DecodeStep(parts, cache, programs.setdefault(kind, Program(self.calls)), self._note_step)

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

        device = parts.head.device
        cache = self._take(parts, batch, min(tokens, limit), _stream(device))
        if cache is None:
            layer = parts.layers[0]
            row_bytes = 2 * batch * layer.kv_heads * layer.head_dim * parts.head.dtype.itemsize * len(parts.layers)
            cache = KVCache.growable(len(parts.layers), row_bytes, tokens, limit)
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
