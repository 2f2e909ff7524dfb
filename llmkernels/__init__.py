"""Fused CUDA and CPU kernels for large language models, as PyTorch ops and patched into live Hugging Face models.

- `rms_norm`, `add_rms_norm`, `rope`, `swiglu`, `geglu`, `sample`: the ops, and `llmkernels.nn` with the same as modules
- `patch(model)`: the same inside a model that is there already
- `python -m llmkernels info`: what is installed, and what is wrong with it
"""

from llmkernels import _library

__version__ = "0.1.0"

# False only for `python -m llmkernels info`, which reports what stopped it; everybody else gets the ImportError.
if _library.load():
    from llmkernels import nn
    from llmkernels.hf import patch
    from llmkernels.ops import add_rms_norm, geglu, rms_norm, rope, sample, swiglu

__all__ = [
    "__version__",
    "add_rms_norm",
    "geglu",
    "nn",
    "patch",
    "rms_norm",
    "rope",
    "sample",
    "swiglu",
]
