"""A KV cache of fixed buffers, which transformers' models fill and a decode step writes into."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from llmkernels._checks import check_count

from ..classes.origin import Entry
from .buffers import room_for
from .layers import KVCacheLayer, KVCacheWindowLayer

OF_COUNTERS = {"counters", "leftpads", "_counted", "_position", "_versions"}  # members of a cache


class KVCache(Cache):
    r"""Keys and values of every layer in buffers of fixed size, (B, capacity, Hkv, D) each.

    A transformers ``Cache``: every model and attention of transformers runs on it, ``generate(past_key_values=...)``
    takes it, and the decode step of a patched model needs one. All sequences of the batch have the same length, as in
    transformers: shorter prompts are padded on the left.

    Args:
        config: of the model, or the model itself: says how many layers there are.
        capacity: tokens per sequence. Their memory is allocated at once.
        batch_size: allocate the buffers now, in ``dtype`` and on ``device``, by default the model's. Without it they
            are allocated at the first ``update`` of their layer, with its batch, heads, dtype and device.
        dtype, device: of buffers that are allocated now; without a ``batch_size`` they say nothing.
        grows: move to larger buffers when ``capacity`` is reached. A decode step then needs a new CUDA graph.

    Attributes:
        cache_seqlens: int32 (B,) on the device, the tokens of each sequence.
        cache_leftpad: int32 (B,) on the device, the index of the first token after left padding; set by ``begin``.
        counters: int32 (2, B) on the device: the rope position of the last token, and cache_seqlens; more rows where
            layers drop tokens, the number of those that are left. A decode step adds one to all.

    Raises: ValueError for more tokens than ``capacity``, unless it grows; RuntimeError for keys or values that do not
        fit or require a gradient; TypeError for arguments of another kind. Nothing is written then. ValueError for a
        model of more layers, whose first ones have written.

    >>> cache = llmkernels.KVCache(model, capacity=4096)
    >>> model.generate(**inputs, past_key_values=cache)
    """

    left_to_modules = False  # whether the model's modules run a forward behind nothing: it has been refused before

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
            query_heads = config.num_attention_heads
            heads = getattr(config, "num_key_value_heads", None) or query_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
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

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"KVCache: layer_idx must be below {len(self.layers)}, the layers of the config that it was made for, "
                f"got {layer_idx}"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

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

    def rows(self) -> list[int]:
        """Of each layer: its row of `counters[1:]` and of `leftpads`, cache_seqlens and cache_leftpad as it counts
        them."""
        index = {window: row for row, window in enumerate(self._offsets())}
        return [index[layer.window] for layer in self.layers]

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

    @contextmanager
    def counting(self, tokens: int = 1) -> Iterator[None]:
        """Around what counts these tokens on the device. If it raises, nobody knows whether it has."""
        counted = [count + tokens for count in self._counted]
        position = None if self._position is None else self._position + tokens
        self._forget_counters()
        yield
        self._counted, self._position = counted, position
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
