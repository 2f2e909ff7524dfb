"""What a class computes, found out before it is replaced: `kind_of`, and one function for each kind.

They run the class's own forward, on tensors without numbers or with a few, and do not look at names or version numbers
where they need not. If a transformers release changes a formula, its class gets other options or is not replaced; if it
only moves code, nothing changes.
"""

import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llmkernels.ops import layer_norm, rms_norm, rope

from ..errors import UnknownLayout
from .cache_name import takes_cache
from .options import (
    EPS,
    GATE,
    OF_EXPERTS,
    OF_LAYER,
    OF_PARTS,
    MLPNames,
    NormOptions,
    Rotation,
    is_lora,
    kind_by_name,
    known_base,
)
from .origin import Name, check_origin, names_of
from .recorder import ForwardRecorder, Node, StandIn, member_name

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
    named = kind_by_name(cls)
    if named in ("loss", "experts"):
        return named if not cls.__name__.endswith(OF_PARTS) or _has_text(cls) else None
    try:
        check_origin(forward, ("transformers", "torch"))
        arguments = list(inspect.signature(forward).parameters.values())[1:]
    except (UnknownLayout, ValueError):
        return named
    names = {*_names(forward)}
    if len(arguments) == 1 and arguments[0].kind is arguments[0].POSITIONAL_OR_KEYWORD:
        with suppress(UnknownLayout):
            return "mlp" if mlp_of(forward).gate is None else "gated_mlp"
        with suppress(UnknownLayout):
            return norm_of(cls).kind
        if "Norm" in name and not names.union(_names(getattr(cls, "_norm", None))).isdisjoint(EPS):
            return "layer_norm" if "LayerNorm" in name else "rms_norm"
        is_mlp = named == "gated_mlp" and names.isdisjoint(OF_EXPERTS)
        return ("gated_mlp" if GATE in names else "mlp") if is_mlp else None
    if not OF_LAYER.isdisjoint(names) and takes_cache(forward):
        return "add_rms_norm"
    return "rope" if rotation_name(forward) is not None else None


def _has_text(cls: type) -> bool:
    """Whether a model takes text beside something else, as its config has it; and not to encode it."""
    return "text_config" in getattr(getattr(cls, "config_class", None), "sub_configs", {})


def _names(function: Callable | None) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return () if code is None else code.co_names


# --- on tensors without numbers


@functools.cache
def mlp_of(forward: Callable) -> MLPNames:
    """The names of an MLP's submodules, whichever they are. Raises UnknownLayout unless a forward is that of an MLP."""
    check_origin(forward)
    recorder = ForwardRecorder()
    result = recorder.run(forward, recorder.argument("x"))
    made = recorder.node(result) if isinstance(result, torch.Tensor) else None
    after = dropout = None
    match made:
        case Node("dropout", (Node() as inner, StandIn() as dropout, StandIn(_code="self.training"), False)):
            made = inner
    parts = _parts_of_mlp(made)
    if not parts:
        match made:
            case Node(after, (Node() as inner,)):  # a module called on what it computes, as nn.Dropout
                parts = _parts_of_mlp(inner)
    if not parts:
        raise UnknownLayout(f"unknown layout of its forward, which computes {recorder.codes_of(result)}")
    return MLPNames(*(None if part is None else member_name(str(part)) for part in (*parts, dropout, after)))


def _parts_of_mlp(made: Node | None) -> tuple[str | None, ...]:
    """The names of down, act, gate and up, as a forward calls them; none of what is no MLP."""
    match made:
        case Node(down, (Node("mul", (a, b)),)):
            for activated, other in ((a, b), (b, a)):
                match activated, other:
                    case Node(act, (Node(gate, (Node("x"),)),)), Node(up, (Node("x"),)):
                        return down, act, gate, up
                    case (
                        Node(act, (Node("chunk", (Node(gate, (Node("x"),)) as packed, 2, -1), {"index": 0}),)),
                        Node("chunk", (same, 2, -1), {"index": 1}),
                    ) if same is packed:
                        return down, act, gate, None
        case Node(down, (Node(act, (Node(up, (Node("x"),)),)),)):
            return down, act, None, up
    return ()


# --- on numbers

_NORMS = [
    NormOptions("rms_norm", "", offset, cast, weight)
    for offset, cast, weight in ((0, True, True), (0, False, True), (1, False, True), (1, True, True), (0, True, False))
]
_NORMS += [
    NormOptions("layer_norm", "", offset, has_weight=has_weight, has_bias=has_bias)
    for offset, has_weight, has_bias in ((0, True, True), (0, True, False), (1, True, True), (0, False, False))
]


def apply_norm(options: NormOptions, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    if options.kind == "layer_norm":
        return layer_norm(x, weight, bias, eps, weight_offset=options.weight_offset)
    return rms_norm(x, weight, eps, weight_offset=options.weight_offset, cast_before_weight=options.cast_before_weight)


def norm_of(cls: type) -> NormOptions:
    """What the forward of a norm computes, rounding order included. Raises UnknownLayout for none of _NORMS."""
    return _norm_of(cls, cls.forward)


@functools.cache
def _norm_of(cls: type, forward: Callable) -> NormOptions:
    check_origin(forward, ("transformers", "torch"))
    x = torch.linspace(-1.5, 2.5, 256, device="cpu").view(4, 64)
    x = x * x.flip(-1).exp()  # no row is symmetric, or has a mean near 0
    norm = cls.__new__(cls)
    nn.Module.__init__(norm)
    norm.normalized_shape = (64,)
    norm.weight, norm.bias = (
        nn.Parameter(torch.linspace(*ends, 64, device="cpu"), requires_grad=False) for ends in ((0.3, 1.7), (-0.6, 0.8))
    )
    vars(norm).update(zip(EPS, (0.25, 0.2), strict=True))  # large, so that their place in the formula matters
    try:
        return norm_of_module(norm, x)[0]
    except UnknownLayout:
        raise
    except Exception as error:  # it has other members
        raise UnknownLayout(f"unknown layout of its forward ({type(error).__name__}: {error})") from error


def norm_of_module(module: nn.Module, x: torch.Tensor) -> tuple[NormOptions, str | None, str | None, float]:
    """What a norm computes of float32 x, the names of its weight and its bias, and its eps. That may be an attribute of
    any name, or a number of the forward's own, which has no name."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if len(names) > 2 or any(module._parameters[name].shape != x.shape[-1:] for name in names):
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


def _best_norm(runs: dict[str, list[tuple]]) -> NormOptions:
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


def _agreement(options: NormOptions, x: torch.Tensor, weight: Any, bias: Any, eps: float, found: torch.Tensor) -> float:
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
    values = getattr(inspect.unwrap(forward), "__globals__", {})
    names = (name for name in _names(forward) if "rotary" in name)
    return next((name for name in names if isinstance(values.get(name), types.FunctionType)), None)


# All that have a kernel, the simple ones first: interleaved or not, by which table, in float32, keeping the dtype.
ROTATIONS = [
    Rotation("", *values)
    for values in itertools.product((False, True), ("elements", "half", "pairs"), (False, True), (False, True))
]


def rotate(options: Rotation, q, k, cos, sin, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by `llmkernels.rope`; unsqueeze_dim is the dim of the heads in them."""
    dtype, width = q.dtype, cos.shape[-1]
    if options.float32:
        q, k, cos, sin = q.float(), k.float(), cos.float(), sin.float()
    if options.table == "half":
        cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    layout = "bhtd" if unsqueeze_dim == 1 else "bthd"
    q, k = rope(q, k, cos, sin, layout=layout, interleaved=options.interleaved, rotary_dim=options.dim(width))
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
    for rotation in ROTATIONS:
        if all(_same_rotation(rotation, *run) for run in runs):
            partial = any(not rotation.takes(cos.shape[-1], q.shape[-1]) for (q, _, cos, *_), _ in runs)
            return replace(rotation, name=name, partial=partial)
    raise UnknownLayout(f"its {name} computes a rotation that has no kernel")


def _same_rotation(options: Rotation, arguments: tuple, found: Any) -> bool:
    q, _, cos, *_ = arguments
    return (
        options.dim(cos.shape[-1]) <= q.shape[-1]
        and isinstance(found, tuple)
        and len(found) == 2
        and all(
            theirs.dtype == ours.dtype
            and theirs.shape == ours.shape
            and torch.allclose(theirs, ours, rtol=1e-6, atol=1e-7)
            for theirs, ours in zip(found, rotate(options, *arguments), strict=True)
        )
    )
