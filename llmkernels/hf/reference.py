"""What a model looks like as its class makes it of its config, and a small one of the same kind.

    reference(model)       the module tree to expect, made without memory: every class, part, parameter and number
    small_model(model)     a model of the same class with the same config but for its sizes, on the CPU

trust.py compares a live model with the first, and proof.py the composed forward with the second.
"""

import copy
import inspect
import threading
import weakref
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import nn

from . import trust
from .layers import own_class
from .layout import UnknownLayout
from .trust import Kind

_LOCK = threading.Lock()

# Numbers of a module that trunk.py reads, or that are of no account to a forward in eval mode.
_READ = {"scaling", "sliding_window", "is_sliding", "use_rope", "attn_logit_softcapping", "layer_idx", "eps"}
_READ |= {"variance_epsilon", "embedding_multiplier", "residual_multiplier"}
_FREE = {"training", "gradient_checkpointing", "vocab_size", "in_features", "out_features", "num_embeddings"}
_FREE |= {"max_seq_len_cached", "padding_idx", "scale_grad_by_freq", "sparse", "attention_dropout"}


@dataclass(frozen=True)
class Part:
    """A module as it should be: its kind, the module of the reference, numbers of it that are read, and its parts."""

    kind: Kind
    module: nn.Module
    read: tuple[str, ...]
    parts: dict[str, "Part"]


@dataclass(frozen=True, eq=False)
class Reference:
    config: dict[str, Any]  # as it was
    model: nn.Module
    root: Part
    classes: tuple[type, ...]  # of all modules


_references: weakref.WeakKeyDictionary[nn.Module, Reference] = weakref.WeakKeyDictionary()


def reference(model: nn.Module) -> Reference:
    """The reference of a model. Raises UnknownLayout where its class can not be built from its config."""
    known = _references.get(model)
    config = model.config
    if known is not None and known.config == vars(config):
        return known
    made = _build(own_class(type(model)), copy.deepcopy(config), "meta").eval()
    classes = tuple(dict.fromkeys(map(type, made.modules())))
    known = Reference(copy.deepcopy(vars(config)), made, _part(made), classes)
    _references[model] = known
    return known


def _build(cls: type[nn.Module], config: Any, device: str) -> nn.Module:
    with _LOCK, torch.inference_mode(False), torch.random.fork_rng(devices=[]), torch.device(device):
        try:
            return cls(config)
        except Exception as error:
            raise UnknownLayout(f"can not be built from its config ({type(error).__name__}: {error})") from error


def _part(module: nn.Module) -> Part:
    members = vars(module)
    cls = type(module)
    numbers = tuple(
        (name, value)
        for name, value in members.items()
        if (value is None or isinstance(value, (str, Number))) and name[0] != "_" and name not in _READ | _FREE
    )
    kind = trust.kind(
        cls,
        children=frozenset(members["_modules"]) if cls is not nn.ModuleList else None,
        parameters=frozenset(members["_parameters"]),
        trains=any("dropout" in name for name in members) or hasattr(module, "config"),
        numbers=numbers,
    )
    read = tuple(name for name in members if name in _READ)
    return Part(kind, module, read, {name: _part(child) for name, child in members["_modules"].items()})


# --- a small model

_HEADS = 2
_EPS = 0.1  # of norms: large, so that it matters


def small_config(config: Any) -> Any:
    """The same with few and small layers. Heads have the size that they have, and windows are short."""
    small = copy.deepcopy(config)
    kinds = _layer_kinds(config)
    last = max(kinds.index(kind) for kind in set(kinds))
    layers = max(last + 1, min(2, len(kinds)))
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    grouped = kv_heads < heads
    changes = {
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS * (2 if grouped else 1),
        "num_key_value_heads": _HEADS,
        "hidden_size": _HEADS * (2 if grouped else 1) * head_dim,
        "intermediate_size": 96,
        "vocab_size": 64,
    }
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers and name != "architectures":
            changes[name] = value[:layers]
    if getattr(config, "sliding_window", None) is not None:
        changes["sliding_window"] = WINDOW
    if getattr(config, "pad_token_id", None) is not None:
        changes["pad_token_id"] = 0  # within the vocabulary
    for name, value in changes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    if getattr(config, "_attn_implementation", "eager") != "sdpa":
        small._attn_implementation = "eager"
    return small


WINDOW = 5  # of a small model


def _layer_kinds(config: Any) -> list[tuple]:
    """What distinguishes the layers of a config, for each: its entries in the lists with one per layer."""
    count = config.num_hidden_layers
    lists = [
        value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == count and name != "architectures"
    ]
    return [tuple(str(values[index]) for values in lists) for index in range(count)]


def small_model(model: nn.Module) -> nn.Module:
    """A small float32 model on the CPU, all of whose parameters matter. Raises UnknownLayout where there is none."""
    config = small_config(model.config)
    small = _build(own_class(type(model)), config, "cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for module in small.modules():
        for name in vars(module).keys() & {"eps", "variance_epsilon"}:
            setattr(module, name, _EPS)
        for name, parameter in module.named_parameters(recurse=False):
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                values *= 1.4 * parameter.shape[-1] ** -0.5 if not isinstance(module, nn.Embedding) else 1
            else:
                values = values.clamp(-2, 2) * 0.2 + (parameter.detach().mean().round() if name == "weight" else 0)
            with torch.no_grad():
                parameter.copy_(values)
    return small


def parameters_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)
