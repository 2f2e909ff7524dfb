"""Fused CUDA and CPU kernels for large language models, as PyTorch ops and patched into live Hugging Face models.

- `rms_norm`, `add_rms_norm`, `layer_norm`, `add_layer_norm`, `rope`, `rms_norm_rope`, `glu` (`swiglu`, `geglu`,
  `relu2_glu`, `bias_swiglu`, `bias_geglu`), `bias_act` (`bias_gelu`, `relu2`), `softmax`, `log_softmax`,
  `cross_entropy`, `linear_cross_entropy`, `linear`, `rms_norm_linear`, `lora_linear`, `add_lora`, `gated_mlp`: ops with
  gradients; the most used as modules in `llmkernels.nn`
- `fp8_quantize`, `rms_norm_fp8_quantize`, `swiglu_fp8_quantize`, `fp8_linear`: FP8 for inference, without gradients;
  `nn.FP8Linear` quantizes a linear layer
- `int8_quantize`, `int8_linear`: a linear layer of a weight in int8, for few tokens; `nn.Int8Linear`
- `attention`, `attention_varlen`: over prompts, with gradients; `decode_attention`, `rope_kv_write`, `sample`: for
  decoding, without
- `patch(model)`: runs a Hugging Face model on these ops, in place; `unpatch(model)` restores it
- `generate(model, ids)`: generates tokens, on a GPU by a CUDA graph; `release(model)` frees what it keeps;
  `KVCache`, `PagedKVCache`
- `register_attention()`: `attention` as `attn_implementation="llmkernels"` of transformers
- `profile(model, ids)`: where the time of a model goes, unpatched and patched
- `explain("linear", (4, 3584), (4608, 3584))`: which kernel runs for such shapes on which GPU, or why cuBLAS does
- `autotune(model)`: measures on the GPU that is there which kernels its decode step should run
- `optim.AdamW`, `optim.Adam`: optimizers with one launch for a whole list of parameters; `optim.clip_grad_norm_`
- `python -m llmkernels generate` and `profile`: the same as commands; `python -m llmkernels info`: what is installed,
  and any faults
"""

import importlib
from typing import TYPE_CHECKING, Any

from llmkernels import _library

__version__ = "0.1.0"

# False only for `python -m llmkernels`, which reports what is wrong; any other import raises ImportError.
if _library.load():
    from llmkernels import nn, ops, optim
    from llmkernels._explain import explain
    from llmkernels._paged_cache import OutOfPages, PagedKVCache
    from llmkernels.ops import *  # noqa: F403, whose __all__ is a part of this one's

__all__ = [
    "KVCache",
    "OutOfPages",
    "PagedKVCache",
    "__version__",
    "autotune",
    "explain",
    "generate",
    "nn",
    "optim",
    "patch",
    "profile",
    "register_attention",
    "release",
    "unpatch",
]
if not _library.error:
    __all__ += ops.__all__

# What needs transformers, which is optional and takes seconds to import, and the module that has it.
_OF_TRANSFORMERS = {
    **dict.fromkeys(("hf", "KVCache", "generate", "patch", "register_attention", "release", "unpatch"), "hf"),
    **dict.fromkeys(("profiling", "profile"), "profiling"),
    "autotune": "_tune.autotune",
}

if TYPE_CHECKING:
    from llmkernels._tune.autotune import autotune
    from llmkernels.hf import KVCache, generate, register_attention, release
    from llmkernels.hf.patch import patch, unpatch  # of hf, mypy takes `patch` for the module
    from llmkernels.profiling import profile
else:  # hidden from type checkers, which would take every name for one of the package

    def __getattr__(name: str) -> Any:
        """What needs transformers, which is imported when the first of it is used: the one late import of the package.

        A module is set as an attribute by its import, and is not asked for again.
        """
        if name not in _OF_TRANSFORMERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{__name__}.{_OF_TRANSFORMERS[name]}")
        except ModuleNotFoundError as problem:
            if problem.name != "transformers":
                raise
            raise ModuleNotFoundError(
                f"llmkernels.{name} needs transformers, which is not installed: pip install 'llmkernels[hf]'",
                name="transformers",
            ) from None
        return globals().setdefault(name, getattr(module, name, module))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
