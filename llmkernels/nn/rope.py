"""Rotary position embedding as a module."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmkernels.nn._casts import moving_only
from llmkernels.ops import rope
from llmkernels.ops._common import without_autocast


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their positions: frequencies :math:`base^{-2i/R}`, then :func:`llmkernels.rope`.

    Args:
        head_dim: size of a head.
        rotary_dim: how many of its elements are rotated, R; default all.
        base: of the frequencies; rope_theta in transformers' configurations.
        interleaved, layout: see :func:`llmkernels.rope`.

    Shape: q (B, T, H, D), k (B, T, Hk, D), position_ids (T,), (1, T) or (B, T) to (q', k'). Any position is valid: cos
    and sin are computed from it in float32, then rounded to the dtype of ``q``, as transformers does. The frequencies
    stay in float32 when the module is cast.
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        base: float = 10000.0,
        interleaved: bool = False,
        layout: str = "bthd",
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= head_dim:
            raise ValueError(
                f"RotaryEmbedding: rotary_dim must be even, positive and at most head_dim, {head_dim}, "
                f"got {self.rotary_dim}"
            )
        self.base = base
        self.interleaved = interleaved
        self.layout = layout
        inv_freq = torch.empty(self.rotary_dim // 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the frequencies, which are no part of the state dict: behind ``to_empty``, too."""
        exponents = torch.arange(0, self.rotary_dim, 2, device=self.inv_freq.device, dtype=torch.float32)
        self.inv_freq.copy_(self.base ** -(exponents / self.rotary_dim))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        return super()._apply(moving_only((self.inv_freq,), fn), recurse)

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[-1] != self.head_dim:
            raise RuntimeError(f"RotaryEmbedding: q must have heads of {self.head_dim}, got shape {list(q.shape)}")
        with torch.no_grad(), without_autocast(q.device):
            angles = position_ids[..., None].float() * self.inv_freq
            cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return rope(q, k, cos, sin, layout=self.layout, interleaved=self.interleaved, rotary_dim=self.rotary_dim)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, rotary_dim={self.rotary_dim}, base={self.base}, "
            f"interleaved={self.interleaved}, layout={self.layout!r}"
        )
