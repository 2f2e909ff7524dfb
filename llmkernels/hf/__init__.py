"""Patching a live Hugging Face model, and generating with it.

`patch(model)` makes the norms, rotary embedding, MLPs and residual adds of a transformers model run on this package's
ops, on that instance only: modules change their class to a subclass of it, and nothing global is written.
`patch` returns a `PatchHandle` that reports what runs and undoes it; `unpatch(model)` undoes it where there is no
handle, on a deep copy or a loaded pickle.

    families.py  what is known by name, and the options of what classes compute
    layout.py    which kind a class is of, and what it computes: found out by running it
    source.py    copies of a forward with an op in it
    layers.py    the replacements
    patch.py     patch, unpatch, PatchHandle
    report.py    what patch found and did
    packing.py   weights that are read together, in one storage
    cache.py     a KV cache of fixed buffers, as transformers takes it; paged.py, one of pages
    adopt.py     transformers' own DynamicCache around a decode step
    cache_name.py  what transformers calls the cache
    trunk.py     what the decode step reads of a model, or why it can not run; trust.py, whether a module may be read
    decode.py    the decode step: one token for every sequence
    loop.py      the loop behind model.generate(); generate.py, our own; reading.py, what they share

Importing this package does not import transformers; using `KVCache` does.
"""

from typing import TYPE_CHECKING

from .decode import release
from .generate import generate
from .paged import OutOfPages, PagedKVCache
from .patch import PatchHandle, patch, unpatch

__all__ = ["KVCache", "OutOfPages", "PagedKVCache", "PatchHandle", "generate", "patch", "release", "unpatch"]


if TYPE_CHECKING:
    from .cache import KVCache
else:

    def __getattr__(name: str):
        if name == "KVCache":
            from .cache import KVCache

            return KVCache
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
