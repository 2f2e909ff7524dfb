"""What the op files share: how a public function reaches its op, and how an op gets its fake.

What is used of torch that is not public is imported below, and known of the releases up to NEWEST_TORCH. Where torch is
newer, or lacks a part of it, the ops go the public way: torch.library differentiates them, and fakes leave the checks
to the ops. Who asks then whether somebody transforms or batches is told yes, for which every op has a way that is
right, if slower.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from numbers import Integral, Number, Real
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from llmkernels._library import NEWEST_TORCH, parse_version

try:
    from torch._C import (
        DispatchKey,
        DispatchKeySet,
        _after_autograd_keyset,
        _are_functorch_transforms_active,
        _AutoDispatchBelowAutograd,
    )
    from torch._C._autograd import _get_current_graph_task_keep_graph
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_legacy_batchedtensor
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _current_level, _set_fwd_grad_enabled  # noqa: F401, the level is read anew
    from torch.autograd.function import _SingleLevelFunction
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map
except ImportError:
    HAS_PRIVATE = False
else:
    HAS_PRIVATE = parse_version(torch.__version__) <= parse_version(NEWEST_TORCH)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_functions: dict[str, type[Function]] = {}
_library = torch.library.Library("llmkernels", "FRAGMENT")

if HAS_PRIVATE:
    _is_transforming = _are_functorch_transforms_active  # whether inside grad, vmap, jacrev, ... of torch.func
    is_batched = is_legacy_batchedtensor  # whether autograd runs one backward for several gradients
    keeps_graph = _get_current_graph_task_keep_graph  # whether another backward may follow this one
else:

    def _is_transforming() -> bool:
        return True

    def is_batched(tensor: Tensor) -> bool:
        return True

    def keeps_graph() -> bool:
        return True


def register_autograd(name: str, backward: Callable, setup_context: Callable) -> None:
    """Differentiates op `name`, for `caller` and, as its autograd kernel, for whoever calls it through the dispatcher.

    torch.library.register_autograd would make a kernel that no transform of torch.func can be applied to, and that
    looks up the defaults of arguments for some 10 µs per recorded call.
    """
    op, no_grad = getattr(torch.ops.llmkernels, name).default, _no_grad(name)
    defaults = [argument.default_value for argument in op._schema.arguments]
    if not HAS_PRIVATE:

        def setup(ctx, inputs, output):
            setup_context(ctx, (*inputs, *defaults[len(inputs) :]), output)

        torch.library.register_autograd(f"llmkernels::{name}", backward, setup_context=setup, lib=_library)
        return

    def forward(ctx, *args):
        output = no_grad(*args)
        setup_context(ctx, args, output)
        return output

    _functions[name] = _function(name, Function, forward, backward)

    def run(keyset, args):
        with contextlib.ExitStack() as stack:
            if _is_transforming():  # one transform hands on to the next, which may differentiate, too
                stack.enter_context(torch.enable_grad())
                stack.enter_context(_set_fwd_grad_enabled(True))
            stack.enter_context(_AutoDispatchBelowAutograd())
            return op.redispatch(keyset & _after_autograd_keyset, *args)

    def forward_dispatched(ctx, *args):
        *args, keyset = args
        output = run(keyset, args)
        setup_context(ctx, args, output)
        return output

    def backward_dispatched(ctx, *grads):
        return *backward(ctx, *grads), None

    dispatched = _function(name, Function, forward_dispatched, backward_dispatched)
    transformed = _function(name, _SingleLevelFunction, forward_dispatched, backward_dispatched)

    def kernel(keyset, *args):
        args = (*args, *defaults[len(args) :])  # the dispatcher leaves out what is as by default
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, args)
        if not (torch.is_grad_enabled() and _requires_grad(args)):
            return run(keyset, args)
        if not _is_transforming():
            return dispatched.apply(*args, keyset)
        with enable_single_level_autograd_function():
            return transformed.apply(*args, keyset)

    _library.impl(name, kernel, "Autograd", with_keyset=True)


def _function(name: str, base: type, forward: Callable, backward: Callable) -> type:
    return type(name, (base,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def register_vmap(name: str, at_once: Callable) -> None:
    """How vmap runs op `name`: as `at_once(op, size, dims, *args)` does, or one by one where that returns None.

    `size` is that of the batch, `dims` has its dimension in each argument, None where all of the batch share one.
    Returned are the results of the op and the batch's dimension in each.
    """
    op = getattr(torch.ops.llmkernels, name).default
    defaults = [argument.default_value for argument in op._schema.arguments]

    def batched(size, dims, args):
        found = at_once(op, size, dims, *args)
        if found is not None:
            return found
        columns = [[x] * size if dim is None else x.unbind(dim) for x, dim in zip(args, dims, strict=True)]
        results = [op(*row) for row in zip(*columns, strict=True)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), tuple(0 for _ in results[0])

    def rule(info, dims, *args):
        size, missing = info.batch_size, defaults[len(args) :]
        dims, args = (*dims, *(None for _ in missing)), (*args, *missing)
        if size:
            return batched(size, dims, args)
        # An empty batch has no sample to tell the shapes of the results: they are those of zeros, which are cut off.
        args = [x if dim is None else _with_zeros(x.movedim(dim, 0)) for x, dim in zip(args, dims, strict=True)]
        results, out_dims = batched(1, [None if dim is None else 0 for dim in dims], args)
        if isinstance(results, Tensor):
            return _cut_off(results, out_dims), out_dims
        return tuple(map(_cut_off, results, out_dims)), out_dims

    torch.library.register_vmap(f"llmkernels::{name}", rule)


def _with_zeros(x: Tensor) -> Tensor:
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))


def _cut_off(result: Tensor, dim: int | None) -> Tensor:
    return result if dim is None else result.narrow(dim, 0, 0)


def batched_rows(*rows: int) -> Callable:
    """For register_vmap: the arguments at `rows` and the results are (..., N), so a batch is only more rows, unless a
    sample is a scalar, which has none."""

    def at_once(op, size, dims, *args):
        if any(dim is not None for i, dim in enumerate(dims) if i not in rows):
            return None
        args = [
            batch_first(x, dim, size) if i in rows else x for i, (x, dim) in enumerate(zip(args, dims, strict=True))
        ]
        if any(args[i] is not None and args[i].dim() < 2 for i in rows):
            return None
        results = op(*args)
        return results, 0 if isinstance(results, Tensor) else tuple(0 for _ in results)

    return at_once


def batch_first(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """x with the batch as its first dimension; repeated if it has none."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _no_grad(name: str) -> Callable:
    """The overload of op `name` without an autograd kernel; _op is what calling it calls, one Python frame deeper."""
    return getattr(torch.ops.llmkernels, name).no_grad._op


def caller(name: str) -> Callable:
    """The function that calls op `name`, with all of its arguments, past its autograd kernel.

    That kernel is Python and costs about 4 µs even when there is nothing to record. Compilers, exporters, transforms of
    torch.func and anything else that traces see the plain op.
    """
    op = getattr(torch.ops.llmkernels, name).default
    if not HAS_PRIVATE:
        return op
    no_grad = _no_grad(name)
    is_grad_enabled, is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling

    def call(*args):
        if is_compiling() or _is_transforming():
            return op(*args)
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, args)
        if is_grad_enabled() and _requires_grad(args):
            return _functions[name].apply(*args)
        return no_grad(*args)

    return call


def _requires_grad(args) -> bool:
    for argument in args:  # noqa: SIM110, a generator would cost a microsecond
        if isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def refuse_gradients(op: str, message: str, **inputs: Tensor) -> None:
    """For what has no gradient: refuse inputs that need one. `message` may name the input, as {name}."""
    if torch.is_grad_enabled():
        for name, tensor in inputs.items():
            if tensor.requires_grad or (HAS_PRIVATE and _is_transforming() and _is_differentiated(tensor)):
                raise RuntimeError(f"{op}: {message.format(name=name)}")
    if not HAS_PRIVATE or forward_ad._current_level >= 0:
        _refuse_tangents(op, inputs.values())


def _is_differentiated(tensor: Tensor) -> bool:
    """Whether a transform of torch.func wants its gradient, also one around a vmap, which hides it."""
    while not tensor.requires_grad and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad


def _refuse_tangents(name: str, args) -> None:
    """Forward-mode differentiation would take the result for a constant."""
    for argument in args:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise RuntimeError(f"{name}: forward-mode differentiation is not supported, only reverse mode")


def public(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """A public function whose errors have the right type.

    TypeError: an argument is of another kind than its annotation says, None for a tensor included. ValueError: a number
    or a word that the op refuses. Each names the function, also where the op below it has another name. It looks only
    once something has failed, so it costs nothing where all is well.
    """
    signature = inspect.signature(function)
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(function)
    def call(*args: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
        if is_compiling():
            return function(*args, **named)
        try:
            return function(*args, **named)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            _explain(function.__name__, signature, args, named, error)
            raise

    return call


_KINDS = {
    Tensor: ("a tensor", lambda value: isinstance(value, Tensor)),
    torch.Generator: ("a torch.Generator", lambda value: isinstance(value, torch.Generator)),
    float: ("a number", lambda value: isinstance(value, Real)),
    int: ("an integer", lambda value: isinstance(value, Integral)),
    bool: ("a bool", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
    torch.dtype: ("a torch.dtype", lambda value: isinstance(value, torch.dtype)),
    NoneType: ("None", lambda value: value is None),
    tuple[int, int]: (
        "a pair of integers",
        lambda value: isinstance(value, tuple | list) and [isinstance(x, Integral) for x in value] == [True, True],
    ),
}


def _explain(op: str, signature: inspect.Signature, args: tuple, named: dict, error: Exception) -> None:
    try:
        given = signature.bind(*args, **named).arguments
    except TypeError:  # an argument is missing or unknown: Python's own error names it
        return
    for name, value in given.items():
        annotation = signature.parameters[name].annotation
        kinds = [_KINDS[kind] for kind in (get_args(annotation) if isinstance(annotation, UnionType) else [annotation])]
        if not any(accepts(value) for _, accepts in kinds):
            expected = " or ".join(text for text, _ in kinds)
            got = repr(value) if value is None or isinstance(value, str | Number | tuple) else type(value).__name__
            raise TypeError(f"{op}: {name} must be {expected}, got {got}") from None
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, Integral) and not -(2**63) <= number < 2**63:
                raise ValueError(f"{op}: {name} must fit in 64 bits, got {value}") from None
    told = re.match(r"(\w+)(: (\w+) (?:must|is) .*)", str(error), re.DOTALL)
    if told is None or type(error) not in (RuntimeError, ValueError):  # ValueError: of a public function below
        return
    by, rest, culprit = told.groups()
    message = f"{op if hasattr(torch.ops.llmkernels, by) else by}{rest}"
    if isinstance(given.get(culprit), Number | str | torch.dtype):
        raise ValueError(message) from None
    if message != str(error):
        raise type(error)(message) from None


def register_fake(name: str, fake: Callable, overloads: tuple[str, ...] = ("", ".no_grad")) -> None:
    """Shape inference of op `name`, after the checks of its binding; a differentiable one has two overloads."""
    op = getattr(torch.ops.llmkernels, name).default

    @functools.wraps(fake)
    def checked(*args, **named):
        _check(op, args, named)
        return fake(*args, **named)

    for overload in overloads:
        torch.library.register_fake(f"llmkernels::{name}{overload}", checked)
    if any(argument.is_write for argument in op._schema.arguments):
        for key in ("Negative", "Conjugate"):
            _library.impl(name, functools.partial(_resolve_views, op), key)


def _resolve_views(op: torch._ops.OpOverload, *args, **named):
    """Calls an op that writes, where an argument is a view that is negated or conjugated whenever somebody reads it.

    Those that are only read are resolved. torch's fallback would write to a copy of the others, and end the process
    where the op returns nothing.
    """
    for argument, name, tensor in _tensors(op, args, named):
        if argument.is_write and (tensor.is_neg() or tensor.is_conj()):
            raise RuntimeError(
                f"{op._schema.name.removeprefix('llmkernels::')}: {name} must not be a view that is negated or "
                "conjugated when it is read, as it is written to; resolve_neg() and resolve_conj() give a copy"
            )
    return op(*map(_resolved, args), **{name: _resolved(value) for name, value in named.items()})


def _resolved(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_resolved(element) for element in value]
    return value.resolve_conj().resolve_neg() if isinstance(value, Tensor) else value


def _tensors(op: torch._ops.OpOverload, args: tuple, named: dict) -> list[tuple[torch.Argument, str, Tensor]]:
    """Each tensor that an op gets, with its argument and its name: `weight`, or `weights[2]` in a list."""
    arguments = {argument.name: argument for argument in op._schema.arguments}
    tensors = []
    for name, value in (dict(zip(arguments, args, strict=False)) | named).items():
        if isinstance(value, Tensor):
            tensors.append((arguments[name], name, value))
        elif isinstance(value, list | tuple):
            elements = ((f"{name}[{i}]", x) for i, x in enumerate(value) if isinstance(x, Tensor))
            tensors += [(arguments[name], *element) for element in elements]
    return tensors


def _check(op: torch._ops.OpOverload, args: tuple, named: dict) -> None:
    """Refuse what the op refuses, by its own words: the binding itself gets tensors without memory and only checks.

    A dynamic size stands for what it is in the example at hand. Where a size is not known at all nothing is checked:
    the binding does that once more whenever the op runs.
    """
    _check_devices(op, args, named)  # which tensors without memory have no more; also where only some are on meta
    if not HAS_PRIVATE:
        return
    with _disable_current_modes(), contextlib.suppress(_UnknownSize):
        args, named = tree_map(_without_memory, (args, named))
        op.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **named)


class _UnknownSize(Exception):
    pass


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes, strides = ([_without_memory(x) for x in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if not value.node.has_hint():
            raise _UnknownSize
        return value.node.hint
    return value


def _check_devices(op: torch._ops.OpOverload, args: tuple, named: dict) -> None:
    """As check_tensors() in csrc/torch/binding.h does it with real tensors, and its to_dtype()."""
    name = op._schema.name.removeprefix("llmkernels::")
    tensors = [(argument, tensor) for _, argument, tensor in _tensors(op, args, named)]
    (first, model), *_ = tensors
    for argument, tensor in tensors:
        if tensor.device != model.device:
            raise RuntimeError(
                f"{name}: {argument} must be on the device of {first}, {model.device}, got {tensor.device}"
            )
    if model.is_cuda and model.dtype == torch.float64:
        raise RuntimeError(f"{name}: {first} is float64, which is supported on the CPU only")


class _Refusal(Function):
    """Passes gradients on. Differentiating them again is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count, *tensors):
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("an op of llmkernels can be differentiated once: there is nothing to differentiate again")

    jvp = backward


class _ReadOnce:
    """The context of a backward, with its saved tensors: checkpointing does not let them be read twice."""

    def __init__(self, ctx):
        self.__dict__.update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    def __setattr__(self, name, value):
        setattr(self._ctx, name, value)


def differentiable_once(backward: Callable) -> Callable:
    """A backward whose gradients, if asked to be differentiable, depend on what they were made from by an error.

    torch's once_differentiable cuts that connection, so gradients of a sum lack the second derivative silently.
    """

    @functools.wraps(backward)
    def wrapped(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _ReadOnce(ctx)
        with torch.no_grad():
            results = backward(ctx, *grads)
        sources = [t for t in (*grads, *ctx.saved_tensors) if isinstance(t, Tensor)]
        if not _is_transforming():  # else another transform than the first may need the gradient
            sources = [t for t in sources if t.requires_grad]
        found = [result for result in _tuple(results) if isinstance(result, Tensor)]
        if not sources or not found:
            return results
        tied = iter(_Refusal.apply(len(found), *found, *sources))
        tied = tuple(next(tied) if isinstance(result, Tensor) else result for result in _tuple(results))
        return tied if isinstance(results, tuple) else tied[0]

    return wrapped


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives what is multiplied, in linear layers and attention; None where it is off."""
    device = "cuda" if x.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device) or not (x.is_cuda or x.is_cpu):
        return None
    return torch.get_autocast_dtype(device)


def narrowed_by_autocast(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as autocast hands them to a product. It leaves float64 and other devices alone."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, *others

    def cast(tensor):
        casts = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if casts and tensor.device == x.device else tensor

    return tuple(map(cast, (x, *others)))


def widened_by_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as autocast on a GPU hands them to the functions that it wants in float32: softmax, norms, powers."""
    if not (tensors[0].is_cuda and torch.is_autocast_enabled("cuda")):
        return tensors
    narrow = (torch.float16, torch.bfloat16)
    return tuple(t.float() if t is not None and t.is_cuda and t.dtype in narrow else t for t in tensors)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Turns autocast off for a device. There is none for tensors on meta, where asking for it is an error."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def common_dtype(op: str, **tensors: Tensor | None) -> torch.dtype:
    """The dtype that eager PyTorch arrives at from those of the tensors. Raises RuntimeError, as the ops do, for what
    they never take."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    for name, dtype in dtypes.items():
        if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize == 1):
            got = str(dtype).removeprefix("torch.")
            raise RuntimeError(f"{op}: {name} must be float32, float16, bfloat16 or float64, got {got}")
    return functools.reduce(torch.promote_types, dtypes.values())


def added(op: str, x: Tensor, residual: Tensor) -> Tensor:
    """x + residual, of which `op` expects one shape and device: PyTorch would broadcast them."""
    if residual.device != x.device:
        raise RuntimeError(f"{op}: residual must be on the device of x, {x.device}, got {residual.device}")
    if residual.shape != x.shape:
        expected, got = list(x.shape), list(residual.shape)
        raise RuntimeError(f"{op}: residual must have the shape of x, {expected}, got {got}")
    return x + residual


def _tuple(results: Tensor | tuple) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def contiguous_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of the shape, dtype and device of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
