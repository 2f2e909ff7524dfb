"""RMSNorm and the linear layer after it as one module."""

import torch
from torch import Tensor, nn

from llmkernels.ops import rms_norm_linear


class RMSNormLinear(nn.Linear):
    """:func:`llmkernels.rms_norm_linear` with weights of its own: an RMSNorm followed by ``torch.nn.Linear``.

    Args:
        in_features, out_features, bias: as in ``torch.nn.Linear``.
        eps, weight_offset, cast_before_weight: see :func:`llmkernels.rms_norm`.

    Parameters: ``norm_weight`` (in_features,), ``weight`` (out_features, in_features), ``bias`` (out_features,).
    Shape: (..., in_features) to (..., out_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        cast_before_weight: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.eps = eps
        self.weight_offset = weight_offset
        self.cast_before_weight = cast_before_weight
        self.norm_weight = nn.Parameter(self.weight.new_full((in_features,), 1.0 - weight_offset))

    def reset_parameters(self) -> None:
        """Make the norm's scale (weight_offset + norm_weight) one, and the linear layer's weights random."""
        super().reset_parameters()
        if hasattr(self, "norm_weight"):  # the base class calls this before there is one
            nn.init.constant_(self.norm_weight, 1.0 - self.weight_offset)

    def forward(self, input: Tensor) -> Tensor:
        return rms_norm_linear(
            input,
            self.norm_weight,
            self.weight,
            self.bias,
            self.eps,
            weight_offset=self.weight_offset,
            cast_before_weight=self.cast_before_weight,
        )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, eps={self.eps}, weight_offset={self.weight_offset}, "
            f"cast_before_weight={self.cast_before_weight}"
        )
