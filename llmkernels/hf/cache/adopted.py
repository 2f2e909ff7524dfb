"""Decode steps for a caller with transformers' DynamicCache: a step needs a KVCache.

- generate, copy_in: the tokens of the caller's cache are copied to a KVCache before the first step; hand_back: after
  the last one the new tokens are appended to the caller's cache by its own `update`, so that it holds the same as after
  transformers' loop
- forward, become_ours: the layers of the caller's cache move to buffers, where steps append to them. For anyone else
  they are transformers' layers as before. fill: an empty one gets the layers of a prompt's new cache
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..classes.origin import Entry, asked_of_origin, check_origin
from ..errors import NoStep, UnknownLayout
from ..model.description import Description
from .buffers import Buffers, WindowBuffers, filled, room_for
from .kv_cache import OF_COUNTERS, KVCache


def check_dynamic(cache: object, parts: Description, batch: int, recorded: bool = False) -> None:
    """Raise NoStep unless `cache` is a DynamicCache, empty or of this model and batch.

    `recorded`: layers with a window may have more tokens than it, which are there to be cropped.
    """
    if type(cache) not in (DynamicCache, AdoptedCache):
        raise NoStep(f"the cache given is a {type(cache).__name__}")
    if cache.offloading or _is_replaced(cache, *cache.layers):
        raise NoStep("the cache given does more than to hold keys and values")
    if not cache.layers and cache.layer_class_to_replicate is DynamicLayer:
        return
    if len(cache.layers) != len(parts.layers):
        raise NoStep(f"the cache has {len(cache.layers)} layers")
    tokens = int(cache.get_seq_length())  # assisted decoding makes a tensor of it
    recordings = {}
    for layer, part in zip(cache.layers, (layer.attention for layer in parts.layers), strict=True):
        held, kind = tokens, getattr(layer, "theirs", type(layer))
        if kind is DynamicSlidingWindowLayer:
            # A window that attention does not have: the description holds for as many tokens as the cache keeps, in
            # one call of generate. A cache that becomes ours would go on without it.
            window = len(parts.positions) if part.window_left < 0 and not recorded else part.window_left + 1
            held = min(tokens, window - 1)
            if layer.sliding_window != window or window < 2:
                raise NoStep("the cache has another sliding window than the model")
            if layer.record_past:
                if not recorded:
                    raise NoStep("the cache records what its sliding window drops")
                held = max(held, min(tokens, layer.keys.shape[2]) if tokens else 0)
            if recordings.setdefault(layer.sliding_window, (layer.record_past, held)) != (layer.record_past, held):
                raise NoStep("the layers of the cache differ in what they record")
        elif kind is not DynamicLayer:
            raise NoStep(f"the cache has a {type(layer).__name__}")
        if layer.get_seq_length() != tokens:
            raise NoStep("the layers of the cache differ in length")
        expected = (batch, part.kv_heads, held, part.head_dim)
        for held_tensor in (layer.keys, layer.values) if tokens else ():
            check_tensor(held_tensor, expected, parts.weight)


def check_tensor(tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise NoStep for keys or values of another shape, dtype or device."""
    if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise NoStep("the cache was made for other keys and values")


def windows(cache: DynamicCache, layers: int) -> list[int | None]:
    """How many tokens each layer of a cache keeps at least, or None for all."""
    return [getattr(layer, "sliding_window", None) for layer in cache.layers] or [None] * layers


def copy_in(ours: KVCache, theirs: DynamicCache) -> None:
    """Copy the tokens of `theirs` to `ours`, which is empty. Those that a sliding window has dropped are not needed."""
    tokens = int(theirs.get_seq_length())
    for ours_layer, layer in zip(ours.layers, theirs.layers if tokens else (), strict=False):
        if not ours_layer.is_initialized:
            ours_layer.lazy_initialization(layer.keys, layer.values)
        ours_layer.length = ours_layer.offset = tokens - layer.keys.shape[2]
        ours_layer.append(layer.keys, layer.values)


@torch.no_grad()
def hand_back(ours: KVCache, theirs: DynamicCache, frees: bool) -> None:
    """Append to `theirs` the tokens of `ours` that it does not have. With `frees`, then free each layer of `ours`."""
    first = int(theirs.get_seq_length())
    sliding = theirs.is_sliding or [False] * len(ours.layers)
    for index, layer in enumerate(ours.layers):
        start = first
        if layer.offset > first:
            start = layer.length - 1
            _replace(theirs.layers[index], *layer.views(max(layer.offset, layer.start - 1), start), start)
        # A sliding window keeps a view of the tensor that update() makes: a short one if the last token is alone.
        cuts = [start, max(start, layer.length - 1), layer.length] if sliding[index] else [start, layer.length]
        for start, end in pairwise(cuts):
            if start < end:
                theirs.update(*layer.views(start, end), index)
        if frees:
            layer.release()


def _replace(layer: DynamicSlidingWindowLayer, keys: Tensor, values: Tensor, tokens: int) -> None:
    """Let a layer have seen so many tokens, of which it holds these: what was before them its window has dropped."""
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length = keys, values, tokens


def _is_replaced(*instances: Cache | DynamicLayer) -> bool:
    """Whether a method of these was replaced, or `update` of their classes: some caches change what they are given."""
    return is_patched() or not all(_METHODS.isdisjoint(vars(instance)) for instance in instances)


_KINDS = Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


def is_patched() -> bool:
    """Whether someone has replaced `update` of a class of transformers' caches."""
    try:
        for kind in _KINDS:
            check_origin(kind.update)
    except UnknownLayout:
        return True
    return False


# --- a cache that becomes ours


def _attribute(read: Callable) -> property:
    """An attribute of transformers' layer. An assignment to it gives that layer back."""

    def assign(layer: "AdoptedLayer", value: Any) -> None:
        layer.give_back()
        setattr(layer, read.__name__, value)

    return property(read, assign)


class AdoptedLayer(DynamicLayer, Buffers):
    """A DynamicLayer whose tokens are in buffers with room for more, where steps append.

    All methods do what transformers' do. Those that can not use the buffers give the layer back first: it is
    transformers' layer then, until the next step.
    """

    theirs = DynamicLayer
    grows = True
    first: int  # the first token that is held

    @classmethod
    def adopt(cls, layer: DynamicLayer, tokens: int, capacity: int, layers: int) -> None:
        """Turn a layer of `tokens` into one of this class. On an exception it is what it was."""
        state, held = dict(vars(layer)), layer.keys.shape[2]
        for name in ("keys", "values", "cumulative_length"):
            state.pop(name, None)
        first = tokens - held
        state |= {"capacity": capacity, "length": tokens, "layers": layers}
        state |= {"first": first, "offset": first, "is_shown": False}
        adopted = cls.__new__(cls)
        vars(adopted).update(state)
        rows = adopted._rows_for(capacity, held + 1)
        k, v = (filled(held, rows) for held in (layer.keys, layer.values))
        vars(layer).clear()
        vars(layer).update(state, k=k, v=v)
        layer.__class__ = cls

    def give_back(self) -> None:
        """Be transformers' own layer again, of the same tokens: views of the buffers."""
        state = self._state()
        vars(self).clear()
        vars(self).update(state)
        self.__class__ = self.theirs

    def _state(self) -> dict[str, Any]:
        """The attributes that transformers' layer would have."""
        own = {"k", "v", "capacity", "length", "layers", "first", "offset", "is_shown"}
        keys, values = self.views(self.start, self.length)
        return {name: x for name, x in vars(self).items() if name not in own} | {"keys": keys, "values": values}

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Copies and pickles are of transformers' own layer."""
        state = self._state()
        for name in ("keys", "values"):
            state[name] = state[name].clone(memory_format=torch.contiguous_format)
        return self.theirs, self._arguments(), state

    def _arguments(self) -> tuple:
        return ()

    @_attribute
    def keys(self) -> Tensor:
        self.is_shown = True
        return self.views(self.start, self.length)[0]

    @_attribute
    def values(self) -> Tensor:
        self.is_shown = True
        return self.views(self.start, self.length)[1]

    def _least(self, tokens: int) -> int:
        """How many of so many tokens have to be held."""
        return tokens

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self._fits(key_states, self.k) or not self._fits(value_states, self.v):
            self.give_back()
            return self.update(key_states, value_states, *args, **kwargs)
        return self.append(key_states, value_states)

    def _fits(self, states: Tensor, buffer: Tensor) -> bool:
        """Whether these can be written to the buffer. Where gradients are recorded, nothing is changed in place."""
        batch, _, heads, dim = buffer.shape
        return (
            not torch.is_grad_enabled()
            and not is_patched()
            and (states.dtype, states.device) == (buffer.dtype, buffer.device)
            and (*states.shape[:2], *states.shape[3:]) == (batch, heads, dim)
        )

    def crop(self, *args, **kwargs) -> None:
        held = self.views(self.start, self.length)[0]
        cropped = self.theirs.__new__(self.theirs)
        vars(cropped).update(vars(self), keys=held, values=held, cumulative_length=self.length)
        cropped.crop(*args, **kwargs)
        tokens, held = int(cropped.get_seq_length()), cropped.keys.shape[2]
        is_overwritten = self.is_shown and tokens < self.length
        self.length, self.first = tokens, tokens - held
        if is_overwritten or held < self._least(tokens):
            self.give_back()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_shown or len(beam_idx) != self.k.shape[0]:
            super().reorder_cache(beam_idx)
        else:
            self.reorder(beam_idx)


class AdoptedWindowLayer(AdoptedLayer, WindowBuffers, DynamicSlidingWindowLayer):
    """The same with a sliding window."""

    theirs = DynamicSlidingWindowLayer

    def _arguments(self) -> tuple:
        return (self.sliding_window,)

    @property
    def start(self) -> int:
        return self.first if self.record_past else max(self.first, self.length - self.sliding_window + 1)

    @property
    def kept(self) -> tuple:
        """What layers of the same window have in common, which drop tokens together."""
        return self.sliding_window, self.offset, self.rows, self.first, self.record_past

    @_attribute
    def cumulative_length(self) -> int:
        return self.length

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"cumulative_length": self.length}

    def _least(self, tokens: int) -> int:
        return min(tokens, self.sliding_window - 1)

    def _fits(self, states: Tensor, buffer: Tensor) -> bool:
        return not self.record_past and super()._fits(states, buffer)

    def _place(self, states: Sequence[Tensor], first: int, rows: int) -> None:
        super()._place(states, first, rows)
        self.first = first

    def activate_past_recording(self) -> None:
        self.first = self.start
        super().activate_past_recording()


class AdoptedCache(DynamicCache, KVCache):
    """A DynamicCache that has become a KVCache, as long as all its layers are ours."""

    __repr__ = Cache.__repr__

    def __reduce_ex__(self, protocol: int) -> tuple:
        state = {name: value for name, value in vars(self).items() if name not in OF_COUNTERS}
        return DynamicCache, (), state

    @property
    def is_intact(self) -> bool:
        """Whether steps can run: all layers are ours still, with their methods, and have the same tokens."""
        layers = self.layers
        return (
            bool(layers)
            and all(isinstance(layer, AdoptedLayer) for layer in layers)
            and len({layer.capacity for layer in layers}) == 1
            and self.is_even
            and not _is_replaced(self, *layers)
        )

    @property
    def is_even(self) -> bool:
        sliding = [layer for layer in self.layers if isinstance(layer, AdoptedWindowLayer)]
        same = not sliding or len({layer.kept for layer in sliding}) == len({layer.sliding_window for layer in sliding})
        return same and KVCache.is_even.fget(self)

    def asked_of(self) -> list[Entry]:
        updates = [(kind, "update", kind.update) for kind in _KINDS]
        return updates + [entry for kind in _KINDS for entry in asked_of_origin(kind.update)]


_ADOPTED = {kind.theirs: kind for kind in (AdoptedLayer, AdoptedWindowLayer)}
_METHODS = {name for kind in (AdoptedCache, AdoptedWindowLayer) for name in dir(kind) if callable(getattr(kind, name))}


def new_cache(config: Any, parts: Description, batch: int, tokens: int) -> "AdoptedCache":
    """The DynamicCache that a model makes for a prompt of so many tokens, without them yet. Raises NoStep."""
    cache = DynamicCache(config=config)
    check_dynamic(cache, parts, batch, recorded=True)
    if not cache.layers:
        raise NoStep("the layers of the cache are not known")
    if any(tokens > (getattr(layer, "sliding_window", None) or tokens) for layer in cache.layers):
        raise NoStep("the prompt is longer than what a sliding window keeps")
    for layer, part in zip(cache.layers, parts.layers, strict=True):
        attention = part.attention
        none = parts.weight.new_empty(batch, attention.kv_heads, 0, attention.head_dim)
        layer.lazy_initialization(none, none)
        layer.keys = layer.values = none
    _adopt(cache, 0, room_for(tokens, batch * parts.token_bytes))
    return cache


def become_ours(cache: DynamicCache, parts: Description, batch: int) -> None:
    """Turn a DynamicCache with tokens into a KVCache that grows, in place: it stays the same object.

    Raises NoStep where there is no memory for a layer; it is what it was then.
    """
    tokens = int(cache.get_seq_length())
    _give_back(cache)
    _adopt(cache, tokens, room_for(tokens, batch * parts.token_bytes))


def check_kinds(cache: DynamicCache, kinds: list[type]) -> None:
    """Raise NoStep unless these are the kinds of the layers that an empty cache has, or will get."""
    if ([type(layer) for layer in cache.layers] or [DynamicLayer] * len(kinds)) != kinds:
        raise NoStep("the cache given keeps other tokens than the model's own")


def fill(cache: DynamicCache, made: "AdoptedCache") -> None:
    """Let an empty cache be `made`, which nobody else has: it and its layers stay the same objects."""
    check_kinds(cache, [layer.theirs for layer in made.layers])
    for layer, other in zip(cache.layers, made.layers, strict=False):
        vars(layer).clear()
        vars(layer).update(vars(other))
        layer.__class__ = type(other)
    cache.layers += made.layers[len(cache.layers) :]
    vars(cache).update({name: value for name, value in vars(made).items() if name != "layers"})
    cache.__class__ = AdoptedCache


def _adopt(cache: DynamicCache, tokens: int, capacity: int) -> None:
    try:
        for layer in cache.layers:
            _ADOPTED[type(layer)].adopt(layer, tokens, capacity, len(cache.layers))
    except torch.OutOfMemoryError:
        _give_back(cache)
        raise NoStep("there is no memory to copy the cache") from None
    cache.counters = cache.leftpads = None
    cache.__class__ = AdoptedCache
    cache._forget_counters()


def _give_back(cache: DynamicCache) -> None:
    for layer in cache.layers:
        if isinstance(layer, AdoptedLayer):
            layer.give_back()
