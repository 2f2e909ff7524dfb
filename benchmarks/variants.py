"""The same model as it is, patched by llmkernels, and patched by Liger-Kernel: one context manager each.

Each yields (forward, facts): what to call, and what the rows of this provider say beside their times. All work on one
instance, one after the other, and each leaves the model as it found it, which `assert_untouched` checks.
"""

import sys
from contextlib import contextmanager
from types import ModuleType

from torch import nn


@contextmanager
def eager(model: nn.Module):
    assert_untouched(model)
    yield model, {}


@contextmanager
def llmkernels(model: nn.Module, training: bool = False):
    with patched(model, training=training) as handle:
        yield model, {f"patched_{row.kind}": len(row.patched) for row in handle.report().rows.values()}


@contextmanager
def llmkernels_fp8(model: nn.Module):
    """Prompts in FP8, of a GPU that has such products."""
    if model.device.type != "cuda":
        raise RuntimeError(f"forwards of prompts run by the modules on a {model.device.type}")
    with patched(model, fp8=True) as handle:
        if (reason := handle.report().decode[0].fp8.reason) is not None:
            raise RuntimeError(f"prompts not in FP8: {reason}")
        dtypes = {"dtype": "float8_e4m3fn", "model_dtype": str(model.dtype).removeprefix("torch.")}
        yield model, {"approximate": True, **dtypes}


@contextmanager
def patched(model: nn.Module, **options):
    import llmkernels

    handle = llmkernels.patch(model, **options)
    try:
        yield handle
    finally:
        handle.unpatch()
    assert_untouched(model)


@contextmanager
def liger(model: nn.Module, training: bool = False):
    """Liger's own patch of an instance, its loss in training alone. It also writes into the model's module: undone."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    source = source_module(model)
    global_names = dict(vars(source))
    attributes = {module: dict(vars(module)) for module in model.modules()}
    try:
        _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=training)
        changed = [module for module in model.modules() if "forward" in vars(module)]
        swapped = [name for name, value in vars(source).items() if global_names.get(name) is not value]
        if not changed or "apply_rotary_pos_emb" not in swapped:
            raise RuntimeError(f"Liger patched {len(changed)} modules and the names {swapped}")
        yield model, {"patched_modules": len(changed)}
    finally:
        vars(source).update(global_names)
        for module, before in attributes.items():
            vars(module).clear()
            vars(module).update(before)
    assert_untouched(model)


def source_module(model: nn.Module) -> ModuleType:
    return sys.modules[type(model).__module__]


def assert_untouched(model: nn.Module) -> None:
    """That 'eager' is nobody else: no forward on an instance, no class or rope of another provider."""
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise RuntimeError(f"{name} still has a forward of another provider")
        package = type(module).__module__.partition(".")[0]
        if package in ("llmkernels", "liger_kernel"):
            raise RuntimeError(f"{name} is still a {type(module).__name__} of {package}")
    rotate = getattr(source_module(model), "apply_rotary_pos_emb", None)
    if rotate is not None and rotate.__module__.partition(".")[0] in ("llmkernels", "liger_kernel"):
        raise RuntimeError(f"apply_rotary_pos_emb is still that of {rotate.__module__}")


VARIANTS = {"eager": eager, "llmkernels": llmkernels, "liger": liger}
FP8 = "llmkernels_fp8"
OF_PREFILL = VARIANTS | {FP8: llmkernels_fp8}
