"""The forwards that replace transformers' own, and the subclasses that carry them.

A patched module has its class changed to a subclass of it that differs in `forward` only. So isinstance, parameters,
state dict, submodules, hooks, `copy.deepcopy` and attribute access stay what they were, and changing the class back
is all there is to undo. Submodules are always called, never read through: a Linear with a LoRA adapter, a hook or a
collective works. If the original's forward is replaced later, that one runs.

Another thread may patch or unpatch a module while its forward runs. So a forward finds what it needs in its closure,
not in the module's class.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import nn

from llmkernels.ops import add_layer_norm, add_rms_norm

from ..classes.layout import apply_norm, kind_of, mlp_of, norm_of, rotate, rotation_name, rotation_of
from ..classes.options import FusedNormNames, MLPNames, NormOptions, Rotation, is_lora
from ..classes.origin import Name, asked_of_class, check_origin, names_of
from ..classes.source import bind_global, fuse_adds
from ..errors import UnknownLayout
from . import lora
from .activations import op_name, unit_of
from .replaced import (
    WITHOUT,
    Patched,
    count,
    has_kernel,
    is_current_for,
    own_member,
    runs_only_forward,
    stepping_aside,
    subclass,
)


class FusedNorm(Patched):
    """A norm that its decoder layer fuses with the add in front of it, by `add(norm, x, residual)`, a static method."""

    options: NormOptions
    add: Callable


def _norm_members(original: Callable, options: NormOptions) -> dict[str, Callable]:
    op, add_op = options.kind, f"add_{options.kind}"

    def tensors(norm: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return norm.weight if options.has_weight else None, norm.bias if options.has_bias else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight, bias = tensors(self)
        if not _has_norm_kernel(op, hidden_states, weight, bias):
            count(self, WITHOUT)
            return original(self, hidden_states)
        count(self, op)
        return apply_norm(options, hidden_states, weight, bias, getattr(self, options.eps))

    def add(norm, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The norm of the sum, and the sum; None where the op would compute them otherwise."""
        (weight, bias), eps = tensors(norm), getattr(norm, options.eps)
        if not (_are_of(residual.dtype, hidden_states, weight, bias) and _has_norm_kernel(op, residual, weight, bias)):
            return None
        count(norm, add_op)
        if op == "layer_norm":
            return add_layer_norm(hidden_states, residual, weight, bias, eps, weight_offset=options.weight_offset)
        numbers = {"weight_offset": options.weight_offset, "cast_before_weight": options.cast_before_weight}
        return add_rms_norm(hidden_states, residual, weight, eps, **numbers)

    return {"forward": forward, "add": staticmethod(add)}


def _are_of(dtype: torch.dtype, *tensors: torch.Tensor | None) -> bool:
    return all(tensor is None or tensor.dtype == dtype for tensor in tensors)


def _has_norm_kernel(op: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether the op computes what PyTorch does: its layer_norm takes no two dtypes on a GPU, and autocast runs it in
    float32."""
    if op == "layer_norm" and (torch.is_autocast_enabled(x.device.type) or not _are_of(x.dtype, weight, bias)):
        return False
    return has_kernel(x)


def _mlp_forward(names: MLPNames) -> Callable:
    """The forward of an MLP whose activation, and the product with it where it is gated, are one op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Looked up per call, since both a hook on the activation and another activation may come after patch().
        act_fn, down = getattr(self, names.act), getattr(self, names.down)
        unit = unit_of(act_fn, gated=names.gate is not None)
        if unit is None or not runs_only_forward(act_fn) or not has_kernel(x):
            count(self, WITHOUT)
            unit = _gated(act_fn) if names.gate else act_fn
        else:
            count(self, op_name(unit))
        if names.gate is None:
            hidden = unit(getattr(self, names.up)(x))
        elif names.up is None:
            hidden = unit(*getattr(self, names.gate)(x).chunk(2, dim=-1))
        else:
            hidden = unit(getattr(self, names.gate)(x), getattr(self, names.up)(x))
        hidden = down(hidden)
        if names.dropout is not None:
            hidden = nn.functional.dropout(hidden, p=getattr(self, names.dropout), training=self.training)
        return hidden if names.after is None else getattr(self, names.after)(hidden)

    return forward


def _gated(activation: Callable) -> Callable:
    return lambda gate, up: activation(gate) * up


def _add_norm(
    layer: nn.Module, norm: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(residual + hidden_states), and the sum.

    The add at the end of a layer is neither deferred to the next layer nor done in place: hooks see the layer's real
    output, autograd its input.
    """
    cls = fused_class(norm)  # checked per call: the norm may get a hook or be replaced after patch()
    fused = None if cls is None else cls.add(norm, hidden_states, residual)
    if fused is not None:
        count(layer, f"add_{cls.options.kind}")
        return fused
    why_not = (
        "the norm has hooks or was replaced" if cls is None else "no kernel for the dtypes of the add and the norm"
    )
    count(layer, WITHOUT, why_not)
    residual = residual + hidden_states
    return norm(residual), residual


def rotation_by_kernel(original: Callable, options: Rotation) -> Callable:
    """What a function of transformers that rotates q and k does, by our op where it has a kernel."""

    def rotation(module, q, k, cos, sin, unsqueeze_dim=1):
        known = (q.dim(), cos.dim()) == (4, 3) and unsqueeze_dim in (1, 2)
        # Without position_ids some models make tables of all tokens for the last one, and broadcast.
        known = known and cos.shape[1] == q.shape[3 - unsqueeze_dim] and options.takes(cos.shape[2], q.shape[3])
        if not has_kernel(q) or not known:
            count(module, WITHOUT)
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        count(module, "rope")
        return rotate(options, q, k, cos, sin, unsqueeze_dim)

    return rotation


def fused_class(norm: nn.Module) -> type[FusedNorm] | None:
    """The class with the function for norm(x + residual), or None where the norm itself has to be called."""
    cls = type(norm)
    fuses = issubclass(cls, FusedNorm) and cls.forward is cls.made and cls.is_current() and runs_only_forward(norm)
    return cls if fuses and own_member(norm, cls.asked) is None else None


def patched_class(cls: type[nn.Module], only_fused: bool = False) -> type[nn.Module]:
    """The patched subclass of a layer's class. `only_fused`: of a norm, whose own forward stays.

    The same one every time, so that compiled graphs of a model stay valid when it is patched again.
    Raises UnknownLayout when cls does not compute what the replacement does.
    """
    # The key has the functions that it is made from, too: they may have been replaced since the last call.
    if is_lora(cls):
        return _lora_class(cls, cls.forward)
    return _patched_class(cls, cls.forward, _rotation_calls(cls.forward), only_fused)


def _rotation_calls(forward: Callable) -> tuple[Name, ...]:
    """The function by which a forward rotates, if it does, and what that calls."""
    if (name := rotation_name(forward)) is None:
        return ()
    scope = inspect.unwrap(forward).__globals__
    return (scope.get, name, scope[name]), *names_of(scope[name])


@functools.cache
def _patched_class(cls, forward, rotation, only_fused):
    kind = kind_of(cls)
    base, members, calls = Patched, {}, rotation  # those in whose place the replacement computes
    if kind in ("rms_norm", "layer_norm"):
        base = FusedNorm
        options, calls = norm_of(cls), names_of(forward, cls)
        members = _norm_members(forward, options)
        made = members["forward"]
    elif kind == "rope":
        made, options = _rotating_forward(forward)
    elif kind in ("gated_mlp", "mlp"):
        options, calls = mlp_of(forward), names_of(forward, cls)
        made = _mlp_forward(options)
    elif kind == "add_rms_norm":
        check_origin(forward)
        made, norms = fuse_adds(forward, _add_norm)
        options = FusedNormNames(norms)
    else:
        raise UnknownLayout(f"{cls.__name__} is of no known kind")
    is_current, asked = is_current_for(cls, forward, calls), asked_of_class(cls) if calls else frozenset()
    if not only_fused:
        made = stepping_aside(cls, is_current, made, kind not in ("rope", "add_rms_norm"), asked)
    else:
        made = forward
    # transformers, accelerate and PEFT look at __name__; __module__ says the truth about where forward is from.
    members |= {"forward": made, "is_current": staticmethod(is_current), "options": options, "asked": asked}
    members |= {"__module__": __name__, "__qualname__": cls.__name__}
    return subclass(cls, (base,), (patched_class, only_fused), **members)


def _rotating_forward(forward: Callable) -> tuple[Callable, Rotation]:
    check_origin(forward)
    name = rotation_name(forward)
    if name is None:
        raise UnknownLayout("its forward does not call a function that rotates directly")
    rotation = inspect.unwrap(forward).__globals__[name]
    options = rotation_of(name, rotation)
    return bind_global(forward, name, rotation_by_kernel(rotation, options)), options


@functools.cache
def _lora_class(cls, forward):
    is_current, by_op = is_current_for(cls, forward), lora.forward_by_op(forward)
    lora.check_forward(cls, by_op)
    made = stepping_aside(cls, is_current, functools.wraps(forward)(by_op))
    return subclass(cls, (Patched,), (patched_class,), forward=made, is_current=staticmethod(is_current))
