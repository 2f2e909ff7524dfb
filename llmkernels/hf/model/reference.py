"""What the class of a model makes of its config, and a small model of the same class.

    reference(model)       the module tree to expect, made without memory: every class, part, parameter and number
    small_config(config)   the same but for its sizes
    small_model(cls, ..)   a model of such a config, on the CPU

trust.py compares a live model with the first, and proof.py the composed forward with the second.
"""

import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._private import TorchDispatchMode
from ..attention import ATTENTIONS, MASKS, NAME
from ..classes.effects import check_effects, is_foreign
from ..classes.options import known_base
from ..classes.origin import (
    Name,
    asked_of_class,
    check_origin,
    hold,
    is_constant,
    is_list,
    members_of,
    members_of_class,
    names_of,
    read_by,
)
from ..errors import NoStep, UnknownLayout, reason_of
from ..modules.replaced import foreign_class, library_class
from . import trust
from .text import is_config, modules_of_text, text_config, text_entry, text_model
from .trust import ModuleSpec

# Numbers of a module that bind.py takes from the model itself. All others are what its class makes of the config.
_READ = {"scaling", "eps", "variance_epsilon"}
# Those that are of no account to a forward in eval mode.
_FREE = {"training", "gradient_checkpointing", "vocab_size", "in_features", "out_features", "num_embeddings"}
_FREE |= {"max_seq_len_cached", "padding_idx", "scale_grad_by_freq", "sparse", "attention_dropout"}
_FREE |= {"rope_deltas"}  # of positions that are not given


@dataclass(frozen=True)
class ExpectedModule:
    """A module of the reference, what one in its place has to look like, its numbers that are read, its lists of
    constants, and its parts; but for `others`, which no forward of tokens alone calls."""

    spec: ModuleSpec
    module: nn.Module
    read: tuple[str, ...]
    lists: dict[str, list]
    parts: dict[str, "ExpectedModule"]
    others: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Reference:
    config: dict[str, Any]  # as it was
    model: nn.Module
    root: ExpectedModule
    classes: tuple[type, ...]  # of all modules
    attention: Callable  # the function that the config names, of transformers or ours
    names: tuple[Name, ...]  # what the forwards and the attention call, and functions that modules have
    called: tuple  # the same and the forwards, for all models of these classes


_references: weakref.WeakKeyDictionary[nn.Module, Reference] = weakref.WeakKeyDictionary()


def reference(model: nn.Module) -> Reference:
    """The reference of a model. Raises UnknownLayout where its class can not be built from its config."""
    known = _references.get(model)
    config, attention = of_account(model.config), _attention_of(model)
    _check_mask(model.config)
    if known is not None and known.config == config and known.attention is attention and hold(known.names):
        return known
    known = _references[model] = reference_of(_as_made(type(model), model.config), copy.deepcopy(config), attention)
    return known


def _as_made(cls: type[nn.Module], config: Any) -> nn.Module:
    """A model as its class makes it. Where a class derived from one of transformers' needs more than a config, as
    transformers' class makes it."""
    foreign, own = foreign_class(cls), library_class(cls)
    try:
        made = _build(foreign or own, config, "meta").eval()
    except UnknownLayout:
        raise
    except Exception as error:
        if foreign is None or known_base(own) is None:
            raise UnknownLayout(f"can not be built from its config ({type(error).__name__}: {error})") from error
        made = _build(own, config, "meta").eval()
    check_effects(made)
    return made


def reference_of(made: nn.Module, config: dict[str, Any], attention: Callable) -> Reference:
    """A model as its own reference."""
    called_modules = modules_of_text(made)
    modules = [module for module in made.modules() if module in called_modules]
    classes = tuple(dict.fromkeys(map(type, modules)))
    names = [*names_of(attention), *(name for cls in classes for name in names_of(cls.forward, cls))]
    names += [name for cls in classes if is_foreign(cls) for name in members_of_class(cls)]
    own = [(type(module), name) for module in modules for name in members_of(module)]
    forwards = ((cls, "forward", cls.forward) for cls in classes)
    members = dict.fromkeys((cls, name, value) for cls, (_, name, value) in own)
    called = *forwards, *(value for _, _, value in names), *members
    names = tuple(dict.fromkeys([*names, *(name for _, name in own)]))
    return Reference(config, made, _expected(made, called_modules), classes, attention, names, called)


# Entries of a config that change neither the modules nor what a step computes.
_NO_ACCOUNT = {"use_cache", "bos_token_id", "eos_token_id", "output_hidden_states", "_output_attentions", "return_dict"}
_NO_ACCOUNT |= {"_name_or_path", "_commit_hash", "architectures", "transformers_version", "dtype", "id2label"}
_NO_ACCOUNT |= {"label2id", "problem_type", "initializer_range"}


def of_account(config: Any) -> dict[str, Any]:
    """What a model is made of, of its config. That of the text is a dict, too."""
    entry = text_entry(config)
    return {
        name: of_account(value) if name == entry else value
        for name, value in vars(config).items()
        if name not in _NO_ACCOUNT
    }


def _attention_of(model: nn.Module) -> Callable:
    """The function by which a model attends. Raises NoStep unless it is of transformers, or ours under its own name:
    it may compute anything."""
    scope, ours = attention_scope(model), ATTENTIONS.get(attention_name(model.config))
    function = attention_function(model.config, scope)
    # effects.py looks at that of a foreign model's own file.
    own = [scope["__name__"].split(".")[0]] if function is not None and function is scope.get(_EAGER) else []
    if not _is_known(function, ours, own):
        raise NoStep(f"attention is computed by {getattr(function, '__qualname__', function)}")
    return function


def _check_mask(config: Any) -> None:
    """Raise NoStep unless the masks of a model's attention, where they are given to it, are made by transformers' own
    function; or by ours, where our attention takes them."""
    name, function = attention_name(config), mask_function(config)
    if function is None and name.startswith("paged|"):
        return  # of continuous batching, which makes them itself
    if function is None:
        raise NoStep(f"no function makes masks for {name}, so that padding is seen")
    if not _is_known(function, MASKS.get(name)):
        raise NoStep(f"masks are made by {getattr(function, '__qualname__', function)}")


def _is_known(function: Any, ours: Callable | None, packages: Iterable[str] = ()) -> bool:
    """Whether a function is ours, under a name of ours; under any other, whether it is of transformers or of these
    packages."""
    if ours is not None:
        return function is ours
    return reason_of(check_origin, function, ("transformers", *packages)) is None


def attention_name(config: Any) -> str:
    """The name in transformers' AttentionInterface of the attention of a model's text."""
    return text_config(config)._attn_implementation


def mask_function(config: Any) -> Callable | None:
    """The function that makes masks for the attention that a config names, or None."""
    return ALL_MASK_ATTENTION_FUNCTIONS.get(attention_name(config))


def attention_function(config: Any, scope: dict[str, Any]) -> Callable:
    """The function that a config names, for attentions of a file with these globals."""
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention_name(config), scope.get(_EAGER))


_EAGER = "eager_attention_forward"


def attention_scope(model: nn.Module) -> dict[str, Any]:
    """The globals of the file that a model's attention is from."""
    modules = text_model(model).modules()
    classes = (foreign_class(type(module)) or library_class(type(module)) for module in modules)
    scopes = (vars(sys.modules[cls.__module__]) for cls in classes if cls.__module__ in sys.modules)
    return next((scope for scope in scopes if _EAGER in scope), {})


class WithoutRandomNumbers(TorchDispatchMode):
    """Makes zeros where a module would be filled with random numbers: others draw from torch's generator meanwhile."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded not in function.tags or _attends_without_dropout(function, args, kwargs):
            return function(*args, **kwargs or {})
        if not function._schema.is_mutable:
            raise UnknownLayout(f"draws random numbers by {function}")
        return args[0].zero_()


def _attends_without_dropout(function: Any, args: tuple, kwargs: dict[str, Any] | None) -> bool:
    given = dict(zip((x.name for x in function._schema.arguments), args, strict=False)) | (kwargs or {})
    return "scaled_dot_product" in str(function) and not given.get("dropout_p")


class _Building(WithoutRandomNumbers):
    """The same for tensors that a constructor makes of random numbers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.randn.default, torch.ops.aten.rand.default):
            return torch.zeros(*args, **kwargs or {})
        return super().__torch_dispatch__(function, types, args, kwargs)


def _build(cls: type[nn.Module], config: Any, device: str) -> nn.Module:
    with torch.inference_mode(False), torch.device(device), _Building():
        return cls(copy.deepcopy(config))


_OF_MODULES = vars(nn.Module()).keys()
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, functools.partial


def _expected(module: nn.Module, called: set[nn.Module]) -> ExpectedModule:
    members = vars(module)
    cls = type(module)
    named = read_by(cls) - _OF_MODULES if is_foreign(cls) else set()
    watched = {name: value for name, value in members.items() if name[0] != "_" or name in named}
    numbers = tuple(
        (name, value)
        for name, value in watched.items()
        if (is_constant(value) or isinstance(value, _FUNCTIONS)) and name not in _READ | _FREE
    )
    lists = {name: value for name, value in watched.items() if is_list(value)}
    spec = trust.module_spec(
        cls,
        children=frozenset(members["_modules"]) if cls is not nn.ModuleList else None,
        parameters=frozenset(members["_parameters"]),
        trains=any("dropout" in name for name in members) or hasattr(module, "config"),
        numbers=numbers,
        absent=(asked_of_class(cls) | named - _FREE - {"forward"}).difference(members),
    )
    read = tuple(name for name in members if name in _READ)
    parts = {name: _expected(child, called) for name, child in members["_modules"].items() if child in called}
    return ExpectedModule(spec, module, read, lists, parts, frozenset(members["_modules"]) - parts.keys())


# --- a small model

WINDOW = 5  # of a small model
_HEADS = 2


def small_config(config: Any) -> Any:
    """The same with few and small layers. Heads have the size that they have, and windows are short.

    Embeddings are not tied to the head: the logit of a token itself would drown the others.
    """
    whole = copy.deepcopy(config)
    small, config = text_config(whole), text_config(config)
    kinds = layer_kinds(config)
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
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    width = changes["hidden_size"]
    for name, value in vars(config).items():
        if type(value) is not int or not name.endswith(("_dim", "_size")) or "head" in name or name in changes:
            continue
        if value == config.hidden_size:  # as that of OPT's embeddings
            changes[name] = width
        elif value == width:  # where they differ a model may do more
            changes[name] = 2 * width
    changes |= {name: values[:layers] for name, values in _lists_by_layer(config).items()}
    changes |= {name: WINDOW for name, value in vars(config).items() if _is_window(name, value)}
    if getattr(config, "pad_token_id", None) is not None:
        changes["pad_token_id"] = 0  # within the vocabulary
    for name, value in changes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    if (attention := getattr(config, "_attn_implementation", "eager")) != "sdpa":
        small._attn_implementation = NAME if attention in ATTENTIONS else "eager"
    if whole is not small:
        _shrink_others(whole, small)
    return whole


def _shrink_others(whole: Any, text: Any) -> None:
    """Leave the parts of a config that are not of the text one layer each."""
    whole.tie_word_embeddings = False
    for part in vars(whole).values():
        if is_config(part) and part is not text:
            for name in ("num_hidden_layers", "depth"):
                if hasattr(part, name):
                    setattr(part, name, 1)


def _is_window(name: str, value: Any) -> bool:
    """Whether an entry of a config says how far layers see: few tokens have to show it."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_count and ("window" in name or "chunk" in name) and not name.endswith("layers")


def resized(small: Any) -> Any:
    """A small config with other sizes, and one layer more: what differs then depends on sizes."""
    whole = copy.deepcopy(small)
    small, other = text_config(small), text_config(whole)
    doubled = "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"
    changes = {name: 2 * getattr(small, name) for name in doubled if isinstance(getattr(small, name, None), int)}
    changes |= {name: [*values, values[-1]] for name, values in _lists_by_layer(small).items()}
    changes["num_hidden_layers"] = small.num_hidden_layers + 1
    for name, value in changes.items():
        setattr(other, name, value)
    return whole


def layer_kinds(config: Any) -> list[tuple]:
    """What distinguishes the layers of a config, for each: its entries in the lists with one per layer."""
    config = text_config(config)
    lists = _lists_by_layer(config).values()
    return [tuple(str(values[index]) for values in lists) for index in range(config.num_hidden_layers)]


def _lists_by_layer(config: Any) -> dict[str, list]:
    """The lists of a config that have one entry per layer."""
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and name != "architectures"}
    return {name: values for name, values in lists.items() if len(values) == config.num_hidden_layers}


def small_model(cls: type[nn.Module], config: Any) -> nn.Module:
    """A float32 model of a small config on the CPU, whose parameters are still to be filled. Numbers that are read from
    modules are others than the class made of the config."""
    small = _build(cls, config, "cpu").float().eval()
    for module in small.modules():
        for name in vars(module).keys() & _READ:
            setattr(module, name, _EPS if "eps" in name else 1.25 * getattr(module, name))
    return small


_EPS = 0.1  # of norms: large, so that it matters


@torch.no_grad()
def fill(small: nn.Module, loud: float) -> None:
    """Fill a small model with random numbers that make activations about 1, and `loud` in some channels of products."""
    generator = torch.Generator().manual_seed(0)
    for module in small.modules():
        for name, parameter in module.named_parameters(recurse=False):
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                values = values.clamp(-2, 2) * 0.2 + (parameter.mean().round() if name == "weight" else 0)
            elif not isinstance(module, nn.Embedding):
                is_loud = torch.rand((*parameter.shape[:-1], 1), generator=generator) < 1 / 16
                values *= 1.4 * parameter.shape[-1] ** -0.5 * torch.where(is_loud, loud, 1)
            parameter.copy_(values)
