"""Whether a step can run on a cache."""

from typing import Any

from transformers import DynamicCache

from ..errors import NoStep
from ..model.description import Description
from .adopted import AdoptedCache
from .kv_cache import KVCache


def check_cache(cache: Any, parts: Description, batch: int) -> None:
    """Raise NoStep unless a KVCache fits the model."""
    if len(cache.layers) != len(parts.layers):
        raise NoStep(f"the cache has {len(cache.layers)} layers")
    dtype, device = parts.weight.dtype, parts.weight.device
    for layer, buffers in zip(parts.layers, cache.layers, strict=True):
        attention = layer.attention
        if buffers.is_sliding and buffers.sliding_window != attention.window_left + 1:
            raise NoStep("the cache has another sliding window than the model")
        if buffers.is_initialized:
            expected = (batch, buffers.rows, attention.kv_heads, attention.head_dim)
            for buffer in (buffers.k, buffers.v):
                if buffer.shape != expected or buffer.dtype != dtype or buffer.device != device:
                    raise NoStep("the cache was made for other keys and values")


def fits_cache(cache: Any, parts: Description, batch: int) -> bool:
    try:
        check_cache(cache, parts, batch)
    except NoStep:
        return False
    return True


def is_ours(cache: Any) -> bool:
    """Whether a step runs on this cache as it is."""
    return is_kv_cache(cache) or (type(cache) is AdoptedCache and cache.is_intact)


def is_kv_cache(cache: Any) -> bool:
    """Whether a cache was made as one of ours."""
    return type(cache) is KVCache


def may_become_ours(cache: Any) -> bool:
    """Whether a cache is one of ours, or of the kind that becomes one."""
    return type(cache) in (KVCache, AdoptedCache, DynamicCache)
