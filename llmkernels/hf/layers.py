"""The forwards that replace transformers' own, and the subclasses that carry them.

A patched module has its class changed to a subclass of it that differs in `forward` only (and a decoder layer in how
its packed weights appear in a state dict). So isinstance, parameters,
state dict, submodules, hooks, `copy.deepcopy` and attribute access stay what they were, and changing the class back
is all there is to undo. Submodules are always called, never read through: a Linear with a LoRA adapter, a hook or a
collective works.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from llmkernels.ops import add_rms_norm, geglu, rms_norm, rope, swiglu

from . import families, packing
from .families import Family, find
from .layout import UnknownLayout, bind_global, check_rms_norm, check_rope, check_symbolically


class Replaced:
    """Base of every class made here.

    `original` is the class it was made from, `family` the entry of FAMILIES.
    """

    original: type[nn.Module]
    family: Family

    def __reduce_ex__(self, protocol):
        # The class is made at run time, so a pickle names the one it was made from, and loading makes it again.
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return (_unpickle, (self.original,), *state)


class Patched(Replaced):
    """Base of every class with another forward."""


class Generating(Replaced):
    """Base of every model class with another loop behind generate()."""


def _unpickle(original: type[nn.Module]) -> nn.Module:
    try:
        cls = patched_class(original) if generating_family(original) is None else generating_class(original)
    except UnknownLayout:  # another transformers than the one that wrote the pickle: what it computes is the same
        cls = original
    return cls.__new__(cls)


class RMSNorm(Patched):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not has_kernel(hidden_states):
            return self.original.forward(self, hidden_states)
        family = self.family
        return rms_norm(
            hidden_states,
            self.weight,
            getattr(self, family.eps),
            weight_offset=family.weight_offset,
            cast_before_weight=family.cast_before_weight,
        )

    def add(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum, and the sum."""
        family = self.family
        return add_rms_norm(
            hidden_states,
            residual,
            self.weight,
            getattr(self, family.eps),
            weight_offset=family.weight_offset,
            cast_before_weight=family.cast_before_weight,
        )


class MLP(Patched):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Looked up per call, since both a hook on the activation and another activation may come after patch().
        act_fn = self.act_fn
        glu = gated_unit(act_fn)
        if glu is None or not runs_only_forward(act_fn) or not has_kernel(x):
            return self.down_proj(act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x)))


class Attention(Patched):
    """Its forward is the original's with `rotation_by_kernel` of the module's `apply_rotary_pos_emb` in its place."""


class DecoderLayer(Patched):
    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        if not keep_vars:
            packing.separate(state, packing.groups_of(self))
        return state

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
        if fuses_add(norm) and has_kernel(hidden_states):
            hidden_states, residual = norm.add(hidden_states, residual)
        else:
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


def gated_unit(activation: nn.Module):
    """The function for activation(gate) * up, or None."""
    cls = type(activation)
    return _GATED_UNITS.get((cls.__module__, cls.__name__))


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the ops take such a tensor: on CUDA none takes float64, to which a model may move after patch()."""
    return not (x.dtype is torch.float64 and x.is_cuda)


def runs_only_forward(module: nn.Module) -> bool:
    """Whether module(x) is the forward of its class and nothing else: no hooks, no forward of the instance."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _has_any_global_hook()
    )


def fuses_add(norm: nn.Module) -> bool:
    return isinstance(norm, RMSNorm) and type(norm).forward is RMSNorm.forward and runs_only_forward(norm)


def generating_family(cls: type) -> Family | None:
    """The family of a model class that generates, or of the known class that it derives from."""
    known = {(family.module, f"{family.prefix}ForCausalLM"): family for family in families.FAMILIES}
    for base in cls.__mro__:
        if (family := known.get((base.__module__, base.__name__))) is not None and not issubclass(base, Replaced):
            return family
    return None


@functools.cache
def generating_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a transformers model class whose generate() decodes by the decode step.

    `generate` takes its loop from the class by name, one for greedy search and sampling and others for the rest.
    Raises UnknownLayout when cls has no such loop.
    """
    from .loop import LOOPS

    loops = {name: loop(getattr(cls, name)) for name, loop in LOOPS.items() if hasattr(cls, name)}
    if "_sample" not in loops or not hasattr(cls, "_prefill"):
        raise UnknownLayout("generate() of this transformers has no loop of a known name")
    # Its forward is the original's, so __module__ and the name under which transformers keeps facts about it are too.
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"original": cls, "family": generating_family(cls)}
    return type(cls.__name__, (Generating, cls), members | loops)


_ROTATION = "apply_rotary_pos_emb"
_REPLACEMENTS = {"rms_norm": RMSNorm, "gated_mlp": MLP, "rope": Attention, "add_rms_norm": DecoderLayer}


def patched_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The patched subclass of a transformers class.

    The same one every time, so that compiled graphs of a model stay valid when it is patched again.
    Raises UnknownLayout when cls does not compute what the replacement does.
    """
    # Keyed by the functions it is made from too, which somebody may have replaced since the last call.
    rotation = getattr(cls.forward, "__globals__", {}).get(_ROTATION)
    return _patched_class(cls, cls.forward, rotation)


@functools.cache
def _patched_class(cls, forward, rotation):
    if (match := find(cls)) is None:
        raise UnknownLayout(f"{cls.__name__} belongs to no known family")
    family, kind = match
    replacement = _REPLACEMENTS[kind]
    # transformers, accelerate and PEFT look at __name__; __module__ says the truth about where forward is from.
    members = {"original": cls, "family": family, "__module__": __name__, "__doc__": cls.__doc__}
    if kind == "rope":
        by_kernel = rotation_by_kernel(rotation)
        members["forward"] = bind_global(forward, _ROTATION, by_kernel)
        check_rope(rotation, by_kernel)
    elif kind == "gated_mlp":
        check_symbolically(forward, MLP.forward, dict.fromkeys(("gate_proj", "up_proj", "down_proj", "act_fn"), False))
    elif kind == "add_rms_norm":
        submodules = dict.fromkeys(("input_layernorm", "post_attention_layernorm", "mlp"), False)
        check_symbolically(forward, DecoderLayer.forward, submodules | {"self_attn": True})
    patched = type(cls.__name__, (replacement, cls), members)
    if kind == "rms_norm":
        check_rms_norm(cls, patched, family.eps)
    return patched
