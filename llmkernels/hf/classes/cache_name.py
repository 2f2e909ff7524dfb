"""What transformers calls the cache: an argument of forwards, an input of generate() and a field of outputs, all alike.

Up to 5.23 it is `past_key_values`, from 5.24 on `cache`; there decorators of transformers rename the old one.
"""

import functools
import inspect
from collections.abc import Callable

from transformers import GenerationMixin

_NAMES = ("cache", "past_key_values")
_OLD_NAME = "layer_past"  # of layers of older families


@functools.cache
def cache_name() -> str | None:
    """The name that the installed transformers uses. None: a name that is not known here."""
    return cache_argument(GenerationMixin.prepare_inputs_for_generation)


def cache_argument(function: Callable) -> str | None:
    """What a function calls the cache, or None where it takes none under a known name."""
    parameters = inspect.signature(function).parameters
    return next((name for name in _NAMES if name in parameters), None)


def takes_cache(layer: Callable) -> bool:
    """Whether the forward of a layer takes a cache."""
    return cache_argument(layer) is not None or _OLD_NAME in inspect.signature(layer).parameters
