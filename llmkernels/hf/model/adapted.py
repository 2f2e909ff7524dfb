"""Linear layers of a model with low-rank adapters of PEFT's around them.

A layer of PEFT's stands in the place of the linear layer that the model's class makes, which is its `base_layer`: what
reads that one looks through it, and the step adds what the adapters add.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from .._private import _disable_current_modes
from ..classes.options import is_lora
from ..errors import Distrust, UnknownLayout
from ..modules import lora
from ..modules.replaced import Replaced
from .description import Adapter
from .trust import Inspection, ModuleSpec, module_spec


def is_adapted(module: nn.Module) -> bool:
    cls = type(module)
    return cls is not nn.Linear and is_lora(cls)


def base_of(module: nn.Module) -> nn.Module:
    """The layer that a module is, but for adapters."""
    return module._modules["base_layer"] if is_adapted(module) else module


def adapters_of(module: nn.Module) -> dict[str, lora.Adapter]:
    """Those that a module adds to its base, by name. Raises Distrust."""
    if not is_adapted(module):
        return {}
    try:
        return lora.added_by(module)
    except lora.NotPlain as reason:
        raise Distrust(module, f"{{}} has to be called: {reason}") from None


def added_to(modules: list[nn.Module], rows: list[int], columns: int) -> tuple[Adapter, ...]:
    """What the adapters of modules add to their products, which have so many rows and are one below the other. Raises
    Distrust where they have other shapes."""
    added, begin = [], 0
    for module, count in zip(modules, rows, strict=True):
        for adapter in adapters_of(module).values():
            a, b = (part._parameters["weight"] for part in (adapter.a, adapter.b))
            if (b.shape, a.shape) != ((count, len(a)), (len(a), columns)):
                raise Distrust(module, "the adapters of {} have other shapes than its weight")
            added.append(Adapter(a, b, begin, float(adapter.scaling)))
        begin += count
    return tuple(added)


def inspect(module: nn.Module, inspection: Inspection) -> nn.Module:
    """The base of a module whose adapters, if it has any, the step can add. Raises Distrust."""
    if not is_adapted(module):
        return module
    cls = type(module)
    try:
        spec = _spec(cls.original if issubclass(cls, Replaced) else cls)
    except UnknownLayout as reason:
        raise Distrust(module, f"{{}}: {reason}") from None
    inspection.module(module, spec)
    for adapter in adapters_of(module).values():
        factors = adapter.a._parameters["weight"], adapter.b._parameters["weight"]
        for factor in factors:
            if factor.dtype not in (inspection.dtype, torch.float32) or factor.device != inspection.device:
                raise Distrust(module, "the adapters of {} are of another dtype or device")
            if not factor.is_contiguous() or not factor.data_ptr():
                raise Distrust(module, "the adapters of {} have no ordinary memory")
        if factors[0].dtype != factors[1].dtype:
            raise Distrust(module, "the adapters of {} differ in dtype")
    return module._modules.get("base_layer")


def _spec(cls: type[nn.Module]) -> ModuleSpec:
    _check_forward(cls, cls.forward)
    return module_spec(cls, (), children=None)


@functools.cache
def _check_forward(cls: type[nn.Module], forward: Callable) -> None:
    """Raise UnknownLayout unless layers of a class compute their base's result and what their adapters add."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():  # no mode of the caller sees it
        lora.check_forward(cls, lora.forward_by_op(forward))
