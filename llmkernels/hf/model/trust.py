"""Whether the modules and parameters of a model compute what they were made to: asked before they are not called.

The decode step reads weights and calls no module. That is right as long as no hook, forward or mode has to see those
calls. `Inspection` checks every module and every parameter, and remembers nothing:

    a module       its class and its class's forward are those expected; no forward of the instance and no hook that
                   does something; the children and parameters that its forward reads, and no others; in training
                   mode neither dropout nor gradient checkpointing
    a parameter    a plain nn.Parameter of a dtype and on a device, contiguous, with memory
    all around     no mode, global hook or autocast; that functions which forwards call are those expected, origin.py
                   says of all classes at once

What is left behind and does nothing is looked through: see `_does_nothing` and `calls_only_its_class`.
"""

import functools
import inspect
import types
from collections.abc import Callable, ItemsView
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._private import (
    MISSING,
    DeviceContext,
    _get_current_dispatch_mode_stack,
    _get_current_function_mode_stack,
    _has_any_global_hook,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from ..classes.effects import packages_of
from ..classes.origin import Entry, asked_of_origin, check_origin, entry
from ..errors import Distrust, NoStep, UnknownLayout
from ..modules.replaced import Patched, Replaced, foreign_class, library_class

# Modes that change no result, and need not see what is computed. DeviceContext is that of set_default_device.
OBSERVERS = {DeviceContext}

_FORWARDS = {cls: cls.forward for cls in (nn.Linear, nn.Embedding, nn.ModuleList)}
_CALLS = {name: getattr(nn.Module, name) for name in ("__call__", "_call_impl", "__getattr__")}


def check_surroundings() -> None:
    """Raise NoStep where something around a call sees or changes what is computed."""
    if MISSING:
        raise NoStep(MISSING)
    if _len_torch_function_stack() or _len_torch_dispatch_stack():
        for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
            if type(mode) not in OBSERVERS:
                raise NoStep(f"{type(mode).__name__}, an active mode, has to see what is computed")
    if _has_any_global_hook():
        raise NoStep("hooks on all modules have to see their calls")


@dataclass(frozen=True, eq=False)
class ModuleSpec:
    """What a module has to look like that computes what one of the reference does.

    `check_class(cls)` raises UnknownLayout for a class that may compute something else. `trains` says that the forward
    is another one in training mode. `numbers` are members that have a value: constants, functions. `absent` are names
    that the forward may look up on the module, and that its class has, or nothing.
    """

    check_class: Callable[[type], None]
    children: frozenset[str] | None = frozenset()  # None: any
    parameters: frozenset[str] = frozenset()
    trains: bool = False
    numbers: ItemsView[str, Any] = field(default_factory=lambda: {}.items())
    absent: frozenset[str] = frozenset()


class Inspection:
    """The checks of one call, for parameters of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.in_training: nn.Module | None = None  # the first one that is, if its forward asks for it
        self._classes: set[tuple[type, ModuleSpec]] = set()

    def module(self, module: nn.Module, spec: ModuleSpec) -> dict[str, Any]:
        """The members of a module that is as its spec says. Raises Distrust."""
        cls = type(module)
        if (cls, spec) not in self._classes:
            self._check_class(module, cls, spec)
        members = module.__dict__
        if spec.trains and members["training"]:
            if any(value for _, value in of_training(members)):
                raise Distrust(module, "{} is in training mode")
            self.in_training = self.in_training or module
        if "forward" in members and not calls_only_its_class(module, self.dtype, self.device):
            raise Distrust(module, "{} has a forward of its own")
        if not hooks_do_nothing(members):
            raise Distrust(module, "hooks on {} have to see its calls")
        if not spec.numbers <= members.items():
            _check_numbers(module, spec, members)
        if own := members.keys() & spec.absent:
            raise Distrust(module, f"{{}} has its own {min(own)}")
        if spec.children is None:
            return members
        parameters = members["_parameters"]
        if members["_modules"].keys() != spec.children or not members.keys().isdisjoint(spec.children):
            raise Distrust(module, "{} has other parts than expected")
        if parameters.keys() != spec.parameters or not members.keys().isdisjoint(spec.parameters):
            raise Distrust(module, "{} has tensors that are no parameters, or others than expected")
        for parameter in parameters.values():
            if parameter is not None:
                self._check_parameter(module, parameter)
        return members

    def _check_class(self, module: nn.Module, cls: type, spec: ModuleSpec) -> None:
        try:
            check_class(cls, spec)
        except UnknownLayout as reason:
            raise Distrust(module, f"{{}} {reason}") from None
        self._classes.add((cls, spec))

    def _check_parameter(self, module: nn.Module, parameter: Tensor) -> None:
        if type(parameter) is not nn.Parameter:
            raise Distrust(module, f"a weight of {{}} is a {type(parameter).__name__}, not a plain parameter")
        if parameter.dtype != self.dtype or parameter.device != self.device:
            raise NoStep("weights differ in dtype or device")
        if parameter.layout != torch.strided or not _is_dense(parameter) or not parameter.data_ptr():
            raise Distrust(module, "a weight of {} has no ordinary memory")


def _is_dense(parameter: Tensor) -> bool:
    """Whether its memory is its own numbers, by rows or by columns."""
    return parameter.is_contiguous() or (parameter.ndim == 2 and parameter.t().is_contiguous())


def of_training(members: dict[str, Any]) -> list[tuple[str, Any]]:
    """Those members of a module that change what it computes in training mode if they are neither 0 nor False."""
    return [
        (name, value)
        for name, value in tuple(members.items())  # another thread may patch the module meanwhile
        if name == "gradient_checkpointing" or ("dropout" in name and isinstance(value, (int, float)))
    ]


# --- classes


_ABSENT = object()


def _check_numbers(module: nn.Module, spec: ModuleSpec, members: dict[str, Any]) -> None:
    for name, value in spec.numbers:
        found = members.get(name, _ABSENT)
        if found != value and not is_same_partial(found, value):
            raise Distrust(module, f"{name} of {{}} is not what its class makes of the config")


def is_same_partial(found: Any, expected: Any) -> bool:
    if not isinstance(found, functools.partial) or not isinstance(expected, functools.partial):
        return False
    return (found.func, found.args, found.keywords) == (expected.func, expected.args, expected.keywords)


def module_spec(expected: type[nn.Module], numbers: tuple[tuple[str, Any], ...], **options: Any) -> ModuleSpec:
    """Modules that compute what this class of transformers' or torch's does, with the forward that it has.

    The same one for the same arguments.
    """
    return _spec(expected, _FORWARDS.get(expected, expected.forward), numbers, tuple(sorted(options.items())))


@functools.cache
def _spec(expected: type[nn.Module], forward: Callable, numbers: tuple, options: tuple) -> ModuleSpec:
    def check(cls: type) -> None:
        if issubclass(cls, Replaced):
            if "original" not in vars(cls):
                raise UnknownLayout("is of a class made of a patched one")
            if issubclass(cls, Patched) and (cls.forward is not cls.made or not cls.is_current()):
                raise UnknownLayout("has another forward: that of its class was replaced")
            cls = cls.original
        classes = cls, library_class(cls), foreign_class(cls)
        if cls is not expected and (expected.__module__.startswith("torch.") or expected not in classes):
            other = "another class of that name" if _name(cls) == _name(expected) else _name(expected)
            raise UnknownLayout(f"is a {_name(cls)}, not {other}")
        if cls.forward is not forward:
            raise UnknownLayout("has another forward: that of its class was replaced")
        for name in absent if cls is not expected else ():
            if inspect.getattr_static(cls, name, None) is not inspect.getattr_static(expected, name, None):
                raise UnknownLayout(f"has another {name} than {_name(expected)}")
        # The package of a class from outside of transformers, whose forward effects.py has looked at.
        check_origin(forward, ("transformers", "torch", *packages_of([expected])))

    absent = dict(options).get("absent", ())
    return ModuleSpec(check, numbers=dict(numbers).items(), **dict(options))


def check_class(cls: type, spec: ModuleSpec) -> None:
    """Raise UnknownLayout for a class of modules that may compute something else."""
    spec.check_class(cls)
    for name, original in _CALLS.items():
        if getattr(cls, name) is not original:
            check_origin(getattr(cls, name), ("transformers", "torch"))


def asked_of(cls: type) -> list[Entry]:
    """What `check_class` looks at: it finds nothing else where these are the same."""
    entries = [(cls, name, getattr(cls, name)) for name in ("__mro__", "forward", *_CALLS)]
    for name in ("forward", *_CALLS):
        entries += asked_of_origin(getattr(cls, name))
    for base in cls.__mro__[: cls.__mro__.index(library_class(cls)) + 1]:
        entries += [
            (base, "__module__", base.__module__),
            entry((vars(base).get, "original", vars(base).get("original"))),
        ]
    if issubclass(cls, Patched):
        entries += [(cls, "made", cls.made), (cls, "is_current", cls.is_current), *map(entry, cls.is_current.calls)]
    if issubclass(cls, Replaced):
        entries += asked_of(cls.original)
    return entries


def _name(cls: type) -> str:
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else f"{cls.__module__}.{cls.__name__}"


def _wrapped_by(function: Callable):
    while (function := getattr(function, "__wrapped__", None)) is not None:
        yield function


# --- leftovers


def hooks_do_nothing(members: dict[str, Any]) -> bool:
    """Whether a module with these members has no forward hook that has to see its calls."""
    hooks = members["_forward_pre_hooks"], members["_forward_hooks"]
    return all(_does_nothing(hook) for each in hooks if each for hook in each.values())


def _does_nothing(hook: Callable) -> bool:
    """Whether a forward hook can be left out: it does nothing when nobody asks, or while gradients are disabled."""
    module, name = getattr(hook, "__module__", None) or "", getattr(hook, "__name__", "")
    return module == "transformers.utils.output_capturing" or (
        name in ("make_inputs_require_grads", "make_inputs_require_grad")  # gradient checkpointing leaves it behind
        and module.split(".")[0] in ("transformers", "peft")
    )


def calls_only_its_class(module: nn.Module, dtype: torch.dtype | None = None, device: Any = None) -> bool:
    """Whether the forward set on a module comes to its class's forward.

    accelerate leaves that behind when its hooks go. With a dtype and a device of the weights, its hooks that move
    nothing and its autocast to that very dtype, which changes nothing, are looked through as well.
    """
    wrappers = _wrappers(module, _own(type(module)))
    if dtype is None:
        return wrappers == []
    return wrappers is not None and all(wrapper.adds_nothing(dtype, device) for wrapper in wrappers)


def is_of_accelerate(module: nn.Module) -> bool:
    """Whether the forward set on a module is accelerate's, which comes to its class's forward, whatever it adds."""
    return _wrappers(module, _own(type(module))) is not None


def runs_made_forward(module: nn.Module) -> bool:
    """Whether the forward set on a patched module comes to the one made for its class, and not to the original's."""
    return _wrappers(module, _forwards(type(module))) is not None


def around(module: nn.Module, inner: Callable) -> types.MethodType | None:
    """What accelerate has put around a module's forward for mixed precision, around `inner` instead.

    None where the forward set on the module is another's, or that of accelerate's hooks.
    """
    wrappers = _wrappers(module, _own(type(module)))
    is_bound = isinstance(vars(module)["forward"], types.MethodType)
    if not wrappers or not is_bound or any(wrapper.decorate is None for wrapper in wrappers):
        return None
    for wrapper in reversed(wrappers):
        inner = wrapper.decorate(inner)
    return types.MethodType(inner, module)


def _own(cls: type) -> set[Callable]:
    """The forwards that stand for a class's: its own, and where it was made here, the original's, too."""
    return _forwards(cls) | (_forwards(cls.original) if issubclass(cls, Replaced) else set())


def _forwards(cls: type) -> set[Callable]:
    return {cls.forward, *_wrapped_by(cls.forward)}


class _Wrapper(NamedTuple):
    """What accelerate or TRL has put around a forward: what it calls, whether it changes nothing for weights of a dtype
    on a device, and the decorator that made it, where that is known."""

    calls: Any
    adds_nothing: Callable[[torch.dtype, torch.device], bool] = lambda dtype, device: True
    decorate: Callable | None = None


def _wrappers(module: nn.Module, own: set[Callable]) -> list[_Wrapper] | None:
    """What the forward set on a module has around one of these, the outermost first; None where it is another's."""
    forward, found = vars(module)["forward"], []
    while forward is not None:
        if isinstance(forward, types.MethodType):
            if forward.__self__ is not module:
                return None
            forward = forward.__func__
        if type(forward) is types.FunctionType and forward in own:
            return found
        wrapper = _as_wrapper(module, forward)
        found.append(wrapper)
        forward = None if wrapper is None else wrapper.calls
    return None


_CONVERSION = "accelerate.utils.operations"  # of convert_outputs_to_fp32, which logits are converted to in any case


def _as_wrapper(module: nn.Module, forward: Any) -> _Wrapper | None:
    if isinstance(forward, functools.partial):  # add_hook_to_module
        is_hook = forward.func.__module__ == "accelerate.hooks" and forward.args == (module,)
        hook, before = vars(module).get("_hf_hook"), vars(module).get("_old_forward")
        return _Wrapper(before, lambda _, device: _moves_nothing(hook, device)) if is_hook else None
    scope, code = getattr(forward, "__globals__", {}), getattr(forward, "__code__", None)
    origin = scope.get("__name__", type(forward).__module__)
    if origin == _CONVERSION:
        converter = getattr(forward, "__wrapped__", forward)  # which the decorator puts into a function
        if type(converter).__module__ != _CONVERSION:
            return _Wrapper(getattr(forward, "model_forward", converter))
        return _Wrapper(converter.model_forward, decorate=scope.get("convert_outputs_to_fp32"))
    if origin == "trl.trainer.utils" and code.co_name == "_fused_forward":
        # Another loss, for who asks for that by an argument of TRL's own.
        return _Wrapper(_enclosed(forward, "original_forward"))
    if origin == "torch.amp.autocast_mode" and code is not None and code.co_name == "decorate_autocast":
        autocast = _enclosed(forward, "autocast_instance")

        def adds_nothing(dtype: torch.dtype, device: torch.device) -> bool:
            return not autocast._enabled or autocast.device != device.type or autocast.fast_dtype == dtype

        return _Wrapper(_enclosed(forward, "func"), adds_nothing, autocast)
    return None


def _enclosed(function: Any, name: str) -> Any:
    """A variable of the function around a function."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _moves_nothing(hook: Any, device: torch.device) -> bool:
    """Whether a hook of accelerate's leaves everything as and where it is."""
    cls = type(hook)
    if cls.__module__ != "accelerate.hooks":
        return False
    if cls.__name__ == "SequentialHook":
        return all(_moves_nothing(inner, device) for inner in hook.hooks)
    if cls.__name__ == "AlignDevicesHook":
        target = hook.execution_device
        return not hook.offload and (target is None or _device_meant(target, device.type) == device)
    return cls.__name__ == "ModelHook"


def _device_meant(target: Any, kind: str) -> torch.device:
    """The device that accelerate means: a number is an index, and cuda without an index is the current device."""
    device = torch.device(kind, target) if isinstance(target, int) else torch.device(target)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
