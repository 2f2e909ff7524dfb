"""A KV cache of fixed buffers, which transformers' models fill and a decode step writes into.

Importing this module imports transformers; `llmkernels.KVCache` imports it at first use.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ._checks import check_count
from .origin import Entry

STEP = 64  # the capacity of a cache that grows is a multiple of this
FIRST_TOKENS = 192  # it has room ahead for as many tokens as it has, and at least for this many;
AHEAD_TOKENS = 2048  # but at most for this many,
AHEAD_BYTES = 512 << 20  # of at most this size, or for a quarter of its tokens if that is more
KEPT_BYTES = 1 << 30  # a larger cache is not kept for the next call of generate


def room_for(tokens: int, row_bytes: int, limit: int | None = None) -> int:
    """The capacity of a cache that has `tokens` and may grow up to `limit`.

    `row_bytes` is the size of one token in all layers and sequences. The room ahead is in proportion to the tokens, so
    that moves to larger buffers, each with a new graph, stay a small part of the time at any length. Where there is a
    limit, which will be reached soon, the first move is farther away.
    """
    ahead = AHEAD_TOKENS if limit is not None else min(max(tokens, FIRST_TOKENS), AHEAD_TOKENS)
    room = tokens + max(tokens // 4, min(ahead, AHEAD_BYTES // max(row_bytes, 1)), 1)
    return -(-min(room, room if limit is None else max(limit, tokens)) // STEP) * STEP


class Buffers:
    """The keys and values of one layer: buffers `k` and `v` (B, capacity, Hkv, D), filled with `length` tokens.

    Token t is in row t - offset, which is not 0 for layers that drop tokens.
    """

    __slots__ = ()  # so that a layer of transformers can become one

    k: Tensor | None
    v: Tensor | None
    capacity: int
    length: int
    offset: int
    grows: bool
    layers: int  # of the cache; they grow together
    is_shown = False  # someone may keep views of the buffers: what they hold is not overwritten
    window: int | None = None  # how many tokens a query sees, its own included, where the others are dropped

    @property
    def nbytes(self) -> int:
        return 0 if self.k is None else self.k.nbytes + self.v.nbytes

    @property
    def start(self) -> int:
        """The first token that is held."""
        return 0

    @property
    def rows(self) -> int:
        """How many tokens the buffers hold."""
        return self.capacity

    @property
    def end(self) -> int:
        """The number of tokens up to which there is room."""
        return self.capacity

    def views(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, end - start, D) of these tokens."""
        rows = slice(start - self.offset, end - self.offset)
        return self.k[:, rows].transpose(1, 2), self.v[:, rows].transpose(1, 2)

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, Hkv, T, D) keys and values that fit; returns them behind those that were held."""
        start = self.start
        self.make_room(key_states.shape[2])
        first, end = self.length, self.length + key_states.shape[2]
        k, v = self.views(first, end)
        k.copy_(key_states)
        v.copy_(value_states)
        self.length = end
        return (k, v) if start == first else self.views(start, end)

    def make_room(self, tokens: int) -> bool:
        """Make room for more tokens. A layer that grows moves to new buffers if needed; any other raises ValueError.

        Returns whether the capacity or the buffers are others. Where there is no memory, nothing changes.
        """
        needed = self.length + tokens
        if needed <= self.end:
            return False
        capacity = self._capacity_for(needed)
        if self.k is not None:
            self._move(slice(None), capacity)
        self.capacity = capacity
        return True

    def _capacity_for(self, needed: int) -> int:
        if needed <= self.capacity:
            return self.capacity
        if not self.grows:
            raise ValueError(
                f"KVCache: capacity must be at least {needed} tokens ({self.length} live, {needed - self.length} new), "
                f"got {self.capacity}"
            )
        return room_for(needed, self.nbytes * self.layers // self.rows)

    def _move(self, index: Any, rows: int) -> None:
        """Move the tokens of these sequences to buffers of so many rows."""
        self.k, self.v = self._moved(self.k, index, rows), self._moved(self.v, index, rows)

    def _moved(self, buffer: Tensor, index: Any, rows: int) -> Tensor:
        live = buffer[index, : self.length - self.offset]
        with torch.inference_mode(False):
            new = buffer.new_zeros(live.shape[0], rows, *buffer.shape[2:])
        new[:, : live.shape[1]] = live
        return new

    def _rows_for(self, capacity: int, least: int = 0) -> int:
        """How many rows new buffers have for a capacity, `least` of them to be used at once."""
        return capacity

    def reorder(self, index: Tensor) -> None:
        """The same number of sequences, in another order, in place: CUDA graphs have the addresses."""
        for buffer in (self.k, self.v):
            live = buffer[:, : self.length - self.offset]
            live.copy_(live.index_select(0, index.to(buffer.device)))


class WindowBuffers(Buffers):
    """The same for a layer whose queries see `sliding_window` tokens, their own included: the others are dropped.

    The buffers have rows for the window and some more. When these are used up, the window moves to the first rows,
    which leaves the buffers where they are, and the graphs valid that have their addresses.
    """

    __slots__ = ()

    sliding_window: int
    spare = 0  # how many tokens are kept besides those that the next query sees

    @property
    def window(self) -> int:
        return self.sliding_window

    @property
    def start(self) -> int:
        return max(self.offset, self.length - self.sliding_window + 1)

    @property
    def _first_kept(self) -> int:
        return max(self.offset, self.start - self.spare)

    @property
    def rows(self) -> int:
        return self._rows_for(self.capacity) if self.k is None else self.k.size(1)

    @property
    def end(self) -> int:
        return min(self.capacity, self.offset + self.rows)

    def append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        states, end = (key_states, value_states), self.length + key_states.shape[2]
        if end - self._first_kept <= _with_slack(self.sliding_window):
            return super().append(*states)
        if self.start < self.length:
            states = [torch.cat(pair, 2) for pair in zip(self.views(self.start, self.length), states, strict=True)]
        capacity, start = self._capacity_for(end), end - self.sliding_window + 1 - self.spare
        self._place([x[:, :, x.shape[2] - (end - start) :] for x in states], start, self._rows_for(capacity))
        self.capacity = capacity
        return tuple(states)

    def make_room(self, tokens: int) -> bool:
        needed = self.length + tokens
        if needed <= self.end:
            return False
        before, capacity = (self.capacity, self.k), self._capacity_for(needed)
        if self.k is not None:
            start = self._first_kept
            # Copies, since rows that overlap can not be copied at once.
            held = [x.clone() for x in self.views(start, self.length)]
            self._place(held, start, self._rows_for(capacity, needed - start))
        self.capacity = capacity
        return before[0] != capacity or before[1] is not self.k

    def _place(self, states: Sequence[Tensor], first: int, rows: int) -> None:
        """Hold these keys and values (B, Hkv, T, D) and no others: `first` is the first token. In place, unless more
        rows are needed or someone may keep what is there. Buffers never have fewer rows than before: layers of one
        window have as many, and drop tokens together."""
        buffers = self.k, self.v
        if rows > self.rows or self.is_shown:
            with torch.inference_mode(False):
                buffers = [_zeros(x, max(rows, self.rows)) for x in states]
            self.is_shown = False
        for buffer, x in zip(buffers, states, strict=True):
            buffer[:, : x.shape[2]].copy_(x.transpose(1, 2))
        self.k, self.v = buffers
        self.offset, self.length = first, first + states[0].shape[2]

    def _rows_for(self, capacity: int, least: int = 0) -> int:
        rows = _with_slack(self.sliding_window)
        return min(capacity, rows if least <= rows else _with_slack(least))


def _with_slack(tokens: int) -> int:
    """As many rows, and some more: moves of the window to the first rows are rare, and there is room for a step."""
    return tokens + max(tokens // 4, STEP)


class KVCacheLayer(Buffers, CacheLayerMixin):
    """A layer of a KVCache.

    `keys` and `values` are views of its tokens in transformers' layout, (B, Hkv, length, D).
    """

    is_compileable = False  # else generate() would compile the forward, without need
    is_sliding = False  # every token is kept; the attention applies a window, if there is one
    is_croppable = True

    def __init__(self, capacity: int, grows: bool = False, layers: int = 1):  # the mixin's __init__ assigns keys
        self.capacity = capacity
        self.grows = grows
        self.layers = layers
        self.length = self.offset = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self._home: torch.device | None = None

    @property
    def is_initialized(self) -> bool:
        return self.k is not None

    @property
    def batch_size(self) -> int:
        if self.k is None:
            raise AttributeError("a KVCache without tensors has no batch_size yet")  # transformers expects this type
        return self.k.shape[0]

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.k is None else self.k.dtype

    @property
    def device(self) -> torch.device | None:
        return self._home

    @property
    def keys(self) -> Tensor | None:
        return None if self.k is None else self.views(self.start, self.length)[0]

    @property
    def values(self) -> Tensor | None:
        return None if self.v is None else self.views(self.start, self.length)[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for keys and values like these, (B, Hkv, T, D) with any T."""
        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
            self.k, self.v = (_zeros(x, self._rows_for(self.capacity)) for x in (key_states, value_states))
        self._home = key_states.device

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append (B, Hkv, T, D) keys and values; returns them behind those that were held.

        Raises: RuntimeError when they do not fit the buffers or require a gradient, ValueError when the capacity is too
            small; before anything is written.
        """
        self._check(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("KVCache: key_states must not require a gradient; call the model under torch.no_grad()")
        if self.k is None:
            self.lazy_initialization(key_states, value_states)
        return self.append(key_states, value_states)

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise unless both fit, so that nothing is written if one of them does not."""
        for name, states in (("key_states", key_states), ("value_states", value_states)):
            if not isinstance(states, Tensor):
                raise TypeError(f"KVCache: {name} must be a tensor, got {type(states).__name__}")
            if states.ndim != 4:
                raise RuntimeError(
                    f"KVCache: {name} must be (batch, heads, tokens, head_dim), got {tuple(states.shape)}"
                )
        tokens = key_states.shape[2]
        for name, states, buffer in (("key_states", key_states, self.k), ("value_states", value_states, self.v)):
            held = key_states.transpose(1, 2) if buffer is None else buffer
            batch, _, heads, dim = held.shape
            if buffer is None:
                dim = states.shape[3]  # values may have another head_dim than keys
            if states.shape != (batch, heads, tokens, dim):
                raise RuntimeError(
                    f"KVCache: {name} must have shape {(batch, heads, tokens, dim)}, got {tuple(states.shape)}"
                )
            if (states.dtype, states.device) != (held.dtype, held.device):
                raise RuntimeError(
                    f"KVCache: {name} must be {held.dtype} on {held.device}, got {states.dtype} on {states.device}"
                )

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length - self.start + query_length, self.start

    def get_max_length(self) -> int:
        return -1 if self.grows else self.capacity

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.length = self.offset = 0

    def release(self) -> None:
        """Forget everything, and free the buffers."""
        self.k = self.v = None
        self.length = self.offset = 0

    def offload(self) -> None:
        if self.k is not None:
            self.k, self.v = (buffer.to("cpu", non_blocking=True) for buffer in (self.k, self.v))

    def prefetch(self) -> None:
        if self.k is not None:
            self.k, self.v = (buffer.to(self._home, non_blocking=True) for buffer in (self.k, self.v))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens: a negative number, as in transformers 5.23."""
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding gives a tensor
        if not -self.length <= tokens_to_remove <= 0:
            raise ValueError(
                f"KVCache.crop: tokens_to_remove must be from {-self.length} to 0 (the live tokens, negative), "
                f"got {tokens_to_remove}"
            )
        self.length += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.k is None:
            return
        if len(beam_idx) != self.k.shape[0]:
            return self.batch_select_indices(beam_idx)
        self.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.k is not None:
            rows = torch.arange(self.k.shape[0], device=self.k.device)
            self._move(rows.repeat_interleave(repeats), self.rows)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these sequences: a tensor, a list, or any index of rows."""
        if self.k is not None:
            self._move(indices, self.rows)


class KVCacheWindowLayer(WindowBuffers, KVCacheLayer):
    """The same with a sliding window, as transformers' DynamicSlidingWindowLayer: `keys` are those of the window."""

    is_sliding = True
    is_croppable = False  # what has been dropped does not come back
    spare = 1  # which the tensors of transformers' layer have before the last token is appended

    def __init__(self, sliding_window: int, capacity: int, grows: bool = False, layers: int = 1):
        super().__init__(capacity, grows, layers)
        self.sliding_window = sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        if self.offset:
            raise RuntimeError("KVCache.crop: a layer with a sliding window must not have dropped tokens")
        super().crop(tokens_to_remove)


def _zeros(x: Tensor, capacity: int) -> Tensor:
    batch, heads, _, dim = x.shape
    # Zeros: memory beyond the length may be read, and must not be NaN.
    return torch.zeros(batch, capacity, heads, dim, dtype=x.dtype, device=x.device)


class KVCache(Cache):
    r"""Keys and values of every layer in buffers of fixed size, (B, capacity, Hkv, D) each.

    A transformers ``Cache``: every model and attention of transformers runs on it, ``generate(past_key_values=...)``
    takes it, and the decode step of a patched model needs one. All sequences of the batch have the same length, as in
    transformers: shorter prompts are padded on the left.

    Args:
        config: of the model, or the model itself: says how many layers there are.
        capacity: tokens per sequence. Their memory is allocated at once.
        batch_size, dtype, device: allocate the buffers now. Without them they are allocated at the first ``update``
            of their layer, with its batch, heads, dtype and device.
        grows: move to larger buffers when ``capacity`` is reached. A decode step then needs a new CUDA graph.

    Attributes:
        cache_seqlens: int32 (B,) on the device, the tokens of each sequence.
        cache_leftpad: int32 (B,) on the device, the index of the first token after left padding; set by ``begin``.
        counters: int32 (2, B) on the device: the rope position of the last token, and cache_seqlens; more rows where
            layers drop tokens, the number of those that are left. A decode step adds one to all.

    Raises: ValueError for more tokens than ``capacity``, unless it grows; RuntimeError for keys or values that do not
        fit or require a gradient; TypeError for arguments of another kind. Nothing is written then.

    >>> cache = llmkernels.KVCache(model, capacity=4096)
    >>> model.generate(**inputs, past_key_values=cache)
    """

    def __init__(
        self,
        config: Any,
        capacity: int,
        *,
        batch_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        grows: bool = False,
    ):
        check_count("KVCache: capacity", capacity)
        if batch_size is not None:
            check_count("KVCache: batch_size", batch_size)
        model = config if isinstance(config, nn.Module) else None
        config = getattr(config, "config", config)
        if not hasattr(config, "get_text_config"):
            raise TypeError(
                f"KVCache: config must be a model of transformers or its config, got {type(config).__name__}"
            )
        config = config.get_text_config(decoder=True)
        check_count("KVCache: num_hidden_layers of the config", config.num_hidden_layers)
        self._make_layers([None] * config.num_hidden_layers, capacity, grows)
        if batch_size is not None:
            heads = config.num_key_value_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            dtype = dtype or (model.dtype if model is not None else torch.get_default_dtype())
            device = device or (model.device if model is not None else "cpu")
            self.early_initialization(batch_size, heads, head_dim, dtype, torch.device(device))

    @classmethod
    def growable(cls, windows: Sequence[int | None], row_bytes: int, tokens: int, limit: int) -> "KVCache":
        """A cache that grows, with room for `tokens` and some more, up to `limit`. `windows`: how many tokens each
        layer keeps at least, or None for all."""
        cache = cls.__new__(cls)
        cache._make_layers(windows, room_for(tokens, row_bytes, limit), grows=True)
        return cache

    def _make_layers(self, windows: Sequence[int | None], capacity: int, grows: bool) -> None:
        made = capacity, grows, len(windows)
        super().__init__(
            layers=[KVCacheWindowLayer(window, *made) if window else KVCacheLayer(*made) for window in windows]
        )
        self.counters: Tensor | None = None
        self.leftpads: Tensor | None = None
        self._forget_counters()

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """Keys, values and None for each layer, as a DynamicCache without sliding window."""
        return ((layer.keys, layer.values, None) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """The size of the buffers of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def capacity(self) -> int:
        return self.layers[0].capacity

    @property
    def length(self) -> int:
        """The tokens of each sequence, as counted on the host."""
        return self.layers[-1].length

    @property
    def windows(self) -> list[int | None]:
        """How many tokens each layer keeps at least, or None for all."""
        return [layer.window for layer in self.layers]

    @property
    def cache_leftpad(self) -> Tensor | None:
        return None if self.leftpads is None else self.leftpads[0]

    @property
    def cache_seqlens(self) -> Tensor:
        self._allocate_counters()
        self._count()
        return self.counters[1]

    def begin(self, positions: Tensor | int, cache_leftpad: Tensor | None = None) -> None:
        """Set the counters before the first decode step.

        `positions` (B,) are the rope positions of the last tokens, or that of all; `cache_leftpad` (B,) as in
        :func:`decode_attention`.
        """
        self._allocate_counters()
        self._count()
        if isinstance(positions, Tensor) or cache_leftpad is not None:
            self._position = None
            self.counters[0].copy_(positions) if isinstance(positions, Tensor) else self.counters[0].fill_(positions)
            self.leftpads.zero_() if cache_leftpad is None else self._place_leftpad(cache_leftpad)
        elif positions != self._position:
            self.counters[0].fill_(positions)
            self.leftpads.zero_()
            self._position = positions
        self._versions = self.counters._version, self.leftpads._version

    def places(self) -> list[tuple[Tensor, Tensor]]:
        """Of each layer: cache_seqlens and cache_leftpad as its rows count them. They stay where they are."""
        index = {window: row for row, window in enumerate(self._offsets())}
        return [(self.counters[1 + index[layer.window]], self.leftpads[index[layer.window]]) for layer in self.layers]

    def _offsets(self) -> dict[int | None, int]:
        """How many tokens have been dropped, by window. Layers of one window drop them together."""
        return {None: 0} | {layer.window: layer.offset for layer in self.layers}

    def has_room(self, tokens: int) -> bool:
        """Whether there is room for this many more tokens, or the cache can grow."""
        layer = self.layers[0]
        return layer.grows or layer.length + tokens <= layer.capacity

    def make_room(self, tokens: int) -> bool:
        """Make room for more tokens. Returns whether the capacity or the buffers are others; raises ValueError where
        there can be no room."""
        if all(layer.length + tokens <= layer.end for layer in self.layers):
            return False
        changed = [layer.make_room(tokens) for layer in self.layers]
        if self.counters is not None:
            self._count()
            if self._position is None:
                self._place_leftpad(self.leftpads[0])
        return any(changed)

    def count_ahead(self, tokens: int = 1) -> None:
        """Count tokens on the device that a decode step is about to write."""
        self.counters.add_(tokens)
        self._counted = [count + tokens for count in self._counted]
        self._position = None if self._position is None else self._position + tokens
        self._versions = self.counters._version, self.leftpads._version

    def advance(self, tokens: int = 1) -> None:
        """Count tokens on the host that a decode step has written and counted on the device."""
        for layer in self.layers:
            layer.length += tokens

    @property
    def is_even(self) -> bool:
        """Whether all layers have the same tokens."""
        length = self.length
        return all(layer.length == length for layer in self.layers)

    def asked_of(self) -> list[Entry]:
        """What a step relies on besides the cache itself, as entries: see origin.py."""
        return []

    def take_back(self, tokens: int) -> None:
        """Forget tokens that steps have just appended: any cache can, also where `crop` raises."""
        for layer in self.layers:
            layer.length -= tokens

    def _allocate_counters(self) -> None:
        k = self.layers[0].k
        if k is None:
            raise ValueError("KVCache: there must be tokens in it, or a batch_size given to its constructor")
        shape = len(self._offsets()), k.shape[0]
        if self.leftpads is None or self.leftpads.shape != shape or self.leftpads.device != k.device:
            with torch.inference_mode(False):
                self.leftpads = torch.zeros(shape, dtype=torch.int32, device=k.device)
                self.counters = torch.zeros(1 + shape[0], shape[1], dtype=torch.int32, device=k.device)
            self._forget_counters()

    def _forget_counters(self) -> None:
        """Note that the host does not know what the counters on the device are."""
        self._counted: list[int] = []  # else the rows behind the first one, each the same for all sequences,
        self._position: int | None = None  # and that one, if it is the same for all, and none is padded
        self._versions = -1, -1  # of both tensors then

    def _count(self) -> None:
        """Set the counters on the device that are not what they should be."""
        if self._versions != (self.counters._version, self.leftpads._version):  # someone has written to them
            self._forget_counters()
        counts = [self.length - offset for offset in self._offsets().values()]
        if counts != self._counted:
            for row, count in zip(self.counters[1:], counts, strict=True):
                row.fill_(count)
            self._counted = counts
        self._versions = self.counters._version, self.leftpads._version

    def _place_leftpad(self, cache_leftpad: Tensor) -> None:
        for row, offset in zip(self.leftpads, self._offsets().values(), strict=True):
            row.copy_((cache_leftpad - offset).clamp(min=0))

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, capacity={self.capacity}, layers={len(self.layers)})"
