"""LoRA layers of PEFT on `lora_linear` and `add_lora`: what patch(training=True) adds. Nothing of PEFT is imported."""

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmkernels.ops import add_lora, lora_linear

from .._private import _has_any_global_hook
from ..classes.origin import check_origin
from ..errors import Reason, UnknownLayout, reason_of
from .replaced import WITHOUT, count, has_kernel, has_no_hooks

OP = "lora_linear"
# What `added_by` reads of a layer, beside the parts of its active adapters.
READ = (
    "_disable_adapters",
    "merged_adapters",
    "cast_input_dtype_enabled",
    "_active_adapter",
    "scaling",
    "lora_variant",
)
PARTS = ("lora_A", "lora_B", "lora_dropout")


class Adapter(NamedTuple):
    a: nn.Linear
    b: nn.Linear
    dropout: nn.Module
    scaling: float


class NotPlain(Reason):
    """Why PEFT's own forward has to run."""


def forward_by_op(original: Callable) -> Callable:
    """The forward of PEFT's layer, with the adapters' products by our op.

    The adapter of a base that is a plain linear layer runs in one op with it; any other base is called. Of several
    active adapters each rounds the sum to the base's dtype, while PEFT rounds once.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # which fuses PEFT's element-wise operations itself
            return original(self, x, *args, **kwargs)
        try:
            if args or kwargs or type(x) not in (Tensor, nn.Parameter) or not has_kernel(x):
                raise NotPlain("it is called with other arguments than a tensor")
            adapters = _active_adapters(self)
        except NotPlain:
            count(self, WITHOUT)
            return original(self, x, *args, **kwargs)
        count(self, OP)
        base, result = self._modules["base_layer"], None
        for adapter in adapters:
            a, b = adapter.a._parameters["weight"], adapter.b._parameters["weight"]
            dropped, factor = _dropped(x, adapter.dropout, a.dtype)
            scaling = adapter.scaling * factor
            if result is None and dropped is x and _is_plain_linear(base):
                weights = base._parameters
                result = lora_linear(x, weights["weight"], a, b, weights["bias"], scaling=scaling)
            else:
                result = base(x) if result is None else result
                result = add_lora(result, dropped, a, b, scaling=scaling)
        return result

    return forward


def added_by(layer: nn.Module) -> dict[str, Adapter]:
    """The adapters that a layer adds to its base, by name: none where they are merged into it, or disabled. Raises
    NotPlain where it does something else."""
    disabled, merged, adapters = _read(layer)
    if disabled and merged:
        raise NotPlain("its merged adapters are disabled: a call takes them out of the weight")
    for adapter in adapters.values():
        if adapter.dropout.training and type(adapter.dropout) is nn.Dropout and adapter.dropout.p > 0:
            raise NotPlain("its dropout draws random numbers")
    return adapters


def why_not(layer: nn.Module) -> str | None:
    """Why a layer runs PEFT's own forward for now, or None."""
    return reason_of(_active_adapters, layer)


def _active_adapters(layer: nn.Module) -> list[Adapter]:
    """The adapters that a layer adds to its base. Raises NotPlain where it does something else."""
    if _has_any_global_hook():
        raise NotPlain("its lora_A and lora_B have to be called: there are hooks on all modules")
    disabled, merged, adapters = _read(layer)
    if disabled or merged:
        raise NotPlain(f"its adapters are {'disabled' if disabled else 'merged'}")
    if not adapters:
        raise NotPlain("none of its adapters is active")
    return [*adapters.values()]


def _read(layer: nn.Module) -> tuple[bool, list[str], dict[str, Adapter]]:
    """Whether the adapters of a layer are disabled, which are merged, and the active ones, if neither is so."""
    members = layer.__dict__
    try:
        disabled, merged = members["_disable_adapters"], members["merged_adapters"]
        if disabled or merged:
            return disabled, merged, {}
        if not members["cast_input_dtype_enabled"]:
            raise NotPlain("it was told not to cast its input")
        modules, active = members["_modules"], members["_active_adapter"]
        all_a, names = modules["lora_A"]._modules, (active,) if isinstance(active, str) else active
        return disabled, merged, {name: _adapter(members, modules, name) for name in names if name in all_a}
    except KeyError as missing:
        raise NotPlain(f"it is of an unknown layout, without {missing}") from None


def _adapter(members: dict, modules: dict, name: str) -> Adapter:
    if name in members["lora_variant"]:
        raise NotPlain(f"it has another kind of adapter, {type(members['lora_variant'][name]).__name__}")
    a, b = modules["lora_A"]._modules[name], modules["lora_B"]._modules[name]
    dropout = modules["lora_dropout"]._modules[name]
    if not (_is_plain_linear(a) and _is_plain_linear(b)):
        raise NotPlain("its lora_A and lora_B have to be called: they are no plain linear layers, or have hooks")
    if a._parameters["bias"] is not None or b._parameters["bias"] is not None:
        raise NotPlain("its adapter has a bias")
    if type(dropout) not in (nn.Identity, nn.Dropout) or not has_no_hooks(dropout):
        raise NotPlain("its dropout has to be called: it is another module, or has hooks")
    scaling = members["scaling"][name]
    if type(scaling) is not float and not isinstance(scaling, Real):
        raise NotPlain(f"its scaling is a {type(scaling).__name__}, not a number")
    return Adapter(a, b, dropout, scaling)


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether module(x) is the linear function of two plain parameters, and nobody has to see that it is called; but
    for hooks on all modules."""
    if type(module) is not nn.Linear or not has_no_hooks(module):
        return False
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    return type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter)


def _dropped(x: Tensor, dropout: nn.Module, dtype: torch.dtype) -> tuple[Tensor, float]:
    """What stands for dropout(x) in this dtype: a tensor, and a factor."""
    p = dropout.p if dropout.training and type(dropout) is nn.Dropout else 0.0
    if p == 0:
        return x, 1.0
    if x.is_cuda and x.element_size() == 2 and p < 1:
        # 16 bits hold what is left of x, but not that divided by 1 - p.
        return x * torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p), 1 / (1 - p)
    return dropout(x.to(dtype)), 1.0


def check_forward(cls: type, forward: Callable) -> None:
    """Raise UnknownLayout unless the forward of cls gives the same as `forward` for a few numbers."""
    check_origin(cls.forward, ("peft",))
    x = torch.linspace(-1.5, 2.5, 24, device="cpu").view(4, 6)
    for dtype in (torch.float32, torch.bfloat16):
        try:
            layer = _sample(cls, dtype)
            found, expected = cls.forward(layer, x.to(dtype)), forward(layer, x.to(dtype))
        except Exception as error:
            raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error
        if found.dtype != dtype or not torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5):
            raise UnknownLayout("its forward computes something else than the base's result plus low-rank adapters'")


def _sample(cls: type, dtype: torch.dtype) -> nn.Module:
    """A layer with two active adapters and one that is not, without a call of its constructor or random numbers."""

    def linear(columns: int, rows: int, to: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
        made = nn.Linear(columns, rows, bias=False, device="meta")
        values = torch.linspace(-1, to, rows * columns, dtype=dtype, device="cpu")
        made.weight = nn.Parameter(values.view(rows, columns), requires_grad=False)
        return made

    names = ("first", "second", "third")
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.base_layer = linear(6, 5, 0.7, dtype)
    layer.lora_A = nn.ModuleDict({name: linear(6, 2, 0.5 + i) for i, name in enumerate(names)})
    layer.lora_B = nn.ModuleDict({name: linear(2, 5, 0.3 + i) for i, name in enumerate(names)})
    layer.lora_dropout = nn.ModuleDict({name: nn.Identity() for name in names})
    layer.scaling = {name: 0.5 + i for i, name in enumerate(names)}
    layer.lora_variant, layer.merged_adapters, layer._disable_adapters = {}, [], False
    layer._active_adapter, layer.cast_input_dtype_enabled = ["first", "third", "unknown"], True
    return layer.eval()
