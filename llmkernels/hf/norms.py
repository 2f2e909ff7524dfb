"""Which norm a class computes: found by trying it on a few numbers, rounding order included."""

import functools
import itertools

import torch
from torch import nn

from llmkernels.ops import layer_norm, rms_norm

from .description import NormOptions
from .layout import UnknownLayout, check_origin

_CANDIDATES = [
    NormOptions("rms", "", offset, cast) for offset, cast in itertools.product((0.0, 1.0), (True, False))
] + [NormOptions("layer", "")]
_EPS = 0.25  # large, so that its place in the formula matters


def find_norm(cls: type[nn.Module]) -> NormOptions | None:
    """The options under which our norms compute what a class of transformers' or torch's does, or None."""
    return _find(cls, cls.forward)


@functools.cache
def _find(cls, forward):
    try:
        check_origin(forward, ("transformers", "torch"))
    except UnknownLayout:
        return None
    for eps in ("variance_epsilon", "eps"):
        for options in _CANDIDATES:
            if all(_agrees(cls, eps, options, dtype) for dtype in (torch.float32, torch.bfloat16)):
                return NormOptions(options.kind, eps, options.weight_offset, options.cast_before_weight)
    return None


@torch.no_grad()
def _agrees(cls, eps: str, options: NormOptions, dtype: torch.dtype) -> bool:
    x = torch.linspace(-1.5, 2.5, 256, device="cpu").view(4, 64).to(dtype)
    weight = torch.linspace(0.3, 1.7, 64, device="cpu", dtype=dtype)
    norm = cls.__new__(cls)
    nn.Module.__init__(norm)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    norm.normalized_shape, norm.bias = (64,), None
    setattr(norm, eps, _EPS)
    if options.kind == "rms":
        expected = rms_norm(
            x, weight, _EPS, weight_offset=options.weight_offset, cast_before_weight=options.cast_before_weight
        )
    else:
        expected = layer_norm(x, weight, None, _EPS)
    try:
        found = cls.forward(norm, x)
    except Exception:  # another eps than that, or another kind of module
        return False
    # A sum may differ in its last bit, which changes few bfloat16 results or none; another rounding order many.
    agree = torch.isclose(found.float(), expected.float(), rtol=1e-5 if dtype is torch.float32 else 0, atol=1e-6)
    return found.dtype == dtype and agree.float().mean() > 0.95
