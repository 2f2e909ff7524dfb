"""Activations of transformers and torch, and the functions that compute them, with the product where one has a gate."""

import functools
from collections.abc import Callable

import torch

from llmkernels.ops import bias_gelu, geglu, relu2, relu2_glu, swiglu

from ..classes.origin import Name, hold, names_of


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
    # The functions that it calls have to be those that it called when it was first seen.
    if units is None or not (torch.compiler.is_compiling() or hold(_first_calls(cls, cls.forward))):
        return None, None
    return units


@functools.cache
def _first_calls(cls: type, forward: Callable) -> tuple[Name, ...]:
    return names_of(forward, cls)


def op_name(unit: Callable) -> str:
    return _OP_NAMES.get(unit, unit.__name__)
