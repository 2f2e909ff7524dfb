"""A tensor whose values are computed when they are read."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function

from .._private import DisableTorchFunctionSubclass, _base, _make_wrapper_subclass, tree_map_only

# What Python may call without reading a value: what is known beforehand, and conversions to another dtype, which give
# another lazy tensor, since wrappers of models convert outputs that nobody may ever read.
_READS_NOTHING = {
    *(getattr(Tensor, name) for name in ("to", "float", "double", "half", "bfloat16")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "register_hook")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    getattr(_base, "__get__", None),
    torch.is_floating_point,
}


class LazyTensor(Tensor):
    """Passes for a tensor of this shape, dtype and device in every container, and has no memory until it is read.

    `compute` is called once at most, without gradients. Gradients reach the function of autograd that made it.
    """

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self = _make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._compute = compute
        return self

    @functools.cached_property
    def _values(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self._compute()

    @functools.cached_property
    def _read(self) -> Tensor:
        """The values as an ordinary tensor, the same one each time: what is done to it in place is done to this."""
        with torch.inference_mode(False), torch.enable_grad():
            return _Read.apply(self)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in _READS_NOTHING:
            args, kwargs = tree_map_only(LazyTensor, lambda tensor: tensor._read, (args, kwargs))
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """What comes past __torch_function__: conversions, and calls from C++."""
        kwargs = kwargs or {}
        read = functools.partial(tree_map_only, LazyTensor, lambda tensor: tensor._values)
        if function is not torch.ops.aten._to_copy.default or kwargs.get("device") is not None:
            args, kwargs = read((args, kwargs))
            return function(*args, **kwargs)
        source, *others = args
        dtype = kwargs.get("dtype") or source.dtype
        return LazyTensor(lambda: function(source._values, *others, **kwargs), source.shape, dtype, source.device)


class _Read(Function):
    """From a lazy tensor to its values."""

    @staticmethod
    def forward(ctx, lazy: LazyTensor) -> Tensor:
        return lazy._values.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad
