"""A caller's empty DynamicCache, which a prompt fills in place of one that the model would make."""

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import NoStep
from ..model.description import Description
from .adopted import AdoptedCache, check_dynamic

_OTHER = "the cache given keeps other tokens than the model's own"


def _kinds(cache: DynamicCache, layers: int) -> list[type]:
    """Those of the layers that a cache has, or will get."""
    return [type(layer) for layer in cache.layers] or [DynamicLayer] * layers


def check_empty(cache: object, parts: Description, batch: int) -> None:
    """Raise NoStep unless an empty cache has layers of the kinds that the model's own has, or will get them."""
    if type(cache) is not DynamicCache:
        raise NoStep(f"the cache given is an empty {type(cache).__name__}")
    check_dynamic(cache, parts, batch)
    for kind, layer in zip(_kinds(cache, len(parts.layers)), parts.layers, strict=True):
        if kind is not (DynamicLayer if layer.attention.window_left < 0 else DynamicSlidingWindowLayer):
            raise NoStep(_OTHER)


def fill(cache: DynamicCache, made: AdoptedCache) -> None:
    """Let an empty cache be `made`, which nobody else has: it and its layers stay the same objects."""
    if _kinds(cache, len(made.layers)) != [layer.theirs for layer in made.layers]:
        raise NoStep(_OTHER)
    for layer, other in zip(cache.layers, made.layers, strict=False):
        vars(layer).clear()
        vars(layer).update(vars(other))
        layer.__class__ = type(other)
    cache.layers += made.layers[len(cache.layers) :]
    vars(cache).update({name: value for name, value in vars(made).items() if name != "layers"})
    cache.__class__ = AdoptedCache
