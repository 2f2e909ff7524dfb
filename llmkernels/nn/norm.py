"""RMSNorm and LayerNorm as modules."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmkernels.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class RMSNorm(nn.Module):
    """:func:`llmkernels.rms_norm` with a weight of its own; replaces ``LlamaRMSNorm`` and similar modules.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean of the squares.
        weight_offset: 1 for Gemma's (1 + w), whose weight starts at 0; else 0 with a weight that starts at 1.
        cast_before_weight: rounding order, see :func:`llmkernels.rms_norm`.

    Shape: (..., hidden_size) to the same.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        cast_before_weight: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.cast_before_weight = cast_before_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the scale (weight_offset + weight) one."""
        nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(
            x, self.weight, self.eps, weight_offset=self.weight_offset, cast_before_weight=self.cast_before_weight
        )

    def extra_repr(self) -> str:
        return (
            f"{tuple(self.weight.shape)}, eps={self.eps}, weight_offset={self.weight_offset}, "
            f"cast_before_weight={self.cast_before_weight}"
        )


class AddRMSNorm(RMSNorm):
    """:func:`llmkernels.add_rms_norm` with a weight of its own: (x, residual) to (y, x + residual)."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(
            x,
            residual,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            cast_before_weight=self.cast_before_weight,
        )


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` computed by :func:`llmkernels.layer_norm`, with its arguments, parameters and state.

    Shape: (..., *normalized_shape) to the same.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        y = layer_norm(self._rows("input", input), *self._parameters_of_columns(), self.eps)
        return y if len(self.normalized_shape) == 1 else y.view(input.shape)

    def _rows(self, name: str, x: Tensor) -> Tensor:
        dims = len(self.normalized_shape)
        if tuple(x.shape[-dims:]) != tuple(self.normalized_shape):
            expected = ", ".join(map(str, self.normalized_shape))
            raise RuntimeError(f"{type(self).__name__}: {name} must have shape [..., {expected}], got {[*x.shape]}")
        return x if dims == 1 else x.flatten(-dims)

    def _parameters_of_columns(self) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = self.weight, self.bias
        return None if weight is None else weight.flatten(), None if bias is None else bias.flatten()


class AddLayerNorm(LayerNorm):
    """:func:`llmkernels.add_layer_norm` with parameters of its own: (x, residual) to (y, x + residual)."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rows("x", x), self._rows("residual", residual)
        y, total = add_layer_norm(*rows, *self._parameters_of_columns(), self.eps)
        return (y, total) if len(self.normalized_shape) == 1 else (y.view(x.shape), total.view(x.shape))
