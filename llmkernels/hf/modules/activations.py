"""The functions that compute an activation, or the product with it where it has a gate, in place of its module."""

import functools
from collections.abc import Callable

import torch

from llmkernels.ops.activation import CLASSES, bias_act, glu

from ..classes.origin import hold, names_of

# What reports call them: the functions of these activations.
_NAMES = {
    glu: {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "relu2": "relu2_glu"},
    bias_act: {"gelu": "bias_gelu", "gelu_pytorch_tanh": "bias_gelu", "relu2": "relu2"},
}


def unit_of(activation: Callable, gated: bool) -> Callable | None:
    """The function for activation(gate) * up, or for activation(x); None where there is none."""
    cls = type(activation)
    name = CLASSES.get((cls.__module__, cls.__name__))
    # The functions that it calls have to be those that it called when it was first seen.
    if name is None or not (torch.compiler.is_compiling() or hold(_first_calls(cls.forward, cls))):
        return None
    return functools.partial(glu if gated else bias_act, activation=name)


_first_calls = functools.cache(names_of)


def op_name(unit: functools.partial) -> str:
    return _NAMES[unit.func].get(unit.keywords["activation"], unit.func.__name__)
