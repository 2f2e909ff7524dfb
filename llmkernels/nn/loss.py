"""Cross-entropy, of logits and of hidden states, as modules."""

from typing import Any

import torch
from torch import Tensor, nn

from llmkernels.nn._plain import is_plain
from llmkernels.ops import cross_entropy, linear_cross_entropy

_SHARED = ("ignore_index", "reduction", "label_smoothing", "lse_square_scale", "softcap", "gradient_in_forward")


class _Loss(nn.Module):
    """A loss of the library as a module: the options of the function are attributes."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    lse_square_scale: float
    softcap: float
    gradient_in_forward: bool
    _names: tuple[str, ...]  # of the options

    def _set_options(self, arguments: dict[str, Any]) -> None:
        """Keeps the options among the arguments of a constructor."""
        for name in self._names:
            setattr(self, name, arguments[name])

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items())


class CrossEntropyLoss(_Loss, nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` computed by :func:`llmkernels.cross_entropy`, with its arguments and state.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in ``torch.nn.CrossEntropyLoss``.
        lse_square_scale, softcap, gradient_in_forward, inplace_backward: see :func:`llmkernels.cross_entropy`.

    Shape: (V,), (N, V) or (N, V, d1, ...) and classes of the same shape without V, to the loss, which is float32 for
    float16 and bfloat16, too. Probabilities for targets are left to PyTorch, as far as no other option is in use.
    """

    inplace_backward: bool
    _names = (*_SHARED, "inplace_backward")

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        lse_square_scale: float = 0.0,
        softcap: float = 0.0,
        gradient_in_forward: bool = True,
        inplace_backward: bool = False,
    ):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self._set_options(locals() | {"reduction": self.reduction})  # which the deprecated arguments may have decided

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            if self.lse_square_scale or self.softcap:
                raise RuntimeError("CrossEntropyLoss: target must be classes for lse_square_scale and softcap")
            return super().forward(input, target)
        return cross_entropy(
            input if input.dim() <= 2 else input.movedim(1, -1),
            target,
            self.weight,
            **self._options(),
        )


class LinearCrossEntropyLoss(_Loss):
    """:func:`llmkernels.linear_cross_entropy` with a linear layer of its own, whose logits never exist as a whole.

    Names and state are those of ``torch.nn.LinearCrossEntropyLoss`` of newer versions of PyTorch.

    Args:
        in_features, num_classes, bias: sizes of the linear layer, and whether it has a bias.
        weight: (num_classes,), a factor for each class.
        The others: see :func:`llmkernels.linear_cross_entropy`.

    Parameters: ``linear.weight`` (num_classes, in_features), ``linear.bias`` (num_classes,). A head that is tied to
    another module's weight is set as ``loss.linear.weight = embedding.weight``.
    Shape: (..., in_features) and classes (...), to the loss.

    A linear layer that has been replaced, by an adapter or a quantized layer, or that has hooks, as pruning sets, is
    called as a module, and its logits exist as a whole.
    """

    weight: Tensor | None
    max_logits_bytes: int | None
    _names = (*_SHARED, "max_logits_bytes")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float = 0.0,
        gradient_in_forward: bool = True,
        max_logits_bytes: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self._set_options(locals())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        linear, options = self.linear, self._options() | {"weight": self.weight}
        if is_plain(linear):
            return linear_cross_entropy(x, linear.weight, target, linear_bias=linear.bias, **options)
        del options["max_logits_bytes"]
        return cross_entropy(linear(x), target, **options)
