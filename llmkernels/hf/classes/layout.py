"""What a class computes, found out before it is replaced: `kind_of`, and one function for each kind.

They run the class's own forward, on symbols or on a few numbers, and do not look at names or version numbers where they
need not. If a transformers release changes a formula, its class gets other options or is not replaced; if it only moves
code, nothing changes.
"""

import copy
import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llmkernels.ops import layer_norm, rms_norm, rope

from ..errors import UnknownLayout
from .cache_name import cache_argument
from .families import KINDS, MLP, Norm, Rotation, is_lora, known_base
from .origin import Name, check_origin, names_of

# --- kinds


def kind_of(cls: type) -> str | None:
    """The kind of a module class: a keyword of `patch`, "experts", "loss", "lora", or None.

    A class that derives from one of transformers' has that one's kind, whatever forward it has itself; of others those
    have one that generate text. A torch.nn.LayerNorm has the kind of a norm; whether it is part of a decoder, its class
    does not say.
    """
    if is_lora(cls):
        return "lora"
    base = known_base(cls)
    if base is None:
        return "loss" if any(each.__module__ == "transformers.generation.utils" for each in cls.__mro__) else None
    return _kind_of(base, base.forward)


@functools.cache
def _kind_of(cls: type, forward: Callable) -> str | None:
    name = cls.__name__
    if name.endswith("ForCausalLM"):
        return "loss"
    if name.endswith("Experts"):
        return "experts"
    try:
        check_origin(forward, ("transformers", "torch"))
        arguments = list(inspect.signature(forward).parameters.values())[1:]
    except (UnknownLayout, ValueError):
        return next((kind for end, kind in KINDS.items() if name.endswith(end)), None)
    names = _names(forward)
    if len(arguments) == 1 and arguments[0].kind is arguments[0].POSITIONAL_OR_KEYWORD:
        if "Norm" in name and not (names | _names(getattr(cls, "_norm", None))).isdisjoint(_EPS):
            try:
                return norm_of(cls).kind
            except UnknownLayout:
                return "layer_norm" if "LayerNorm" in name else "rms_norm"
        try:
            return "mlp" if mlp_of(forward).gate is None else "gated_mlp"
        except UnknownLayout:
            is_mlp = name.endswith("MLP") and names.isdisjoint({"experts", "router"})
            return ("gated_mlp" if "gate_proj" in names else "mlp") if is_mlp else None
    if "self_attn" in names and cache_argument(forward) is not None:
        return "add_rms_norm"
    return "rope" if rotation_name(forward) is not None else None


def _names(function: Callable | None) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return set() if code is None else {*code.co_names}


# --- on symbols


class Symbol(str):
    """An expression as text: arithmetic on it gives the text of the result."""

    def __add__(self, other):
        return Symbol(f"({self} + {other})")

    def __mul__(self, other):
        return Symbol(f"({self} * {other})")

    def __truediv__(self, other):
        return Symbol(f"({self} / {other})")

    def __iter__(self):
        return iter((self, Symbol(f"{self}[1]")))  # of a tuple the first value is what matters

    def __bool__(self):
        raise UnknownLayout(f"its forward depends on {self}")

    def chunk(self, chunks, dim=0):
        return tuple(Symbol(f"{self}.chunk({chunks}, dim={dim})[{index}]") for index in range(chunks))

    def __call__(self, *args, **kwargs):
        arguments = [*map(str, args), *(f"{key}={value}" for key, value in sorted(kwargs.items()))]
        return Symbol(f"{self}({', '.join(arguments)})")

    @classmethod
    def __torch_function__(cls, function, _, args=(), kwargs=None):
        return Symbol(function.__name__)(*args, **kwargs or {})


class _Traced:
    """Stands for a module: each attribute is a symbol of that name."""

    training = Symbol("training")

    def __getattr__(self, name):
        return Symbol(name)


@functools.cache
def trace(forward: Callable) -> str:
    """What a forward computes, as an expression of its arguments and of the members of its module.

    It gets the arguments of its signature, the first by position, the others by name, and an additional one if it has
    **kwargs. Raises UnknownLayout where it needs more than symbols.
    """
    check_origin(forward)
    first, *named = [p for p in inspect.signature(forward).parameters.values() if p.name != "self"]
    try:
        return str(forward(_Traced(), Symbol(first.name), **{p.name: Symbol(p.name) for p in named}))
    except Exception as error:
        raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error


_ACT = r"(?P<act>\w*act\w*)"
_GATE, _UP = r"(?P<gate>\w+)\((?P<x>\w+)\)", r"(?P<up>\w+)\((?P=x)\)"
_PACKED = r"(?P<gate>\w+)\((?P<x>\w+)\)\.chunk\(2, dim=-1\)"
_MLPS = [
    rf"(?P<down>\w+)\(\({_ACT}\({_GATE}\) \* {_UP}\)\)",
    rf"(?P<down>\w+)\(\((?P<up>\w+)\((?P<x>\w+)\) \* {_ACT}\((?P<gate>\w+)\((?P=x)\)\)\)\)",
    rf"(?P<down>\w+)\(\({_PACKED}\[1\] \* {_ACT}\((?P=gate)\((?P=x)\)\.chunk\(2, dim=-1\)\[0\]\)\)\)",
    rf"(?P<down>\w+)\(\({_ACT}\({_PACKED}\[0\]\) \* (?P=gate)\((?P=x)\)\.chunk\(2, dim=-1\)\[1\]\)\)",
    rf"(?P<down>\w+)\({_ACT}\((?P<up>\w+)\((?P<x>\w+)\)\)\)",
]
_DROPOUT = r"dropout\((?P<inner>.*), inplace=False, p=(?P<dropout>\w+), training=training\)"


def mlp_of(forward: Callable) -> MLP:
    """The names of an MLP's submodules. Raises UnknownLayout unless a forward computes one of _MLPS."""
    found = trace(forward)
    dropout = re.fullmatch(_DROPOUT, found)
    for pattern in _MLPS:
        if (match := re.fullmatch(pattern, dropout["inner"] if dropout else found)) is not None:
            names = {"gate": None, "up": None, **match.groupdict()}
            del names["x"]
            return MLP(**names, dropout=dropout and dropout["dropout"])
    raise UnknownLayout(f"unknown layout of its forward, which computes {found}")


# --- on numbers

_EPS = ("variance_epsilon", "eps")
_NORMS = [
    Norm("rms_norm", "", offset, cast, has_weight)
    for offset, cast, has_weight in (
        (0, True, True),
        (0, False, True),
        (1, False, True),
        (1, True, True),
        (0, True, False),
    )
] + [
    Norm("layer_norm", "", offset, has_weight=has_weight, has_bias=has_bias)
    for offset, has_weight, has_bias in ((0, True, True), (0, True, False), (1, True, True), (0, False, False))
]


def apply_norm(options: Norm, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    if options.kind == "layer_norm":
        return layer_norm(x, offset_weight(options, weight), bias, eps)
    return rms_norm(x, weight, eps, weight_offset=options.weight_offset, cast_before_weight=options.cast_before_weight)


def offset_weight(options: Norm, weight: torch.Tensor | None) -> torch.Tensor | None:
    """Of a layer norm, whose op has no offset."""
    return weight + options.weight_offset if options.weight_offset else weight


def norm_of(cls: type) -> Norm:
    """What the forward of a norm computes, rounding order included. Raises UnknownLayout for none of _NORMS."""
    return _norm_of(cls, cls.forward)


@functools.cache
def _norm_of(cls: type, forward: Callable) -> Norm:
    check_origin(forward, ("transformers", "torch"))
    x = torch.linspace(-1.5, 2.5, 256, device="cpu").view(4, 64)
    x = x * x.flip(-1).exp()  # no row is symmetric, or has a mean near 0
    norm = cls.__new__(cls)
    nn.Module.__init__(norm)
    norm.normalized_shape = (64,)
    norm.weight, norm.bias = (
        nn.Parameter(torch.linspace(*ends, 64, device="cpu"), requires_grad=False) for ends in ((0.3, 1.7), (-0.6, 0.8))
    )
    vars(norm).update(zip(_EPS, (0.25, 0.2), strict=True))  # large, so that their place in the formula matters
    try:
        return norm_of_module(norm, x)[0]
    except UnknownLayout:
        raise
    except Exception as error:  # it has other members
        raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error


def norm_of_module(module: nn.Module, x: torch.Tensor) -> tuple[Norm, str | None, str | None, float]:
    """What a norm computes of float32 x, the names of its weight and its bias, and its eps. That may be an attribute of
    any name, or a number of the forward's own, which has no name."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if len(names) > 2 or any(module._parameters[name].ndim != 1 for name in names):
        raise UnknownLayout("its forward computes no norm that has a kernel: it has other weights")
    values = {name: value for name, value in vars(module).items() if isinstance(value, float) and 0 < value < 1}
    if not values and (measured := _measured_eps(module, x)) is not None:
        values[""] = measured
    runs = {eps: [] for eps in values}
    for dtype in (torch.float32, torch.bfloat16):
        copied = copy.deepcopy(module).to(dtype)
        parameters = [copied._parameters[name] for name in names] + [None] * (2 - len(names))
        for eps, value in values.items():
            runs[eps].append((x.to(dtype), *parameters, value, copied.forward(x.to(dtype))))
    best = _best_norm(runs)
    weight, bias = (*names, None, None)[:2]
    return best, weight if best.has_weight else None, bias if best.has_bias else None, values[best.eps]


def _measured_eps(module: nn.Module, x: torch.Tensor) -> float | None:
    """The eps of a norm, by what it makes of a small row; None where that is no number of three digits."""
    row = x.flatten(0, -2)[0].double()
    row = row - row.mean()
    row /= row.square().mean().sqrt()
    small = 1e-6
    norm = copy.deepcopy(module).float()
    at_zero, large, little = (norm(factor * row.float()).double() for factor in (0, 1, small))
    ratio = float((little - at_zero).norm() / (large - at_zero).norm())  # sqrt((1 + eps) / (small^2 + eps)) small
    eps = (1 - ratio**2) / (ratio**2 / small**2 - 1) if ratio > small else 0.0
    rounded = float(f"{eps:.2e}")
    return rounded if 0 < rounded < 1 and abs(eps - rounded) < 1e-4 * rounded else None


def _best_norm(runs: dict[str, list[tuple]]) -> Norm:
    """By what agrees with runs of a forward, by the name of the eps that they used."""
    agreed = {}
    for eps, results in runs.items():
        for options in _NORMS:
            agreed[replace(options, eps=eps)] = min(_agreement(options, *run) for run in results)
    best = max(agreed, key=agreed.get, default=None)
    # The sum of squares may differ in its last bit, which changes few bfloat16 results or none; another rounding order
    # or formula changes many.
    if best is None or agreed[best] < 0.95:
        raise UnknownLayout("its forward computes no norm that has a kernel")
    return best


def _agreement(options: Norm, x: torch.Tensor, weight: Any, bias: Any, eps: float, found: torch.Tensor) -> float:
    if not torch.is_tensor(found) or found.dtype != x.dtype or found.shape != x.shape:
        return 0.0
    if (options.has_weight and weight is None) or (options.has_bias and bias is None):
        return 0.0
    weight, bias = weight if options.has_weight else None, bias if options.has_bias else None
    expected = apply_norm(options, x, weight, bias, eps)
    tolerance = 1e-5 if x.dtype is torch.float32 else 0
    return torch.isclose(found.float(), expected.float(), rtol=tolerance, atol=1e-6).float().mean().item()


def rotation_name(forward: Callable) -> str | None:
    """The function of its module by which a forward rotates q and k. Of several, the first."""
    forward = inspect.unwrap(forward)
    values, code = getattr(forward, "__globals__", {}), getattr(forward, "__code__", None)
    names = code.co_names if code is not None else ()
    return next((name for name in names if "rotary" in name and isinstance(values.get(name), types.FunctionType)), None)


_ROTATIONS = [
    dict(zip(("interleaved", "table", "float32", "keeps_dtype"), values, strict=True))
    for values in itertools.product((False, True), ("elements", "half", "pairs"), (False, True), (False, True))
]


def rotations() -> Iterator[Rotation]:
    """All that have a kernel, the simple ones first."""
    return (Rotation("", **values) for values in _ROTATIONS)


def rotate(options: Rotation, q, k, cos, sin, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by `llmkernels.rope`; unsqueeze_dim is the dim of the heads in them."""
    dtype, width = q.dtype, cos.shape[-1]
    if options.float32:
        q, k, cos, sin = q.float(), k.float(), cos.float(), sin.float()
    if options.table == "half":
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    layout = "bhtd" if unsqueeze_dim == 1 else "bthd"
    rotary_dim = 2 * width if options.table == "pairs" else width
    q, k = rope(q, k, cos, sin, layout=layout, interleaved=options.interleaved, rotary_dim=rotary_dim)
    return (q.to(dtype), k.to(dtype)) if options.keeps_dtype else (q, k)


def rotation_of(name: str, function: Callable) -> Rotation:
    """How a function(q, k, cos, sin, unsqueeze_dim=1) rotates, rounding included. Raises UnknownLayout."""
    check_origin(function)
    return _rotation_of(name, function, names_of(function))


@functools.cache
def _rotation_of(name: str, function: Callable, calls: tuple[Name, ...]) -> Rotation:
    if list(inspect.signature(function).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        raise UnknownLayout(f"its {name} has other arguments than q, k, cos, sin and unsqueeze_dim")
    runs, error = [], None
    for width, unsqueeze_dim, dtypes in itertools.product(
        (8, 4), (1, 2), ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32))
    ):
        x = torch.linspace(-2, 2, 5 * 3 * 8, device="cpu").view(1, 5, 3, 8).sin().to(dtypes[0])
        q, k = (
            (x[:, :3], x[:, 3:]) if unsqueeze_dim == 1 else (x.transpose(1, 2)[:, :, :3], x.transpose(1, 2)[:, :, 3:])
        )
        cos, sin = torch.linspace(-3, 3, 2 * 3 * width, device="cpu").cos().to(dtypes[1]).view(2, 1, 3, width)
        try:
            runs.append(((q, k, cos, sin, unsqueeze_dim), function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)))
        except Exception as reason:  # tables of a width that it does not take
            error = reason
    if not runs:
        raise UnknownLayout(f"unknown {name} ({type(error).__name__}: {error})")
    for values in _ROTATIONS:
        if all(_same_rotation(Rotation(name, **values), *run) for run in runs):
            return Rotation(name, **values)
    raise UnknownLayout(f"its {name} computes a rotation that has no kernel")


def _same_rotation(options: Rotation, arguments: tuple, found: Any) -> bool:
    width, head_dim = arguments[2].shape[-1], arguments[0].shape[-1]
    if (2 * width if options.table == "pairs" else width) > head_dim:
        return False
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and all(
            theirs.dtype == ours.dtype
            and theirs.shape == ours.shape
            and torch.allclose(theirs, ours, rtol=1e-6, atol=1e-7)
            for theirs, ours in zip(found, rotate(options, *arguments), strict=True)
        )
    )
