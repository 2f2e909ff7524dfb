"""Patching a live Hugging Face model.

`patch(model)` makes the RMSNorm, rotary embedding, gated MLP and residual adds of a transformers model run on this
package's ops, on that instance only: modules change their class to a subclass of it, and nothing global is written.
`patch` returns a `PatchHandle` that reports what runs and undoes it; `unpatch(model)` undoes it where there is no
handle, on a deep copy or a loaded pickle.

    families.py  which transformers classes are known, one line per family
    layout.py    whether such a class computes what its replacement computes
    layers.py    the replacements
    patch.py     patch, unpatch, PatchHandle
    report.py    what patch found and did

Importing this package does not import transformers.
"""

from .patch import PatchHandle, patch, unpatch

__all__ = ["PatchHandle", "patch", "unpatch"]
