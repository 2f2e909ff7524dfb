"""Whether a step can run on a cache."""

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import NoStep
from ..model.description import Description
from .adopted import AdoptedCache, check_dynamic, check_kinds, check_tensor
from .kv_cache import KVCache


def check_cache(cache: Any, parts: Description, batch: int) -> None:
    """Raise NoStep unless a KVCache fits the model."""
    if len(cache.layers) != len(parts.layers):
        raise NoStep(f"the cache has {len(cache.layers)} layers")
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        attention = layer.attention
        if buffers.is_sliding and buffers.sliding_window != attention.window_left + 1:
            raise NoStep("the cache has another sliding window than the model")
        if buffers.is_initialized:
            expected = (batch, buffers.rows, attention.kv_heads, attention.head_dim)
            for buffer in (buffers.k, buffers.v):
                check_tensor(buffer, expected, parts.weight)


def check_empty(cache: Any, parts: Description, batch: int) -> None:
    """Raise NoStep unless an empty cache has layers of the kinds that the model's own has, or will get them."""
    if type(cache) is not DynamicCache:
        raise NoStep(f"the cache given is an empty {type(cache).__name__}")
    check_dynamic(cache, parts, batch)
    windows = [layer.attention.window_left for layer in parts.layers]
    check_kinds(cache, [DynamicLayer if window < 0 else DynamicSlidingWindowLayer for window in windows])


def is_ours(cache: Any) -> bool:
    """Whether a step runs on this cache as it is."""
    return is_kv_cache(cache) or (type(cache) is AdoptedCache and cache.is_intact)


def is_kv_cache(cache: Any) -> bool:
    """Whether a cache was made as one of ours."""
    return type(cache) is KVCache


def may_become_ours(cache: Any) -> bool:
    """Whether a cache is one of ours, or of the kind that becomes one."""
    return type(cache) in (KVCache, AdoptedCache, DynamicCache)
