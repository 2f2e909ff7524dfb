"""Decode steps for a caller with transformers' DynamicCache: a step needs a KVCache.

The tokens of the caller's cache are copied to a KVCache before the first step. After the last one the new tokens are
appended to the caller's cache by its own `update`, so that it holds the same as after transformers' loop.

Importing this module imports transformers.
"""

from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache import KVCache, KVCacheLayer, room_for
from .description import Trunk
from .trust import NoStep


def check_dynamic(cache: object, parts: Trunk, batch: int, recorded: bool = False) -> None:
    """Raise NoStep unless `cache` is a DynamicCache, empty or of this model and batch.

    `recorded`: layers with a window may have more tokens than it, which are there to be cropped.
    """
    if type(cache) is not DynamicCache:
        raise NoStep(f"the cache given is a {type(cache).__name__}")
    if cache.offloading or "update" in vars(cache):
        raise NoStep("the cache given does more than to hold keys and values")
    if not cache.layers and cache.layer_class_to_replicate is DynamicLayer:
        return
    if len(cache.layers) != len(parts.layers):
        raise NoStep(f"the cache has {len(cache.layers)} layers")
    tokens = int(cache.get_seq_length())  # assisted decoding makes a tensor of it
    for layer, part in zip(cache.layers, (layer.attention for layer in parts.layers), strict=True):
        held = tokens
        if type(layer) is DynamicSlidingWindowLayer:
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
        elif type(layer) is not DynamicLayer:
            raise NoStep(f"the cache has a {type(layer).__name__}")
        if layer.get_seq_length() != tokens:
            raise NoStep("the layers of the cache differ in length")
        expected = (batch, part.kv_heads, held, part.head_dim)
        for held_tensor in (layer.keys, layer.values) if tokens else ():
            _check_tensor(held_tensor, expected, parts.weight)


def _check_tensor(tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise NoStep("the cache was made for other keys and values")


def copy_in(ours: KVCache, theirs: DynamicCache) -> None:
    """Copy the tokens of `theirs` to `ours`, which is empty. Those that a sliding window has dropped are not needed."""
    tokens = int(theirs.get_seq_length())
    for ours_layer, layer in zip(ours.layers, theirs.layers if tokens else (), strict=False):
        _copy_layer(ours_layer, layer, tokens)


def _copy_layer(ours: KVCacheLayer, layer: DynamicLayer, tokens: int) -> None:
    if not ours.is_initialized:
        ours.lazy_initialization(layer.keys, layer.values)
    first = tokens - layer.keys.shape[2]
    for buffer, held in ((ours.k, layer.keys), (ours.v, layer.values)):
        buffer[:, first:tokens].copy_(held.transpose(1, 2))
    ours.length = tokens


@torch.no_grad()
def hand_back(ours: KVCache, theirs: DynamicCache, frees: bool) -> None:
    """Append to `theirs` the tokens of `ours` that it does not have. With `frees`, then free each layer of `ours`."""
    first = int(theirs.get_seq_length())
    sliding = theirs.is_sliding or [False] * len(ours.layers)
    for index, layer in enumerate(ours.layers):
        # A sliding window keeps a view of the tensor that update() makes: a short one if the last token is alone.
        cuts = [first, max(first, layer.length - 1), layer.length] if sliding[index] else [first, layer.length]
        for start, end in pairwise(cuts):
            if start < end:
                theirs.update(layer.keys[:, :, start:end], layer.values[:, :, start:end], index)
        if frees:
            layer.release()


class AdoptedCache(KVCache, DynamicCache):
    """A DynamicCache that has become a KVCache."""


def become_ours(cache: DynamicCache, parts: Trunk, batch: int) -> None:
    """Turn a DynamicCache with tokens into a KVCache that grows, in place: whoever has it has the same object.

    Raises NoStep where there is no memory for a layer; it is what it was then.
    """
    theirs, ours = cache.layers, []
    tokens = int(cache.get_seq_length())
    capacity = room_for(tokens, batch * parts.token_bytes)
    try:
        for layer in theirs:
            ours.append(KVCacheLayer(capacity, grows=True, layers=len(theirs)))
            _copy_layer(ours[-1], layer, tokens)
            layer.keys = layer.values = None
    except torch.OutOfMemoryError:
        for layer, new in zip(theirs, ours, strict=False):
            if layer.keys is None:
                held = slice(tokens - min(tokens, getattr(layer, "sliding_window", tokens + 1) - 1), tokens)
                layer.keys, layer.values = new.keys[:, :, held], new.values[:, :, held]
        raise NoStep("there is no memory to copy the cache") from None
    cache.layers = ours
    cache.counters = cache.cache_leftpad = None
    cache._counted = -1
    cache.__class__ = AdoptedCache
