"""Linear layers of quantized weights as modules."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from llmkernels.nn._casts import moving_only
from llmkernels.ops import fp8_linear, fp8_quantize, int8_linear, int8_quantize
from llmkernels.ops._common import narrowed_by_autocast
from llmkernels.ops.fp8 import FP8_DTYPES

Layer = TypeVar("Layer", bound="_QuantizedLinear")


class _QuantizedLinear(nn.Module):
    """What these layers share: a weight and its scales as buffers, made of a ``torch.nn.Linear`` or of its state dict.

    A class says what a weight is quantized to, and by what.
    """

    QUANTIZED: ClassVar[tuple[torch.dtype, ...]]  # what a weight in a state dict may be; the first is a new module's
    SCALES: ClassVar[tuple[int, ...]]  # the shape of those of a row
    quantize: ClassVar[Callable[[Tensor], tuple[Tensor, Tensor]]]

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        own, *_ = self.QUANTIZED
        self.register_buffer("weight", torch.zeros(out_features, in_features, device=device, dtype=own))
        self.register_buffer("weight_scale", torch.ones(out_features, *self.SCALES, device=device, dtype=torch.float32))
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls: type[Layer], linear: nn.Linear, **options: Any) -> Layer:
        """The quantized copy of a linear layer, on its device and in its mode. It shares no memory with it. `options`
        are the arguments that the class has beside those of ``torch.nn.Linear``."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}: linear must be a torch.nn.Linear, got {type(linear).__name__}")
        if type(linear).forward is not nn.Linear.forward:  # such as RMSNormLinear, whose norm would be lost
            raise TypeError(
                f"{cls.__name__}: linear must have the forward of torch.nn.Linear, {type(linear).__name__} has its own"
            )
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            **options,
        )
        module.weight, module.weight_scale = cls.quantize(linear.weight.detach())
        if linear.bias is not None:
            with torch.no_grad():
                module.bias.copy_(linear.bias)
            module.bias.requires_grad_(linear.bias.requires_grad)
        return module.train(linear.training)

    def dequantize(self) -> Tensor:
        """The weight as float32."""
        return self.weight.float() * self.weight_scale.view(-1, 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_QuantizedLinear":
        return super()._apply(moving_only((self.weight, self.weight_scale), fn), recurse)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor):
            if weight.dtype not in self.QUANTIZED and prefix + "weight_scale" not in state_dict:
                weight, scale = type(self).quantize(weight.detach())
                state_dict = state_dict | {prefix + "weight": weight, prefix + "weight_scale": scale}
            if weight.dtype in self.QUANTIZED:  # copied into another format it would lose its range, or digits
                self.weight = self.weight.to(weight.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class FP8Linear(_QuantizedLinear):
    """:func:`llmkernels.fp8_linear` with a weight of its own, in place of a ``torch.nn.Linear`` for inference.

    The weight is float8_e4m3fn with a float32 scale per output channel; x is quantized per token at every call. A new
    module's weight is zero: make one by :meth:`from_linear`, or load a state dict, which may be that of a
    ``torch.nn.Linear``: its weight is quantized then. One of float8_e5m2 makes the module's weight such, too.

    Args:
        in_features, out_features, bias: as in ``torch.nn.Linear``.
        use_fast_accum: see :func:`llmkernels.fp8_linear`.
        dtype: that of the bias.

    Buffers: ``weight`` (out_features, in_features), ``weight_scale`` (out_features, 1). They keep their dtypes when the
    module is cast. Parameter: ``bias`` (out_features,).
    Shape: (..., in_features) to (..., out_features), of the dtype of x: float32, float16 or bfloat16. Under autocast x
    and bias are cast as those of ``torch.nn.Linear``.
    """

    QUANTIZED = tuple(FP8_DTYPES)
    SCALES = (1,)
    quantize = staticmethod(fp8_quantize)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        use_fast_accum: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.use_fast_accum = use_fast_accum

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, use_fast_accum: bool = False) -> "FP8Linear":
        """The quantized copy of a linear layer, on its device and in its mode. It shares no memory with it."""
        return super().from_linear(linear, use_fast_accum=use_fast_accum)

    def forward(self, x: Tensor) -> Tensor:
        x, bias = narrowed_by_autocast(x, self.bias)
        q, scale = fp8_quantize(x)
        return fp8_linear(
            q, self.weight, scale, self.weight_scale, bias, out_dtype=x.dtype, use_fast_accum=self.use_fast_accum
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, use_fast_accum={self.use_fast_accum}"


class Int8Linear(_QuantizedLinear):
    """:func:`llmkernels.int8_linear` with a weight of its own, in place of a ``torch.nn.Linear``: few tokens read half
    the bytes, or a quarter of float32's.

    The weight is int8 with a float32 scale per output channel; x is as it is. A new module's weight is zero: make one
    by :meth:`from_linear`, or load a state dict, which may be that of a ``torch.nn.Linear``: its weight is quantized
    then. Gradients flow to x and to the bias, so that adapters beside a frozen weight learn.

    Args:
        in_features, out_features, bias: as in ``torch.nn.Linear``.
        dtype: that of the bias.

    Buffers: ``weight`` (out_features, in_features), ``weight_scale`` (out_features,). They keep their dtypes when the
    module is cast. Parameter: ``bias`` (out_features,).
    Shape: (..., in_features) to (..., out_features), of the dtype of x: float32, float16 or bfloat16. Under autocast x
    and bias are cast as those of ``torch.nn.Linear``.

    >>> layer = Int8Linear.from_linear(nn.Linear(64, 32))
    >>> layer(torch.randn(2, 64)).shape
    torch.Size([2, 32])
    """

    QUANTIZED = (torch.int8,)
    SCALES = ()
    quantize = staticmethod(int8_quantize)

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.weight_scale, self.bias)
