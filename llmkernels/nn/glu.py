"""Gated activations and the MLP around them as modules."""

import torch
from torch import Tensor, nn

from llmkernels.ops import geglu, swiglu


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


# Names as in transformers' hidden_act.
_ACTIVATIONS = {
    "silu": SwiGLU,
    "gelu_pytorch_tanh": lambda: GEGLU("tanh"),
    "gelu": lambda: GEGLU("none"),
}


class GatedMLP(nn.Module):
    """The feed-forward block of Llama and similar models, ``down_proj(act(gate_proj(x)) * up_proj(x))``.

    Replaces ``LlamaMLP``: the parameters have the same names and shapes.

    Args:
        hidden_size, intermediate_size: sizes of the input and of the gate.
        activation: "silu", "gelu_pytorch_tanh" or "gelu".
        bias: whether the three projections have one.

    Shape: (..., hidden_size) to the same.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"GatedMLP: activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)
        self.act = _ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
