"""The layers of a KVCache: buffers as transformers takes them."""

from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .buffers import Buffers, WindowBuffers, zeros_for


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
        self.k, self.v = (zeros_for(x, self._rows_for(self.capacity)) for x in (key_states, value_states))
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
        try:
            tokens_to_remove = index(tokens_to_remove)  # assisted decoding gives a tensor
        except TypeError:
            raise TypeError(f"KVCache.crop: tokens_to_remove must be an integer, got {tokens_to_remove!r}") from None
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
