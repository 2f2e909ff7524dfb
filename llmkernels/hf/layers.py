"""The forwards that replace transformers' own, and the subclasses that carry them.

A patched module has its class changed to a subclass of it that differs in `forward` only. So isinstance, parameters,
state dict, submodules, hooks, `copy.deepcopy` and attribute access stay what they were, and changing the class back
is all there is to undo. Submodules are always called, never read through: a Linear with a LoRA adapter, a hook or a
collective works. Where somebody has replaced the original's forward since, that one runs.

Another thread may patch or unpatch a module while its forward runs. So a forward finds what it needs in its closure,
never by way of the module's class.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from llmkernels.ops import add_rms_norm, geglu, rms_norm, rope, swiglu

from .families import Family, find, is_lora
from .layout import UnknownLayout, bind_global, check_rms_norm, check_rope, check_symbolically


class Replaced:
    """Base of every class made here.

    `original` is the class it was made from, `family` the entry of FAMILIES, if it has one.
    """

    original: type[nn.Module]
    family: Family | None

    def __reduce_ex__(self, protocol):
        # The class is made at run time, so a pickle names the one it was made from, and loading makes it again.
        _, _, state, *rest = super().__reduce_ex__(max(protocol, 2))
        if _RUNS in state:
            state = {key: value for key, value in state.items() if key != _RUNS}
        only_fused = isinstance(self, FusedNorm) and not isinstance(self, RMSNorm)
        options = only_fused, isinstance(self, Generating), isinstance(self, CausalLM)
        return (_unpickle, (self.original, *options), state, *rest)


class Patched(Replaced):
    """Base of every class with another forward.

    `made` is that forward. `is_current()` says whether it still stands for what the original computes: False where
    somebody has replaced a function that it was made from.
    """

    made: Callable
    is_current: Callable[[], bool]


class Generating(Replaced):
    """Base of every model class with another loop behind generate()."""


class CausalLM(Patched):
    """Base of every model class whose loss is computed without the logits: see loss.py."""


class LoRA(Patched):
    """Base of every LoRA layer of PEFT that runs on our ops: see lora.py."""


def _unpickle(original: type[nn.Module], only_fused: bool, generates: bool, loss: bool) -> nn.Module:
    try:
        is_layer = not is_causal_lm(original)
        cls = patched_class(original, only_fused) if is_layer else model_class(original, generates, loss)
    except UnknownLayout:  # another transformers than the one that wrote the pickle: what it computes is the same
        cls = original
    return cls.__new__(cls)


_RUNS = "_llmkernels_runs"  # the member in which a patched module counts


def count(module: nn.Module, op: str) -> None:
    """Note that a module has run an op, for the report. Inside of a compiled graph nobody counts."""
    if torch.compiler.is_compiling():
        return
    members = module.__dict__
    runs = members.get(_RUNS)
    if runs is None:
        runs = members.setdefault(_RUNS, {})
    runs[op] = runs.get(op, 0) + 1


def runs_of(module: nn.Module) -> dict[str, int]:
    """How often a patched module has run which op. Calls of several threads at the same time may count as one."""
    return dict(vars(module).get(_RUNS, {}))


def forget_runs(module: nn.Module) -> None:
    vars(module).pop(_RUNS, None)


WITHOUT = "without a kernel"


class FusedNorm(Patched):
    """A norm that its decoder layer fuses with the add in front of it, by `add(norm, x, residual)`, a static method."""

    add: Callable


class RMSNorm(FusedNorm):
    """A norm that runs on a kernel where it is called, too."""


def _norm_members(original: Callable, family: Family) -> dict[str, Callable]:
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not has_kernel(hidden_states):
            count(self, WITHOUT)
            return original(self, hidden_states)
        count(self, "rms_norm")
        return rms_norm(
            hidden_states,
            self.weight,
            getattr(self, family.eps),
            weight_offset=family.weight_offset,
            cast_before_weight=family.cast_before_weight,
        )

    def add(norm, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum, and the sum."""
        count(norm, "add_rms_norm")
        return add_rms_norm(
            hidden_states,
            residual,
            norm.weight,
            getattr(norm, family.eps),
            weight_offset=family.weight_offset,
            cast_before_weight=family.cast_before_weight,
        )

    return {"forward": forward, "add": staticmethod(add)}


class MLP(Patched):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Looked up per call, since both a hook on the activation and another activation may come after patch().
        act_fn = self.act_fn
        glu = gated_unit(act_fn)
        if glu is None or not runs_only_forward(act_fn) or not has_kernel(x):
            count(self, WITHOUT)
            return self.down_proj(act_fn(self.gate_proj(x)) * self.up_proj(x))
        count(self, op_name(glu))
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x)))


class Attention(Patched):
    """Its forward is the original's with `rotation_by_kernel` of the module's `apply_rotary_pos_emb` in its place."""


class DecoderLayer(Patched):
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        norm = self.post_attention_layernorm
        # Checked per call: the norm may get a hook or be replaced after patch().
        add = fused_add(norm)
        # The op takes a weight of the same dtype only.
        if add is not None and has_kernel(hidden_states) and norm.weight.dtype == hidden_states.dtype == residual.dtype:
            count(self, "add_rms_norm")
            hidden_states, residual = add(norm, hidden_states, residual)
        else:
            count(self, WITHOUT)
            residual = residual + hidden_states
            hidden_states = norm(residual)
        hidden_states = self.mlp(hidden_states)
        # Neither deferred to the next layer nor in place: hooks see the layer's real output, autograd its input.
        return residual + hidden_states


def rotation_by_kernel(original: Callable) -> Callable:
    """What transformers' `apply_rotary_pos_emb` does, by our op where it has a kernel."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):  # unsqueeze_dim is the dim of the heads in q and k
        if not has_kernel(q):
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rope(q, k, cos, sin, layout="bhtd" if unsqueeze_dim == 1 else "bthd")

    return apply_rotary_pos_emb


def geglu_erf(gate, up):
    return geglu(gate, up, approximate="none")


def geglu_tanh(gate, up):
    return geglu(gate, up, approximate="tanh")


# By name, as the families are: nothing of transformers is imported here.
_GATED_UNITS = {
    ("transformers.activations", "SiLUActivation"): swiglu,
    ("torch.nn.modules.activation", "SiLU"): swiglu,
    ("transformers.activations", "GELUActivation"): geglu_erf,
    ("transformers.activations", "GELUTanh"): geglu_tanh,
}


def gated_unit(activation: Callable) -> Callable | None:
    """The function for activation(gate) * up, or None."""
    cls = type(activation)
    return _GATED_UNITS.get((cls.__module__, cls.__name__))


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the ops take such a tensor: on CUDA none takes float64, to which a model may move after patch()."""
    return not (x.dtype is torch.float64 and x.is_cuda)


def op_name(glu: Callable) -> str:
    return "swiglu" if glu is swiglu else "geglu"


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


def fused_add(norm: nn.Module) -> Callable | None:
    """The function for norm(x + residual), or None where somebody has to see that the norm is called."""
    cls = type(norm)
    fuses = issubclass(cls, FusedNorm) and cls.forward is cls.made and cls.is_current() and runs_only_forward(norm)
    return cls.add if fuses else None


def own_class(cls: type) -> type:
    """The class of transformers' or torch's that a class is, or derives from; never one made here."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("transformers", "torch") and "original" not in vars(base):
            return base
    return cls


def is_causal_lm(cls: type) -> bool:
    """Whether a class is, or derives from, a model of transformers' that generates text with a decoder alone."""
    own = own_class(cls)
    return own.__name__.endswith("ForCausalLM") and hasattr(own, "generate")


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
    members |= {"original": cls, "family": None}
    bases: tuple[type, ...] = (cls,)
    if generates:
        members, bases = members | _loops(cls), (Generating, *bases)
    if loss:
        members, bases = members | _loss_members(cls, forward), (CausalLM, *bases)
    made = type(cls.__name__, bases, members)
    if loss:
        made.made = made.forward
    return made


def _loops(cls: type[nn.Module]) -> dict[str, Callable]:
    """`generate` takes its loop from the class by name, one for greedy search and sampling and others for the rest."""
    from .loop import LOOPS

    loops = {name: loop(getattr(cls, name)) for name, loop in LOOPS.items() if hasattr(cls, name)}
    if "_sample" not in loops or not hasattr(cls, "_prefill"):
        raise UnknownLayout("generate() of this transformers has no loop of a known name")
    return loops


def _loss_members(cls: type[nn.Module], forward: Callable) -> dict[str, Callable]:
    from . import loss

    loss.check_forward(forward)
    is_current = _is_current(cls, forward, None)
    made = _stepping_aside(cls, is_current, loss.forward_without_logits(forward), None)
    return {"forward": made, "is_current": staticmethod(is_current)}


_ROTATION = "apply_rotary_pos_emb"
_REPLACEMENTS = {"rms_norm": RMSNorm, "gated_mlp": MLP, "rope": Attention, "add_rms_norm": DecoderLayer}
# What their forwards call, and whether it returns a tuple.
_SUBMODULES = {
    "gated_mlp": dict.fromkeys(("gate_proj", "up_proj", "down_proj", "act_fn"), False),
    "add_rms_norm": dict.fromkeys(("input_layernorm", "post_attention_layernorm", "mlp"), False) | {"self_attn": True},
}


def patched_class(cls: type[nn.Module], only_fused: bool = False) -> type[nn.Module]:
    """The patched subclass of a layer's class. `only_fused`: of a norm, whose own forward stays.

    The same one every time, so that compiled graphs of a model stay valid when it is patched again.
    Raises UnknownLayout when cls does not compute what the replacement does.
    """
    # Keyed by the functions it is made from too, which somebody may have replaced since the last call.
    if is_lora(cls):
        return _lora_class(cls, cls.forward)
    rotation = getattr(cls.forward, "__globals__", {}).get(_ROTATION)
    return _patched_class(cls, cls.forward, rotation, only_fused)


@functools.cache
def _patched_class(cls, forward, rotation, only_fused):
    if (match := find(cls)) is None:
        raise UnknownLayout(f"{cls.__name__} belongs to no known family")
    family, kind = match
    replacement = FusedNorm if only_fused else _REPLACEMENTS[kind]
    is_current = _is_current(cls, forward, rotation if kind == "rope" else None)
    members = {}
    if kind == "rms_norm":
        members = _norm_members(forward, family)
        made = members["forward"]
    elif kind == "rope":
        by_kernel = rotation_by_kernel(rotation)
        made = bind_global(forward, _ROTATION, by_kernel)
        check_rope(rotation, by_kernel)
    else:
        made = replacement.forward
        check_symbolically(forward, made, _SUBMODULES[kind])
    made = forward if only_fused else _stepping_aside(cls, is_current, made, "rope" if kind == "rope" else None)
    # transformers, accelerate and PEFT look at __name__; __module__ says the truth about where forward is from.
    members |= {"forward": made, "is_current": staticmethod(is_current)}
    members |= {"original": cls, "family": family, "__module__": __name__, "__doc__": cls.__doc__}
    patched = type(cls.__name__, (replacement, cls), members)
    patched.made = patched.forward  # which a base may have wrapped, as transformers' layers do from 5.23
    if kind == "rms_norm":
        check_rms_norm(cls, patched, family.eps)
    return patched


@functools.cache
def _lora_class(cls, forward):
    from . import lora

    is_current, by_op = _is_current(cls, forward, None), lora.forward_by_op(forward)
    lora.check_forward(cls, by_op)
    made = _stepping_aside(cls, is_current, functools.wraps(forward)(by_op), None)
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"forward": made, "is_current": staticmethod(is_current), "original": cls, "family": None}
    patched = type(cls.__name__, (LoRA, cls), members)
    patched.made = patched.forward
    return patched


def _is_current(cls: type[nn.Module], forward: Callable, rotation: Callable | None) -> Callable[[], bool]:
    namespace = getattr(forward, "__globals__", {})

    def is_current() -> bool:
        if cls.forward is not forward:
            return False
        return rotation is None or torch.compiler.is_compiling() or namespace.get(_ROTATION) is rotation

    return is_current


def _stepping_aside(
    cls: type[nn.Module], is_current: Callable[[], bool], forward: Callable, op: str | None
) -> Callable:
    """`forward`, which runs `op` in every call, or where it is not current any more the forward of cls."""

    @functools.wraps(forward)
    def forward_or_original(self, *args, **kwargs):
        if not is_current():
            count(self, WITHOUT)
            return cls.forward(self, *args, **kwargs)
        if op is not None:
            count(self, op if has_kernel(args[0] if args else kwargs["hidden_states"]) else WITHOUT)
        return forward(self, *args, **kwargs)

    return forward_or_original
