"""The functions that compute an activation, or the product with it where it has a gate, in place of its module."""

import functools
from collections.abc import Callable

import torch

from llmkernels.ops.activation import CLASSES, bias_act, glu

from ..classes.origin import Name, hold, names_of

# What reports call them: the functions of these activations.
_NAMES = {
    glu: {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "relu2": "relu2_glu"},
    bias_act: {"gelu": "bias_gelu", "gelu_pytorch_tanh": "bias_gelu", "relu2": "relu2"},
}


def gated_unit(activation: Callable) -> Callable | None:
    """The function for activation(gate) * up, or None."""
    return _unit(glu, activation)


def plain_unit(activation: Callable) -> Callable | None:
    """The function for activation(x), or None."""
    return _unit(bias_act, activation)


def _unit(function: Callable, activation: Callable) -> Callable | None:
    cls = type(activation)
    name = CLASSES.get((cls.__module__, cls.__name__))
    # The functions that it calls have to be those that it called when it was first seen.
    if name is None or not (torch.compiler.is_compiling() or hold(_first_calls(cls, cls.forward))):
        return None
    return functools.partial(function, activation=name)


@functools.cache
def _first_calls(cls: type, forward: Callable) -> tuple[Name, ...]:
    return names_of(forward, cls)


def op_name(unit: functools.partial) -> str:
    return _NAMES[unit.func].get(unit.keywords["activation"], unit.func.__name__)
