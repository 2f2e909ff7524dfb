"""A tensor whose values are computed when they are read."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._private import DisableTorchFunctionSubclass, _base, _make_wrapper_subclass, tree_map_only

# What Python may call without reading a value: what is known beforehand,
_READS_NOTHING = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    getattr(_base, "__get__", None),
    torch.is_floating_point,
}
# conversions to another dtype, which give another lazy tensor, since wrappers of models convert outputs that nobody may
# ever read,
_CONVERTS = {getattr(Tensor, name) for name in ("to", "float", "double", "half", "bfloat16")}
# and what is about the gradient, which is that of all that was made of it, read or not.
_OF_GRADIENT = {
    *(getattr(Tensor, name) for name in ("register_hook", "retain_grad")),
    *(Tensor.grad.__get__, Tensor.grad.__set__, Tensor.retains_grad.__get__),
}
# Called with (what is differentiated), or that and by what; the rest by name.
_DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


class LazyTensor(Tensor):
    """Passes for a tensor of this shape, dtype and device in every container, and has no memory until it is read.

    `compute` is called without gradients, and once, unless what it gave was written to before a conversion was read.
    Gradients reach the function of autograd that made it.
    """

    _first_version = 0  # of the values, as they were computed

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self = _make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._compute = compute
        return self

    @functools.cached_property
    def _values(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            values = self._compute()
        self._first_version = values._version
        return values

    @functools.cached_property
    def _read(self) -> Tensor:
        """The values as an ordinary tensor, the same one each time: what is done to it in place is done to this."""
        with torch.inference_mode(False), torch.enable_grad():
            return _Read.apply(self)

    def _is_written(self) -> bool:
        return "_values" in self.__dict__ and self._values._version != self._first_version

    def _as_computed(self) -> Tensor:
        """The values before anything was done to them in place."""
        return self._compute() if self._is_written() else self._values

    # What functions get in its place.

    def _get(self) -> Tensor:
        return self._read

    def _unless_read(self) -> Tensor:
        return self._read if "_values" in self.__dict__ else self

    def _in_graph(self) -> Tensor:
        """Whose gradient is that of the present values."""
        return self._read if self._is_written() else self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _DIFFERENTIATES:
            args = *_each(cls._get, args[:1]), *_each(cls._in_graph, args[1:])
            kwargs = {name: _each(cls._in_graph if name == "inputs" else cls._get, x) for name, x in kwargs.items()}
        elif function not in _READS_NOTHING:
            of_gradient, converts = function in _OF_GRADIENT, function in _CONVERTS
            given = cls._in_graph if of_gradient else cls._unless_read if converts else cls._get
            args, kwargs = _each(given, (args, kwargs))
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """What comes past __torch_function__: conversions, and calls from C++."""
        kwargs = kwargs or {}
        read = functools.partial(_each, lambda tensor: tensor._values)
        if function is not torch.ops.aten._to_copy.default or kwargs.get("device") is not None:
            args, kwargs = read((args, kwargs))
            return function(*args, **kwargs)
        source, *others = args
        dtype = kwargs.get("dtype") or source.dtype

        def converted() -> Tensor:
            return function(source._as_computed(), *others, **kwargs)

        return LazyTensor(converted, source.shape, dtype, source.device)


def _each(function: Callable[[LazyTensor], Tensor], arguments: Any) -> Any:
    return tree_map_only(LazyTensor, function, arguments)


class _Read(Function):
    """From a lazy tensor to its values."""

    @staticmethod
    def forward(ctx, lazy: LazyTensor) -> Tensor:
        return lazy._values.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad
