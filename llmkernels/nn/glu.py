"""Gated activations as modules, with a bias in front or without."""

import torch
from torch import Tensor, nn

from llmkernels.ops import bias_geglu, bias_swiglu, geglu, swiglu


class SwiGLU(nn.Module):
    """:func:`llmkernels.swiglu`: (gate, up), or [gate | up] packed, to silu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return swiglu(gate, up)


class GEGLU(nn.Module):
    """:func:`llmkernels.geglu`: (gate, up), or [gate | up] packed, to gelu(gate) * up."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class BiasSwiGLU(nn.Module):
    """:func:`llmkernels.bias_swiglu` behind linear layers without biases: silu(gate + bias_g) * (up + bias_u).

    Args:
        intermediate_size: F.

    Parameters: ``bias`` (2F,), that of the gate, then that of up; zeros at first.
    Shape: gate and up (..., F), or gate (..., 2F) packed as [gate | up], to (..., F).
    """

    def __init__(
        self,
        intermediate_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.intermediate_size = intermediate_size
        self.bias = nn.Parameter(torch.empty(2 * intermediate_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the bias zero."""
        nn.init.zeros_(self.bias)

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return bias_swiglu(gate, up, *_biases(self.bias, up))

    def extra_repr(self) -> str:
        return f"intermediate_size={self.intermediate_size}"


class BiasGEGLU(BiasSwiGLU):
    """:func:`llmkernels.bias_geglu` behind linear layers without biases: gelu(gate + bias_g) * (up + bias_u).

    Args:
        intermediate_size: as in :class:`BiasSwiGLU`, and so are parameters and shapes.
        approximate: "none" or "tanh", as in :func:`llmkernels.geglu`.
    """

    def __init__(
        self,
        intermediate_size: int,
        approximate: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(intermediate_size, device, dtype)
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return bias_geglu(gate, up, *_biases(self.bias, up), approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate!r}"


def _biases(bias: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    return (bias,) if up is None else bias.chunk(2)
