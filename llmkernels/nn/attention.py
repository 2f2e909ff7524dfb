"""Attention over prompts as a module."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llmkernels.nn._casts import moving_only
from llmkernels.ops import attention, attention_varlen


class Attention(nn.Module):
    """:func:`llmkernels.attention` of queries, keys and values as a module; of sequences that are packed in a row
    :func:`llmkernels.attention_varlen`. Projections and rotation are modules of their own.

    Args:
        causal, softmax_scale, window_size, softcap: see :func:`llmkernels.attention`.
        num_sinks: the number of heads, each of which learns a sink; default none.
        alibi_slopes: (H,), which the module copies; default none.

    Parameters: ``sinks`` (H,), at first 0, of any dtype: it is used in that of ``q``.
    Buffers: ``alibi_slopes`` (H,), float32, also when the module is cast; no part of the state dict.

    Shape: q (B, Tq, H, D), k and v (B, Tk, Hkv, D) to (B, Tq, H, D), with ``k_begin``, ``k_end`` and ``attn_mask`` as
    in :func:`llmkernels.attention`; or, with ``cu_seqlens_q``, q (total_q, H, D), k and v (total_k, Hkv, D) to
    (total_q, H, D).

    >>> layer = Attention(causal=True)
    >>> q, k, v = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)
    >>> layer(q, k, v).shape
    torch.Size([2, 16, 8, 64])
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        num_sinks: int | None = None,
        alibi_slopes: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.window_size = window_size
        self.softcap = softcap
        if num_sinks is None:
            self.register_parameter("sinks", None)
        else:
            self.sinks = nn.Parameter(torch.empty(num_sinks, device=device, dtype=dtype))
        slopes = self._given_slopes = None
        if alibi_slopes is not None:
            slopes = alibi_slopes.detach().to(device, torch.float32, copy=True)
            if not alibi_slopes.is_meta:
                self._given_slopes = alibi_slopes.detach().to("cpu", torch.float32, copy=True)
        self.alibi_slopes: Tensor | None
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the sinks zero, and the slopes what they were given as, for a module that was made on meta."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.alibi_slopes is not None and self._given_slopes is not None:
            self.alibi_slopes.copy_(self._given_slopes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Attention":
        return super()._apply(moving_only((self.alibi_slopes,), fn), recurse)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        k_begin: Tensor | None = None,
        k_end: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        options = {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "sinks": None if self.sinks is None else self.sinks.to(q.dtype),
            "alibi_slopes": self.alibi_slopes,
        }
        if cu_seqlens_q is None:
            if cu_seqlens_k is not None:
                raise RuntimeError("Attention: cu_seqlens_k must be given with cu_seqlens_q")
            return attention(q, k, v, k_begin=k_begin, k_end=k_end, attn_mask=attn_mask, **options)
        if not (k_begin is None and k_end is None and attn_mask is None):
            raise RuntimeError("Attention: k_begin, k_end and attn_mask must not be given with cu_seqlens_q")
        return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)

    def extra_repr(self) -> str:
        slopes = self.alibi_slopes
        facts = {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "num_sinks": None if self.sinks is None else len(self.sinks),
            "alibi_slopes": slopes if slopes is None or slopes.is_meta else slopes.tolist(),
        }
        return ", ".join(f"{name}={value}" for name, value in facts.items())
