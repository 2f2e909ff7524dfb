"""The products of a model's layers in FP8, for its prompts: `patch(model, fp8=True)`.

    parts          the description of a model, which steps run by
    parts.fp8()    the same with a copy of each weight of the layers in float8_e4m3fn, and a scale for each of its rows

The first prompt makes the copies. They are made again, in the same memory, where a weight may have been written since:

    an op wrote it in place              PyTorch counts such writes as versions of the parameter
    an optimizer made a step             noted by a hook: PyTorch's fused optimizers do not count
    a forward had gradients              callers/forward.py frees the copies: optimizers of others may write anyhow
    the model is another than described  it gets another description

Nobody sees a weight that is written otherwise: through `.data`, by a CUDA graph or a kernel that does not count. After
that the user has to call `llmkernels.release`.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..errors import NoStep
from ..model.description import Description, Layer, Product, with_products
from .alias import alias

_DTYPES = {torch.bfloat16, torch.float16}  # in others there is nothing to win: a GPU runs prompts by the modules
_LEAST_CAPABILITY = 8, 9  # of a GPU with products of FP8
_ops = torch.ops.llmkernels


def with_fp8(cls: type, parts: Description, owning: Description) -> Description:
    """The description of a model of a patched class with its `fp8`, if that was asked for and can be. `owning` is the
    same with the parameters."""
    is_wanted = getattr(cls, "prompts_in_fp8", False) and obstacle(owning) is None
    return dataclasses.replace(parts, fp8=Fp8Weights(parts, owning)) if is_wanted else parts


def obstacle(parts: Description) -> str | None:
    """Why prompts can not run in FP8, or None."""
    device, dtype = parts.weight.device, parts.weight.dtype
    if dtype not in _DTYPES:
        return f"the weights are {dtype}"
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, numbers)) for numbers in (capability, _LEAST_CAPABILITY))
        return f"the GPU has compute capability {found}, and products of FP8 need {least}"
    if any(product.adapters for product, _ in _products(parts)):
        return "the weights have adapters beside them"
    if any(parameter.is_inference() for product, _ in _products(parts) for parameter in _parameters(product)):
        return "a weight was made in inference mode, where PyTorch does not count changes"
    return None


class Fp8Weights:
    """Makes the description of a model for prompts. A call returns it, for the current stream, and what keeps its
    memory. Raises NoStep where there is no memory for the copies."""

    def __init__(self, parts: Description, owning: Description):
        self._parts = parts
        self._parameters = [
            weakref.ref(parameter) for product, _ in _products(owning) for parameter in _parameters(product)
        ]
        self._lock = threading.Lock()
        self._steps = 0  # of optimizers that have these parameters
        self._forget()
        _watch_optimizers()
        _LIVING.add(self)

    def _forget(self) -> None:
        self._copies: list[Product] = []
        self._made: Description | None = None
        self._made_of: list[int] | None = None  # the state of the parameters
        self._made_on: Any = None  # a stream, and an event behind what made them
        self._streams: set[int] = set()  # that read them
        self._refusal: str | None = None

    def release(self) -> None:
        """Free the copies. A prompt under way keeps them."""
        with self._lock:
            self._forget()

    @property
    def nbytes(self) -> int:
        """The memory of the copies now."""
        return sum(x.nbytes for copy in self._copies for x in (copy.weight, copy.scale))

    def __call__(self) -> tuple[Description, list[Product]]:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._refusal is not None:
                raise NoStep(self._refusal)
            state = self._state()  # first: what is written from here on is seen by the next call
            if state != self._made_of:
                self._make()
                self._made_of = state
            self._share()
            return self._made, self._copies

    def _state(self) -> list[int]:
        """Another one than before where a parameter may have been written."""
        try:
            return [self._steps, *(parameter()._version for parameter in self._parameters)]
        except AttributeError:  # of None
            raise NoStep("a weight of the model is being replaced") from None

    def _make(self) -> None:
        device = self._parts.weight.device
        try:
            if self._made is None:
                self._copies = [_quantized(*product) for product in _products(self._parts)]
                self._made = _with_copies(self._parts, self._copies)
            else:
                for copy, product in zip(self._copies, _products(self._parts), strict=True):
                    _overwrite(copy, _quantized(*product))
        except torch.OutOfMemoryError:
            self._forget()
            self._refusal = "there was no memory for the weights in FP8, until llmkernels.release(model)"
            raise NoStep(self._refusal) from None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._made_on = stream, stream.record_event()
            self._streams = self._streams or {stream.cuda_stream}

    def _share(self) -> None:
        """Let the current stream read the copies: when they are made, and until it is done with them."""
        if self._made_on is None:
            return
        stream = torch.cuda.current_stream(self._parts.weight.device)
        made_on, event = self._made_on
        if stream != made_on:
            stream.wait_event(event)
        if stream.cuda_stream not in self._streams:
            for copy in self._copies:
                copy.weight.record_stream(stream)
                copy.scale.record_stream(stream)
            self._streams.add(stream.cuda_stream)

    def note_step(self, written: set[int]) -> None:
        """Note that an optimizer has written parameters with these ids."""
        if any(id(parameter()) in written for parameter in self._parameters):
            self._steps += 1


def _products(parts: Description) -> Iterator[tuple[Product, float]]:
    """The products of the layers, each with what its result is multiplied by before it is added to the hidden state."""
    for layer in parts.layers:
        for branch in layer.branches:
            yield branch.first, 1.0
            yield branch.last, branch.multiplier if branch.post is None else 1.0


def _parameters(product: Product) -> tuple[nn.Parameter, ...]:
    return *product.weights, *product.biases


def _quantized(product: Product, factor: float) -> Product:
    weight, scale = _ops.fp8_quantize(product.weight)
    bias = product.bias
    if factor != 1:
        scale, bias = scale * factor, None if bias is None else bias * factor
    return Product((), (), weight, bias, scale)


def _overwrite(copy: Product, made: Product) -> None:
    """Give a copy what was made of its weight now. Graphs of prompts have its addresses."""
    copy.weight.copy_(made.weight)
    copy.scale.copy_(made.scale)
    if made.bias is not None and copy.bias is not made.bias:
        copy.bias.copy_(made.bias)


def _with_copies(parts: Description, copies: list[Product]) -> Description:
    """The description with these products, as aliases: what keeps it, as a program does, does not keep their memory.
    Their scales have the multipliers of the branches, but for one behind a norm."""
    given = iter(copies)

    def next_copy(_: Product) -> Product:
        copy = next(given)
        return Product((), (), alias(copy.weight), copy.bias, alias(copy.scale))

    def with_factors(layer: Layer) -> Layer:
        branches = (
            branch if branch.post is not None else dataclasses.replace(branch, multiplier=1.0)
            for branch in layer.branches
        )
        return dataclasses.replace(layer, branches=tuple(branches))

    return dataclasses.replace(parts, layers=tuple(map(with_factors, with_products(parts.layers, next_copy))), fp8=None)


# --- steps of optimizers

_LIVING: weakref.WeakSet[Fp8Weights] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for fp8 in list(_LIVING):
        fp8.note_step(written)
