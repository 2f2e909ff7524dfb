"""The modules of a model that can be patched, why others can not, and why some run without a kernel."""

from collections.abc import Callable

from torch import nn

from ._private import _dispatch_has_computed_kernel_for_dispatch_key
from .callers.model_class import model_class
from .classes.layout import kind_of
from .classes.options import kind_by_name, known_base
from .errors import UnknownLayout, reason_of
from .model.trust import around, calls_only_its_class, is_of_accelerate, runs_made_forward
from .modules import lora
from .modules import loss as losses
from .modules.activations import op_name, unit_of
from .modules.layers import fused_class, patched_class
from .modules.replaced import Patched, has_kernel, own_member, runs_only_forward


def kinds_in(model: nn.Module) -> dict[nn.Module, str]:
    """The kind of each module that has one. A LayerNorm of torch's has one where it is part of a decoder, or beside an
    attention that rotates q and k."""
    kinds = {module: kind for module in model.modules() if (kind := kind_of(type(module))) is not None}
    attentions = {module for module, kind in kinds.items() if kind == "rope"}
    layers = {module for module in model.modules() if not attentions.isdisjoint(module.children())}
    layers.update(module for module, kind in kinds.items() if kind == "add_rms_norm")
    parts: set[nn.Module] = set()
    for parent in model.modules():
        children = [*parent.children()]
        lists = [child for child in children if isinstance(child, nn.ModuleList)]
        if parent in attentions | layers or any(not layers.isdisjoint(each) for each in lists):
            parts.update(children)
    return {
        module: kind
        for module, kind in kinds.items()
        if (kind != "layer_norm" or module in parts or known_base(type(module)) is not nn.LayerNorm)
        and (kind != "mlp" or _may_be_mlp(module))
    }


def _may_be_mlp(module: nn.Module) -> bool:
    """Of a module that computes c(b(a(x))): not if b has weights, as in an activation of a norm of a convolution."""
    if kind_by_name(type(module)) == "gated_mlp":
        return True
    activation = _activation(module)
    return not isinstance(activation, nn.Module) or not [*activation.parameters(), *activation.buffers()]


def _options(module: nn.Module):
    """What a module that is or can be patched computes."""
    return (type(module) if isinstance(module, Patched) else patched_class(type(module))).options


def fused_norms(layer: nn.Module) -> list[nn.Module]:
    return [getattr(layer, name) for name in _options(layer).norms]


def decode_obstacle(module: nn.Module) -> str | None:
    """Why a module can not generate by our loop, or None."""
    if kind_of(type(module)) != "loss":
        return "no model of transformers' that generates text with a decoder alone"
    return reason_of(model_class, type(module), True, False)


def device_type(module: nn.Module) -> str:
    return next((parameter.device.type for parameter in module.parameters()), "cpu")


def op_of(module: nn.Module, kind: str) -> str:
    """The name of the function that a module of this kind runs; but for activations that of its op, too."""
    if kind in ("gated_mlp", "mlp"):
        return op_name(_unit(module, kind))
    if kind == "add_rms_norm":
        return f"add_{_options(fused_norms(module)[0]).kind}"
    return {"loss": losses.OP, "lora": lora.OP}.get(kind, kind)


def _activation(module: nn.Module) -> Callable:
    return getattr(module, _options(module).act)


def _unit(module: nn.Module, kind: str) -> Callable | None:
    return unit_of(_activation(module), gated=kind == "gated_mlp")


def obstacle(module: nn.Module, kind: str) -> str | None:
    """Why a module of a known kind cannot be patched, or None."""
    if has_own_forward(module) and not (kind == "loss" and is_around(module)):
        by_hooks = is_of_accelerate(module)
        by = "by hooks of accelerate: patch the model before those" if by_hooks else "on the instance"
        return f"it has a forward of its own, set {by}"
    try:
        cls = getattr(type(module), "original", type(module))
        made = model_class(cls, False, True) if kind == "loss" else patched_class(cls)
    except UnknownLayout as reason:
        return str(reason)
    if (name := own_member(module, made.asked)) is not None:
        return f"it has its own {name}"
    if kind in ("rms_norm", "layer_norm") and any(parameter.dim() != 1 for parameter in module.parameters()):
        return "its weight has more than one dimension"
    if kind in ("gated_mlp", "mlp") and _unit(module, kind) is None:
        return _no_kernel_for(_activation(module))
    if kind == "add_rms_norm":
        for name in _options(module).norms:
            if (norm := getattr(module, name, None)) is None:
                return f"it has no {name}"
            if (kind_of_norm := kind_of(type(norm))) not in ("rms_norm", "layer_norm"):
                return f"its {name} follows an add and is no norm with a kernel, but {type(norm).__name__}"
            if reason := obstacle(norm, kind_of_norm):
                return f"{name}: {reason}"
    if kind == "lora":  # products of PyTorch's, on every device
        return None
    device = device_type(module)
    op = f"llmkernels::{ {'gated_mlp': 'glu', 'mlp': 'bias_act'}.get(kind) or op_of(module, kind) }"
    if device != "meta" and not _dispatch_has_computed_kernel_for_dispatch_key(op, device.upper()):
        return f"this build of llmkernels has no {op} for {device}"
    return None


def fallback(module: nn.Module, kind: str) -> str | None:
    """Why a patched module does without its kernel for now, or None."""
    weight = next(module.parameters(), None)
    if weight is not None and not has_kernel(weight):
        return f"no kernel for {weight.dtype} on {weight.device.type}"
    cls = type(module)
    if "forward" in vars(module) and not runs_made_forward(module):
        return "it has a forward of its own, set on the instance"
    if cls.forward is not cls.made or not cls.is_current():
        return "the forward of its class was replaced"
    if (name := own_member(module, cls.asked)) is not None:
        return f"it has its own {name}"
    if kind == "loss":
        return losses.why_not(module, cls.options, at_rest=True)
    if kind == "lora":
        return lora.why_not(module)
    if kind in ("gated_mlp", "mlp"):
        if _unit(module, kind) is None:
            return _no_kernel_for(_activation(module))
        if not runs_only_forward(_activation(module)):
            return "hooks on its activation have to see it"
    if kind == "add_rms_norm":
        linear = next((parameter for parameter in module.parameters() if parameter.dim() > 1), None)
        for name, norm in zip(_options(module).norms, fused_norms(module), strict=True):
            if fused_class(norm) is None:
                return f"{name} has hooks or was replaced"
            if linear is not None and any(parameter.dtype != linear.dtype for parameter in norm.parameters()):
                return f"{name} has another dtype"
    return None


def has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) and not calls_only_its_class(module)


def is_around(module: nn.Module) -> bool:
    """Whether the forward set on a module is what accelerate has put around its class's for mixed precision."""
    return around(module, type(module).forward) is not None


def _no_kernel_for(activation) -> str:
    return f"no kernel for its activation, {getattr(activation, '__name__', type(activation).__name__)}"
