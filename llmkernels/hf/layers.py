"""The forwards that replace transformers' own, and the subclasses that carry them.

A patched module has its class changed to a subclass of it that differs in `forward` only. So isinstance, parameters,
state dict, submodules, hooks, `copy.deepcopy` and attribute access stay what they were, and changing the class back
is all there is to undo. Submodules are always called, never read through: a Linear with a LoRA adapter, a hook or a
collective works. Where somebody has replaced the original's forward since, that one runs.

Another thread may patch or unpatch a module while its forward runs. So a forward finds what it needs in its closure,
never by way of the module's class.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from llmkernels.ops import add_layer_norm, add_rms_norm, bias_gelu, geglu, relu2, relu2_glu, swiglu

from .cache_name import cache_name
from .errors import UnknownLayout
from .families import MLP as MLPNames
from .families import Layer, Norm, Rotation, is_lora
from .layout import (
    apply_norm,
    check_origin,
    kind_of,
    mlp_of,
    norm_of,
    offset_weight,
    rotate,
    rotation_name,
    rotation_of,
    trace,
)
from .origin import Name, hold, names_of
from .source import bind_global, fuse_adds, with_renamings


class Replaced:
    """Base of every class made here. `original` is the class it was made from."""

    original: type[nn.Module]

    def __reduce_ex__(self, protocol):
        # The class is made at run time, so a pickle names the one it was made from, and loading makes it again.
        _, _, state, *rest = super().__reduce_ex__(max(protocol, 2))
        if _RUNS in state:
            state = {key: value for key, value in state.items() if key != _RUNS}
        only_fused = isinstance(self, FusedNorm) and not isinstance(self, CalledNorm)
        options = only_fused, isinstance(self, Generating), isinstance(self, CausalLM)
        return (_unpickle, (self.original, *options), state, *rest)


class Patched(Replaced):
    """Base of every class with another forward.

    `made` is that forward, `options` what it computes, a dataclass of families.py; a LoRA layer has none.
    `is_current()` says whether it still stands for what the original computes: False where somebody has replaced a
    function that it was made from; `is_current.calls` are these functions, as names.
    """

    made: Callable
    options: Any
    is_current: Callable[[], bool]


class Generating(Replaced):
    """Base of every model class with another loop behind generate(), and a forward by the step: see forward.py."""


class CausalLM(Patched):
    """Base of every model class whose loss is computed without the logits: see loss.py."""


class LoRA(Patched):
    """Base of every LoRA layer of PEFT that runs on our ops: see lora.py."""


def _unpickle(original: type[nn.Module], only_fused: bool, generates: bool, loss: bool) -> nn.Module:
    try:
        is_model = generates or loss
        cls = model_class(original, generates, loss) if is_model else patched_class(original, only_fused)
    except UnknownLayout:  # another transformers than the one that wrote the pickle: what it computes is the same
        cls = original
    return cls.__new__(cls)


_RUNS = "_llmkernels_runs"  # the member in which a patched module counts


def count(module: nn.Module, op: str, reason: str | None = None) -> None:
    """Note that a module has run an op, or WITHOUT one for this reason. Inside of a compiled graph nobody counts."""
    if torch.compiler.is_compiling():
        return
    op = op if reason is None else f"{op}: {reason}"
    members = module.__dict__
    runs = members.get(_RUNS)
    if runs is None:
        runs = members.setdefault(_RUNS, {})
    runs[op] = runs.get(op, 0) + 1


def runs_of(module: nn.Module) -> dict[str, int]:
    """How often a patched module has run which op, or none, with the reason behind a colon where it gave one.

    Calls of several threads at the same time may count as one.
    """
    return dict(vars(module).get(_RUNS, {}))


def forget_runs(module: nn.Module) -> None:
    vars(module).pop(_RUNS, None)


WITHOUT = "without a kernel"


class FusedNorm(Patched):
    """A norm that its decoder layer fuses with the add in front of it, by `add(norm, x, residual)`, a static method."""

    options: Norm
    add: Callable


class CalledNorm(FusedNorm):
    """A norm that runs on a kernel where it is called, too."""


class RMSNorm(CalledNorm):
    pass


class LayerNorm(CalledNorm):
    pass


def _norm_members(original: Callable, options: Norm) -> dict[str, Callable]:
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
            return add_layer_norm(hidden_states, residual, offset_weight(options, weight), bias, eps)
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


class MLP(Patched):
    """An MLP whose activation, and the product with it where it is gated, are one op."""

    options: MLPNames


def _mlp_forward(names: MLPNames) -> Callable:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Looked up per call, since both a hook on the activation and another activation may come after patch().
        act_fn, down = getattr(self, names.act), getattr(self, names.down)
        unit = (gated_unit if names.gate else plain_unit)(act_fn)
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
        return hidden

    return forward


def _gated(activation: Callable) -> Callable:
    return lambda gate, up: activation(gate) * up


class Attention(Patched):
    """Its forward is the original's with `rotation_by_kernel` in the place of the function that rotates."""

    options: Rotation


class DecoderLayer(Patched):
    """Its forward is the original's with `_add_norm` in the place of each add and the norm behind it."""

    options: Layer


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
        if not has_kernel(q) or not known or cos.shape[1] != q.shape[3 - unsqueeze_dim]:
            count(module, WITHOUT)
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        count(module, "rope")
        return rotate(options, q, k, cos, sin, unsqueeze_dim)

    return rotation


def geglu_erf(gate, up):
    return geglu(gate, up, approximate="none")


def geglu_tanh(gate, up):
    return geglu(gate, up, approximate="tanh")


def gelu_erf(x):
    return bias_gelu(x, approximate="none")


def gelu_tanh(x):
    return bias_gelu(x, approximate="tanh")


# By name, as nothing of transformers is imported here: the functions for activation(gate) * up and activation(x).
_UNITS = {
    ("transformers.activations", "SiLUActivation"): (swiglu, None),
    ("torch.nn.modules.activation", "SiLU"): (swiglu, None),
    ("transformers.activations", "GELUActivation"): (geglu_erf, gelu_erf),
    ("transformers.activations", "GELUTanh"): (geglu_tanh, gelu_tanh),
    ("transformers.activations", "NewGELUActivation"): (geglu_tanh, gelu_tanh),
    ("transformers.activations", "ReLUSquaredActivation"): (relu2_glu, relu2),
}
_OP_NAMES = {geglu_erf: "geglu", geglu_tanh: "geglu", gelu_erf: "bias_gelu", gelu_tanh: "bias_gelu"}


def gated_unit(activation: Callable) -> Callable | None:
    """The function for activation(gate) * up, or None."""
    return _unit(activation)[0]


def plain_unit(activation: Callable) -> Callable | None:
    """The function for activation(x), or None."""
    return _unit(activation)[1]


def _unit(activation: Callable) -> tuple[Callable | None, Callable | None]:
    cls = type(activation)
    units = _UNITS.get((cls.__module__, cls.__name__))
    if units is None or not (torch.compiler.is_compiling() or _calls_the_same(cls)):
        return None, None
    return units


def _calls_the_same(cls: type) -> bool:
    """Whether the functions that an activation calls are those that it called when it was first seen."""
    return hold(_first_calls(cls, cls.forward))


@functools.cache
def _first_calls(cls: type, forward: Callable) -> tuple[Name, ...]:
    return names_of(forward, cls)


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the ops take such a tensor: on CUDA none takes float64, to which a model may move after patch()."""
    return not (x.dtype is torch.float64 and x.is_cuda)


def op_name(unit: Callable) -> str:
    return _OP_NAMES.get(unit, unit.__name__)


def runs_only_forward(module: nn.Module) -> bool:
    """Whether module(x) is the forward of its class and nothing else: no hooks, no forward of the instance."""
    return has_no_hooks(module) and not _has_any_global_hook()


def has_no_hooks(module: nn.Module) -> bool:
    """The same, but for hooks on all modules."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def fused_class(norm: nn.Module) -> type[FusedNorm] | None:
    """The class with the function for norm(x + residual), or None where somebody has to see that the norm is called."""
    cls = type(norm)
    fuses = issubclass(cls, FusedNorm) and cls.forward is cls.made and cls.is_current() and runs_only_forward(norm)
    return cls if fuses else None


def own_class(cls: type) -> type:
    """The class of transformers' or torch's that a class is, or derives from; never one made here."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("transformers", "torch") and "original" not in vars(base):
            return base
    return cls


def model_class(cls: type[nn.Module], generates: bool, loss: bool) -> type[nn.Module]:
    """The subclass of a transformers model class that generates by the decode step, has another loss, or both.

    Raises UnknownLayout when cls does not compute what the replacement does.
    """
    return _model_class(cls, cls.forward, generates, loss)


@functools.cache
def _model_class(cls, forward, generates, loss):
    # What it computes is what the original computes, so __module__ and the name under which transformers keeps facts
    # about it are the original's, too.
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members["original"] = cls
    bases: tuple[type, ...] = (cls,)
    if loss:
        members, bases = members | _loss_members(cls, forward), (CausalLM, *bases)
    if generates:
        members, bases = members | _loops(cls) | _step_members(cls, forward, members), (Generating, *bases)
    made = type(cls.__name__, bases, members)
    made.made = made.forward
    return made


def _loops(cls: type[nn.Module]) -> dict[str, Callable]:
    """`generate` takes its loop from the class by name, one for greedy search and sampling and others for the rest."""
    from .loop import LOOPS

    loops = {name: loop(getattr(cls, name)) for name, loop in LOOPS.items() if hasattr(cls, name)}
    if "_sample" not in loops or not hasattr(cls, "_prefill"):
        raise UnknownLayout("generate() of this transformers has no loop of a known name")
    if cache_name() is None:
        raise UnknownLayout("generate() of this transformers has no cache of a known name")
    return loops


def _loss_members(cls: type[nn.Module], forward: Callable) -> dict[str, Callable]:
    from . import loss

    options = loss.loss_of(forward)
    is_current = _is_current(cls, forward)
    made = with_renamings(forward, loss.forward_without_logits(forward, options))
    made = _stepping_aside(cls, is_current, made)
    return {"forward": made, "is_current": staticmethod(is_current), "options": options}


def _step_members(cls: type[nn.Module], forward: Callable, members: dict[str, Any]) -> dict[str, Callable]:
    from .forward import bound_arguments, by_step

    is_current = _is_current(cls, forward)
    inner = members.get("forward", forward)
    made = with_renamings(forward, by_step(inner, bound_arguments(forward)))
    made = _stepping_aside(cls, is_current, made)
    return {"forward": made, "is_current": staticmethod(is_current)}


def patched_class(cls: type[nn.Module], only_fused: bool = False) -> type[nn.Module]:
    """The patched subclass of a layer's class. `only_fused`: of a norm, whose own forward stays.

    The same one every time, so that compiled graphs of a model stay valid when it is patched again.
    Raises UnknownLayout when cls does not compute what the replacement does.
    """
    # Keyed by the functions it is made from too, which somebody may have replaced since the last call.
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
    members, calls = {}, rotation  # those in whose place the replacement computes
    if kind in ("rms_norm", "layer_norm"):
        options, calls = norm_of(cls), names_of(forward, cls)
        replacement = FusedNorm if only_fused else {"rms_norm": RMSNorm, "layer_norm": LayerNorm}[options.kind]
        members = _norm_members(forward, options)
        made = members["forward"]
    elif kind == "rope":
        replacement = Attention
        made, options = _rotating_forward(forward)
    elif kind in ("gated_mlp", "mlp"):
        replacement, options, calls = MLP, mlp_of(forward), names_of(forward, cls)
        made = _mlp_forward(options)
    elif kind == "add_rms_norm":
        check_origin(forward)
        replacement = DecoderLayer
        made, norms = fuse_adds(forward, _add_norm)
        options = Layer(norms, _traced(forward))
    else:
        raise UnknownLayout(f"{cls.__name__} is of no known kind")
    is_current = _is_current(cls, forward, calls)
    if not only_fused:
        made = _stepping_aside(cls, is_current, made, takes_one=kind not in ("rope", "add_rms_norm"))
    else:
        made = forward
    # transformers, accelerate and PEFT look at __name__; __module__ says the truth about where forward is from.
    members |= {"forward": made, "is_current": staticmethod(is_current), "options": options}
    members |= {"original": cls, "__module__": __name__, "__doc__": cls.__doc__}
    patched = type(cls.__name__, (replacement, cls), members)
    patched.made = patched.forward  # which a base may have wrapped, as transformers' layers do from 5.23
    return patched


def _rotating_forward(forward: Callable) -> tuple[Callable, Rotation]:
    check_origin(forward)
    name = rotation_name(forward)
    if name is None:
        raise UnknownLayout("its forward does not call a function that rotates directly")
    rotation = inspect.unwrap(forward).__globals__[name]
    options = rotation_of(name, rotation)
    return bind_global(forward, name, rotation_by_kernel(rotation, options), with_first=True), options


def _traced(forward: Callable) -> str | None:
    try:
        return trace(forward)
    except UnknownLayout:
        return None


@functools.cache
def _lora_class(cls, forward):
    from . import lora

    is_current, by_op = _is_current(cls, forward), lora.forward_by_op(forward)
    lora.check_forward(cls, by_op)
    made = _stepping_aside(cls, is_current, functools.wraps(forward)(by_op))
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"forward": made, "is_current": staticmethod(is_current), "original": cls}
    patched = type(cls.__name__, (LoRA, cls), members)
    patched.made = patched.forward
    return patched


def _is_current(cls: type[nn.Module], forward: Callable, calls: tuple[Name, ...] = ()) -> Callable[[], bool]:
    def is_current() -> bool:
        return cls.forward is forward and (torch.compiler.is_compiling() or hold(calls))

    is_current.calls = calls
    return is_current


def _stepping_aside(
    cls: type[nn.Module], is_current: Callable[[], bool], forward: Callable, takes_one: bool = False
) -> Callable:
    """`forward`, or where it is not current any more the forward of cls. `takes_one`: an argument of any name.

    It has the signature of cls's, and no `__wrapped__`, by which accelerate would find that one and leave ours out.
    """

    @functools.wraps(forward)
    def forward_or_original(self, *args, **kwargs):
        if not is_current():
            count(self, WITHOUT)
            return cls.forward(self, *args, **kwargs)
        if takes_one:
            return forward(self, *args, *kwargs.values())
        return forward(self, *args, **kwargs)

    forward_or_original.__signature__ = inspect.signature(forward)
    del forward_or_original.__wrapped__
    return forward_or_original
