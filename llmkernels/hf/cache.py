"""A KV cache of fixed buffers, which transformers' models fill and a decode step writes into.

Importing this module imports transformers; `llmkernels.KVCache` imports it at first use.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ._checks import check_count

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
    """The keys and values of one layer: buffers `k` and `v` (B, capacity, Hkv, D), filled with `length` tokens."""

    __slots__ = ()  # so that a layer of transformers can become one

    k: Tensor | None
    v: Tensor | None
    capacity: int
    length: int
    grows: bool
    layers: int  # of the cache; they grow together

    @property
    def nbytes(self) -> int:
        return 0 if self.k is None else self.k.nbytes + self.v.nbytes

    def write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append (B, Hkv, T, D) keys and values that fit, for which there is room."""
        end = self.length + key_states.shape[2]
        self.k[:, self.length : end].copy_(key_states.transpose(1, 2))
        self.v[:, self.length : end].copy_(value_states.transpose(1, 2))
        self.length = end

    def make_room(self, tokens: int) -> None:
        """A layer that grows moves to new buffers if needed; any other raises ValueError."""
        needed = self.length + tokens
        if needed <= self.capacity:
            return
        if not self.grows:
            raise ValueError(
                f"KVCache: capacity must be at least {needed} tokens ({self.length} live, {tokens} new), "
                f"got {self.capacity}"
            )
        self._move(slice(None), room_for(needed, self.nbytes * self.layers // self.capacity))

    def _move(self, rows: Any, capacity: int) -> None:
        """Move the live tokens of these rows to buffers of this capacity. Where there is no memory, nothing changes."""
        if self.k is not None:
            self.k, self.v = self._moved(self.k, rows, capacity), self._moved(self.v, rows, capacity)
        self.capacity = capacity

    def _moved(self, buffer: Tensor, rows: Any, capacity: int) -> Tensor:
        live = buffer[rows, : self.length]
        with torch.inference_mode(False):
            new = buffer.new_zeros(live.shape[0], capacity, *buffer.shape[2:])
        new[:, : self.length] = live
        return new

    def reorder(self, rows: Tensor) -> None:
        """The same number of sequences, in another order, in place: CUDA graphs have the addresses."""
        for buffer in (self.k, self.v):
            live = buffer[:, : self.length]
            live.copy_(live.index_select(0, rows.to(buffer.device)))


class KVCacheLayer(Buffers, CacheLayerMixin):
    """A layer of a KVCache.

    `keys` and `values` are views of its tokens in transformers' layout, (B, Hkv, length, D).
    """

    is_compileable = False  # else generate() would compile the forward, without need
    is_sliding = False  # every token is kept; the attention applies a window
    is_croppable = True

    def __init__(self, capacity: int, grows: bool = False, layers: int = 1):  # the mixin's __init__ assigns keys
        self.capacity = capacity
        self.grows = grows
        self.layers = layers
        self.length = 0
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
        return None if self.k is None else self.k[:, : self.length].transpose(1, 2)

    @property
    def values(self) -> Tensor | None:
        return None if self.v is None else self.v[:, : self.length].transpose(1, 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for keys and values like these, (B, Hkv, T, D) with any T."""
        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
            self.k, self.v = (_zeros(x, self.capacity) for x in (key_states, value_states))
        self._home = key_states.device

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append (B, Hkv, T, D) keys and values; returns `keys` and `values`.

        Raises: RuntimeError when they do not fit the buffers or require a gradient, ValueError when the capacity is too
            small; before anything is written.
        """
        self._check(key_states, value_states)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("KVCache: key_states must not require a gradient; call the model under torch.no_grad()")
        if self.k is None:
            self.lazy_initialization(key_states, value_states)
        self.make_room(key_states.shape[2])
        self.write(key_states, value_states)
        return self.keys, self.values

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
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.grows else self.capacity

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.length = 0

    def release(self) -> None:
        """Forget everything, and free the buffers."""
        self.k = self.v = None
        self.length = 0

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
            self._move(rows.repeat_interleave(repeats), self.capacity)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these sequences: a tensor, a list, or any index of rows."""
        if self.k is not None:
            self._move(indices, self.capacity)


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
        counters: int32 (2, B) on the device: the rope position of the last token, and cache_seqlens. A decode step adds
            one to both.

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
        self._make_layers(config.num_hidden_layers, capacity, grows)
        if batch_size is not None:
            heads = config.num_key_value_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            dtype = dtype or (model.dtype if model is not None else torch.get_default_dtype())
            device = device or (model.device if model is not None else "cpu")
            self.early_initialization(batch_size, heads, head_dim, dtype, torch.device(device))

    @classmethod
    def growable(cls, layers: int, row_bytes: int, tokens: int, limit: int) -> "KVCache":
        """A cache that grows, with room for `tokens` and some more, up to `limit`."""
        cache = cls.__new__(cls)
        cache._make_layers(layers, room_for(tokens, row_bytes, limit), grows=True)
        return cache

    def _make_layers(self, layers: int, capacity: int, grows: bool) -> None:
        super().__init__(layers=[KVCacheLayer(capacity, grows, layers) for _ in range(layers)])
        self.counters: Tensor | None = None
        self.cache_leftpad: Tensor | None = None
        self._counted = -1  # the length in the counters on the device

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
    def cache_seqlens(self) -> Tensor:
        self._allocate_counters()
        if self._counted != self.length:
            self._count()
        return self.counters[1]

    def begin(self, positions: Tensor | int, cache_leftpad: Tensor | None = None) -> None:
        """Set the counters before the first decode step.

        `positions` (B,) are the rope positions of the last tokens, or that of all; `cache_leftpad` (B,) as in
        :func:`decode_attention`.
        """
        self._allocate_counters()
        self._count()
        self.counters[0].copy_(positions) if isinstance(positions, Tensor) else self.counters[0].fill_(positions)
        self.cache_leftpad.zero_() if cache_leftpad is None else self.cache_leftpad.copy_(cache_leftpad)

    def has_room(self, tokens: int) -> bool:
        """Whether there is room for this many more tokens, or the cache can grow."""
        layer = self.layers[0]
        return layer.grows or layer.length + tokens <= layer.capacity

    def make_room(self, tokens: int) -> bool:
        """Make room for more tokens. Returns whether the buffers moved; raises ValueError if they can not."""
        if all(layer.length + tokens <= layer.capacity for layer in self.layers):
            return False
        for layer in self.layers:
            layer.make_room(tokens)
        return True

    def advance(self, tokens: int = 1) -> None:
        """Count tokens on the host that a decode step has written and counted on the device."""
        for layer in self.layers:
            layer.length += tokens
        self._counted += tokens

    def take_back(self, tokens: int) -> None:
        """Forget tokens that steps have just appended: any cache can, also where `crop` raises."""
        for layer in self.layers:
            layer.length -= tokens

    def _allocate_counters(self) -> None:
        k = self.layers[0].k
        if k is None:
            raise ValueError("KVCache: there must be tokens in it, or a batch_size given to its constructor")
        if self.counters is None or self.counters.shape[1] != k.shape[0] or self.counters.device != k.device:
            with torch.inference_mode(False):
                self.counters = torch.zeros(2, k.shape[0], dtype=torch.int32, device=k.device)
                self.cache_leftpad = torch.zeros(k.shape[0], dtype=torch.int32, device=k.device)
            self._counted = -1

    def _count(self) -> None:
        self.counters[1].fill_(self.length)
        self._counted = self.length

    def __repr__(self) -> str:
        return f"KVCache(length={self.length}, capacity={self.capacity}, layers={len(self.layers)})"
